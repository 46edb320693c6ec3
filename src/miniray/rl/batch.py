"""Sequences of a step: kept without padding, padded a micro-batch at a time.

``Rollouts`` are a worker's own of one step. ``MicroBatch`` is what a policy's ``log_probs`` and
``values`` get. Rows travel along, so a policy may turn what they carry (encoded images, say) into
tensors for just these sequences, and drop them afterwards.
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
from miniray.rl.sources import Row


@dataclasses.dataclass
class Generated:
    """What a policy's ``generate`` returns, one entry a row.

    ``prompts`` and ``responses`` are token ids without padding, lists or 1-D tensors on the CPU.
    ``texts`` is what the reward function gets. ``masks`` (optional) are 1 where the policy chose
    the response's token and 0 where somebody else did, a tool for example.
    """

    prompts: Sequence[Tensor | Sequence[int]]
    responses: Sequence[Tensor | Sequence[int]]
    texts: Sequence[Any]
    masks: Sequence[Tensor | Sequence[int]] | None = None


@dataclasses.dataclass
class MicroBatch:
    """Some sequences, padded: prompts on the left, responses on the right.

    ``input_ids``, ``attention_mask`` and ``position_ids`` are (sequences, tokens); the last
    ``width`` columns are the responses. ``mask`` is (sequences, width), 1 where the policy chose
    the token: log-probs and values are wanted in that shape. Logits are to be divided by
    ``temperature``, as they were when the tokens were sampled.
    """

    rows: list[Row]
    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    mask: Tensor
    width: int
    temperature: float
    index: Tensor  # where in the step's Rollouts these sequences are

    @property
    def responses(self) -> Tensor:
        """Their token ids, (sequences, width)."""
        return self.input_ids[:, self.input_ids.shape[1] - self.width :]


class Rollouts:
    """A worker's sequences of one step, and what is known of each of their tokens.

    ``ids`` number the sequences over all workers, ``groups`` their prompts. ``tokens`` has tensors
    of shape (sequences, longest response), on the CPU: ``mask``, ``old_logp``, ``advantages``, ...
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
        """True where the policy chose the token."""
        return self.tokens["mask"]

    def keep(self, wanted: Tensor) -> None:
        """Drop the sequences where ``wanted`` is False."""
        index = torch.nonzero(wanted)[:, 0]
        for name in ("rows", "prompts", "responses", "texts"):
            values = getattr(self, name)
            setattr(self, name, [values[i] for i in index.tolist()])
        self.ids, self.groups = self.ids[index], self.groups[index]
        self.rewards = self.rewards[index]
        self.tokens = {name: values[index] for name, values in self.tokens.items()}

    def put(self, name: str, batch: MicroBatch, values: Tensor) -> None:
        """Keep the values of a micro-batch's tokens; 0 where masked."""
        if name not in self.tokens:
            self.tokens[name] = torch.zeros(self.mask.shape, dtype=torch.float32)
        kept = selected(values.detach().float(), batch.mask)
        self.tokens[name][batch.index, : batch.width] = kept.cpu()

    def get(self, name: str, batch: MicroBatch) -> Tensor:
        """What is kept of a micro-batch's tokens, where the micro-batch is."""
        return self.tokens[name][batch.index, : batch.width].to(batch.input_ids.device)

    def micro_batches(
        self,
        budget: int,
        *,
        device: torch.device | str,
        temperature: float = 1.0,
        among: Sequence[int] | None = None,
    ) -> Iterator[MicroBatch]:
        """All sequences (or those ``among``), in batches of at most ``budget`` padded tokens."""
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
    """Sequences in batches: rows times (longest prompt + longest response) is within ``budget``.

    Of like length together, so that little is padding. One that alone is over it is a batch alone.
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
    """(ids, mask) of shape (sequences, longest). Padding is token 0: nothing attends to it."""
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
    """Position ids that count from each row's first token; 0 for the padding before it."""
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
        raise ValueError(f"generate() was given {count} rows and returned {wrong}")
    for i, (prompt, response) in enumerate(zip(made.prompts, made.responses, strict=True)):
        for name, ids in (("prompt", prompt), ("response", response)):
            if np.ndim(ids) != 1:
                raise ValueError(
                    f"generate(): {name} {i} must be a list of token ids, not {ids!r:.100}"
                )
        if made.masks is not None and len(made.masks[i]) != len(response):
            raise ValueError(
                f"generate(): response {i} has {len(response)} tokens and a mask of "
                f"{len(made.masks[i])}"
            )
