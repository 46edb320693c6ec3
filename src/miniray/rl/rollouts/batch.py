"""The sequences of a step, which are stored without padding and padded per micro-batch.

``Rollouts`` holds the sequences of one worker in one step. ``MicroBatch`` is the argument of a
policy's ``log_probs`` and ``values``. It includes the rows, so a policy can decode their data, such
as images, for the sequences of one micro-batch at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from miniray.rl.losses import selected
from miniray.rl.rollouts.sources import Row


@dataclasses.dataclass
class Generated:
    """The return value of a policy's ``generate``, with one entry per row.

    ``prompts`` and ``responses`` are token IDs without padding: lists, or 1-D tensors on the CPU.
    ``texts`` is passed to the reward function. ``masks`` (optional) is 1 for response tokens that
    the policy sampled and 0 for other tokens, such as the output of a tool.
    """

    prompts: Sequence[Tensor | Sequence[int]]
    responses: Sequence[Tensor | Sequence[int]]
    texts: Sequence[Any]
    masks: Sequence[Tensor | Sequence[int]] | None = None


@dataclasses.dataclass
class MicroBatch:
    """A padded batch of sequences. Prompts are padded on the left, responses on the right.

    ``input_ids``, ``attention_mask`` and ``position_ids`` have shape (sequences, tokens). The last
    ``width`` columns are the responses. ``mask`` has shape (sequences, width) and is 1 for tokens
    that the policy sampled. Log-probs and values must have the shape of ``mask``. Divide the logits
    by ``temperature``, because the tokens were sampled with it.
    """

    rows: list[Row]
    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    mask: Tensor
    width: int
    temperature: float
    index: Tensor  # indices of the sequences in the Rollouts of the step

    @property
    def responses(self) -> Tensor:
        """Token IDs of the responses, of shape (sequences, width)."""
        return self.input_ids[:, self.input_ids.shape[1] - self.width :]


class Rollouts:
    """The sequences of one worker in one step, with values per token.

    ``ids`` numbers the sequences of all workers, and ``groups`` numbers their prompts. ``tokens``
    maps names such as ``mask``, ``old_logp`` and ``advantages`` to CPU tensors of shape (sequences,
    longest response).
    """

    def __init__(
        self, rows: Sequence[Row], ids: Sequence[int], groups: Sequence[int], made: Generated
    ) -> None:
        count = len(rows)
        _check_generated(made, count)
        self.rows = list(rows)
        self.ids = torch.tensor(ids, dtype=torch.long)
        self.groups = torch.tensor(groups, dtype=torch.long)
        self.prompts = [torch.as_tensor(p).long() for p in made.prompts]
        self.responses = [torch.as_tensor(r).long() for r in made.responses]
        self.texts = list(made.texts)
        self.rewards = torch.zeros(count)
        width = max((len(r) for r in self.responses), default=0)
        mask = torch.zeros(count, width, dtype=torch.bool)
        for i, response in enumerate(self.responses):
            own = True if made.masks is None else torch.as_tensor(made.masks[i]).bool()
            mask[i, : len(response)] = own
        self.tokens: dict[str, Tensor] = {"mask": mask}

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def mask(self) -> Tensor:
        """Boolean mask of the tokens that the policy sampled."""
        return self.tokens["mask"]

    def keep(self, wanted: Tensor) -> None:
        """Drop the sequences for which ``wanted`` is False."""
        index = torch.nonzero(wanted)[:, 0]
        for name in ("rows", "prompts", "responses", "texts"):
            values = getattr(self, name)
            setattr(self, name, [values[i] for i in index.tolist()])
        self.ids, self.groups = self.ids[index], self.groups[index]
        self.rewards = self.rewards[index]
        self.tokens = {name: values[index] for name, values in self.tokens.items()}

    def put(self, name: str, batch: MicroBatch, values: Tensor) -> None:
        """Store the values of a micro-batch's tokens, with 0 for masked tokens."""
        if name not in self.tokens:
            self.tokens[name] = torch.zeros(self.mask.shape, dtype=torch.float32)
        kept = selected(values.detach().float(), batch.mask)
        self.tokens[name][batch.index, : batch.width] = kept.cpu()

    def get(self, name: str, batch: MicroBatch) -> Tensor:
        """Return the stored values of a micro-batch's tokens, on the device of the micro-batch."""
        return self.tokens[name][batch.index, : batch.width].to(batch.input_ids.device)

    def micro_batches(
        self,
        budget: int,
        *,
        device: torch.device | str,
        temperature: float = 1.0,
        among: Sequence[int] | None = None,
    ) -> Iterator[MicroBatch]:
        """Yield all sequences, or those in ``among``, in batches of up to ``budget`` padded tokens.

        A sequence that is longer than ``budget`` is a batch by itself.
        """
        prompts = [len(p) for p in self.prompts]
        responses = [len(r) for r in self.responses]
        chosen = range(len(self)) if among is None else among
        for index in split_by_tokens(prompts, responses, budget, chosen):
            yield self._padded(index, device, temperature)

    def _padded(
        self, index: Sequence[int], device: torch.device | str, temperature: float
    ) -> MicroBatch:
        ids, mask = pad_left([self.prompts[i] for i in index], device)
        answers, there = _pad([self.responses[i] for i in index], device, "right")
        width = answers.shape[1]
        mask = torch.cat((mask, there), dim=1)
        where = torch.tensor(index, dtype=torch.long)
        return MicroBatch(
            rows=[self.rows[i] for i in index],
            input_ids=torch.cat((ids, answers), dim=1),
            attention_mask=mask,
            position_ids=positions(mask),
            mask=self.mask[where, :width].to(device),
            width=width,
            temperature=temperature,
            index=where,
        )


def split_by_tokens(
    prompts: Sequence[int], responses: Sequence[int], budget: int, among: Sequence[int]
) -> list[list[int]]:
    """Group sequences into batches of up to ``budget`` padded tokens.

    The size of a batch is its number of rows times (longest prompt + longest response). Sequences
    of similar length are grouped to reduce padding. A sequence that exceeds ``budget`` is a batch
    by itself.
    """
    order = sorted(among, key=lambda i: (prompts[i] + responses[i], prompts[i], i), reverse=True)
    batches: list[list[int]] = []
    widest = [0, 0]
    for i in order:
        grown = [max(widest[0], prompts[i]), max(widest[1], responses[i])]
        if batches and sum(grown) * (len(batches[-1]) + 1) <= budget:
            batches[-1].append(i)
            widest = grown
        else:
            batches.append([i])
            widest = [prompts[i], responses[i]]
    return batches


def pad_left(sequences: Sequence[Tensor], device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Return (ids, mask) of shape (sequences, longest). Padding is token 0 and is masked out."""
    return _pad(sequences, device, "left")


def _pad(
    sequences: Sequence[Tensor], device: torch.device | str, side: str
) -> tuple[Tensor, Tensor]:
    if not sequences:
        none = torch.zeros(0, 0, dtype=torch.long, device=device)
        return none, none
    ids = pad_sequence(list(sequences), batch_first=True, padding_side=side).long()
    place = torch.arange(ids.shape[1])
    lengths = torch.tensor([len(s) for s in sequences])[:, None]
    there = place < lengths if side == "right" else place >= ids.shape[1] - lengths
    return ids.to(device), there.long().to(device)


def positions(mask: Tensor) -> Tensor:
    """Return position IDs that start with 0 at the first token of each row. Padding has 0."""
    return (mask.cumsum(-1) - 1).clamp(min=0)


def _check_generated(made: Any, count: int) -> None:
    if not isinstance(made, Generated):
        raise TypeError(f"generate() must return a Generated, not {made!r:.200}")
    lengths = {
        "prompts": len(made.prompts),
        "responses": len(made.responses),
        "texts": len(made.texts),
    }
    if made.masks is not None:
        lengths["masks"] = len(made.masks)
    wrong = {name: length for name, length in lengths.items() if length != count}
    if wrong:
        raise ValueError(f"generate() must return {count} entries, one per row, not {wrong}")
    for i, (prompt, response) in enumerate(zip(made.prompts, made.responses, strict=True)):
        for name, ids in (("prompt", prompt), ("response", response)):
            if np.ndim(ids) != 1:
                raise ValueError(
                    f"generate(): {name} {i} must be a list of token ids, not {ids!r:.100}"
                )
        if made.masks is not None and len(made.masks[i]) != len(response):
            raise ValueError(
                f"generate(): response {i} has {len(response)} tokens, but its mask has "
                f"{len(made.masks[i])}"
            )
