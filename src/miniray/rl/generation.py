"""Batched sampling from a causal language model with Hugging Face's calling convention.

Prompts are padded on the left, so that all rows' next tokens are in one column; position ids count
from each row's own first token. Equal prompts are read once and their cache is shared out. Rows
that have ended leave the batch as soon as that pays.

A row's random numbers come from its seed alone, one for each position. So what is sampled for it
does not depend on which worker, batch or place in a batch it is in.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from miniray.rl.batch import pad_left, positions
from miniray.rl.config import Sampling

#: Further arguments of the model for rows with these numbers.
Extra = Callable[[Sequence[int]], Mapping[str, Any]]

#: Rows are taken out of the cache, which copies it, when this share of them has ended.
_WORTH_COPYING = 0.25


def generate(
    model: Any,
    prompts: Sequence[Tensor],
    seeds: Sequence[int],
    sampling: Sampling,
    *,
    eos_ids: Sequence[int] = (),
    extra: Extra | None = None,
    same: Sequence[Hashable] | None = None,
) -> list[Tensor]:
    """A response for each prompt: its token ids, the end of sequence included if it came.

    ``prompts`` are token ids without padding, ``seeds`` one for each. ``extra(rows)`` gives further
    arguments of the model for the pass over the prompts with these numbers: images, say. Prompts of
    equal ids, and equal ``same`` if that is given, are read once. Raises ``ValueError`` naming
    a prompt that is empty, or that leaves no room for ``max_new_tokens`` in the model's context,
    and ``TypeError`` for a model that keeps no cache.
    """
    if len(prompts) != len(seeds):
        raise ValueError(f"there are {len(prompts)} prompts and {len(seeds)} seeds")
    prompts = list(prompts)
    _check(model, prompts, sampling)
    stops = sorted({*eos_ids, *sampling.stop_ids})
    responses: list[Tensor] = []
    numbers = _numbers(prompts)
    keys = [(number, None if same is None else same[i]) for i, number in enumerate(numbers)]
    for part in _batches([len(p) + sampling.max_new_tokens for p in prompts], sampling):

        def further(rows: Sequence[int], first: int = part.start) -> Mapping[str, Any]:
            return {} if extra is None else extra([first + i for i in rows])

        with torch.no_grad():
            reader = _Reader(model, further)
            responses += _generate(reader, prompts[part], keys[part], seeds[part], sampling, stops)
    return responses


def taken_by(model: Any) -> set[str]:
    """The arguments of its ``forward``; of a wrapper that hands on (PEFT's, torch.compile's) also
    those within.
    """
    parameters = inspect.signature(model.forward).parameters
    inner = getattr(model, "_orig_mod", None)
    hands_on = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if hands_on and hasattr(model, "get_base_model"):
        inner = model.get_base_model()
    return {*parameters, *(() if inner is None else taken_by(inner))}


def _batches(lengths: Sequence[int], sampling: Sampling) -> list[slice]:
    """Consecutive rows, as many as fit; at least one."""
    batches, first, longest = [], 0, 0
    for i, length in enumerate(lengths):
        if i > first and max(longest, length) * (i - first + 1) > sampling.batch_tokens:
            batches.append(slice(first, i))
            first, longest = i, 0
        longest = max(longest, length)
    if lengths:
        batches.append(slice(first, len(lengths)))
    return batches


def _numbers(prompts: Sequence[Tensor]) -> list[int]:
    """A number for each prompt, the same for equal ones. Rollouts often share a prompt's tensor."""
    distinct = {id(prompt): prompt for prompt in prompts}
    seen: dict[tuple[int, ...], int] = {}
    found = {key: seen.setdefault(tuple(p.tolist()), len(seen)) for key, p in distinct.items()}
    return [found[id(prompt)] for prompt in prompts]


class _Reader:
    """The model, with what each of its passes is given."""

    def __init__(self, model: Any, further: Extra) -> None:
        self.device = next(model.parameters()).device
        self.name = type(model).__name__
        self._model = model
        self._further = further
        self._takes = taken_by(model)

    def prompts(self, prompts: Sequence[Tensor], rows: Sequence[int]) -> tuple[Tensor, Tensor, Any]:
        """(logits of the last column, mask, cache) of some prompts, those of ``rows``."""
        ids, mask = pad_left([prompts[i] for i in rows], self.device)
        logits, cache = self.next(ids, mask, positions(mask), None, self._further(rows))
        return logits, mask, cache

    def next(
        self,
        ids: Tensor,
        mask: Tensor,
        position: Tensor,
        cache: Any,
        further: Mapping[str, Any] | None = None,
    ) -> tuple[Tensor, Any]:
        """(logits of the last column, cache). Optional arguments where the model takes them."""
        optional = {"position_ids": position, "logits_to_keep": 1}
        given = {key: value for key, value in optional.items() if key in self._takes}
        out = self._model(
            input_ids=ids,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            **given,
            **(further or {}),
        )
        return out.logits[:, -1], getattr(out, "past_key_values", None)


def _generate(
    reader: _Reader,
    prompts: Sequence[Tensor],
    keys: Sequence[Hashable],
    seeds: Sequence[int],
    sampling: Sampling,
    stops: Sequence[int],
) -> list[Tensor]:
    device = reader.device
    count, limit = len(prompts), sampling.max_new_tokens
    random = uniforms(seeds, limit).to(device)
    stop_ids = torch.tensor(stops, dtype=torch.long, device=device)
    tokens = torch.zeros(count, limit, dtype=torch.long, device=device)
    lengths = torch.full((count,), limit, dtype=torch.long, device=device)

    first_of = {key: i for i, key in reversed(list(enumerate(keys)))}
    firsts = sorted(first_of.values())
    logits, mask, cache = reader.prompts(prompts, firsts)
    if len(firsts) < count:
        place = {first: at for at, first in enumerate(firsts)}
        index = torch.tensor([place[first_of[key]] for key in keys], device=device)
        if _select(cache, index):
            logits, mask = logits[index], mask[index]
        else:  # a cache that cannot be shared out: read every prompt
            logits, mask, cache = reader.prompts(prompts, range(count))

    rows = torch.arange(count, device=device)  # which of the responses the batch's rows are
    ended = torch.zeros(count, dtype=torch.bool, device=device)
    position = mask.sum(-1, keepdim=True) - 1
    for t in range(limit):
        token = pick(logits, random[rows, t], sampling)
        tokens[rows, t] = token
        just_ended = torch.isin(token, stop_ids) & ~ended
        lengths[rows[just_ended]] = t + 1
        ended |= just_ended
        gone = int(ended.sum())
        if gone == len(rows) or t == limit - 1:
            break
        if gone >= _WORTH_COPYING * len(rows):
            keep = torch.nonzero(~ended)[:, 0]
            if _select(cache, keep):
                rows, token, mask, position = rows[keep], token[keep], mask[keep], position[keep]
                ended = ended[keep]
        if cache is None:
            raise TypeError(
                f"{reader.name} returned no past_key_values: one token after the other can only be "
                "generated by a model that keeps the keys and values of those before"
            )
        mask = torch.cat((mask, mask.new_ones(len(rows), 1)), dim=1)
        position = position + 1
        logits, cache = reader.next(token[:, None], mask, position, cache)
    # One copy to the host: a GPU is waited for once, not twice a response.
    return [row[:length] for row, length in zip(tokens.cpu(), lengths.tolist(), strict=True)]


def _select(cache: Any, index: Tensor) -> bool:
    """Keep (or repeat) rows of the cache; False, and nothing done, where this kind cannot."""
    method = "batch_select_indices"
    if not all(hasattr(part, method) for part in (cache, *getattr(cache, "layers", ()))):
        return False
    cache.batch_select_indices(index)
    return True


def _check(model: Any, prompts: Sequence[Tensor], sampling: Sampling) -> None:
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    for i, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(f"prompt {i} is empty: a model needs at least one token to go on from")
        if limit is not None and len(prompt) + sampling.max_new_tokens > limit:
            raise ValueError(
                f"prompt {i} has {len(prompt)} tokens; with max_new_tokens="
                f"{sampling.max_new_tokens} that is more than the model's context of {limit}: "
                "set max_prompt_tokens, or lower max_new_tokens"
            )


# -- choosing the next token -----------------------------------------------------------------------


def row_seed(*parts: int) -> int:
    """A seed of 64 bits from what identifies a row: run, step, prompt, number of the rollout."""
    text = ",".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def uniforms(seeds: Sequence[int], count: int) -> Tensor:
    """``count`` numbers in [0, 1) for each seed, in double precision."""
    rows = [np.random.Generator(np.random.Philox(key=seed)).random(count) for seed in seeds]
    return torch.from_numpy(np.stack(rows) if rows else np.zeros((0, count)))


def pick(logits: Tensor, uniform: Tensor, sampling: Sampling) -> Tensor:
    """A token for each row of ``logits`` (rows, vocabulary), by its number in ``uniform``."""
    if sampling.temperature == 0:
        return logits.argmax(-1)
    logits = logits.float() / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    probabilities = torch.softmax(logits, dim=-1)
    if sampling.top_p < 1:
        probabilities = _nucleus(probabilities, sampling.top_p)
    # Sums of 100,000 probabilities in single precision are off by more than small ones are large.
    cumulative = probabilities.double().cumsum(-1)
    target = uniform[:, None] * cumulative[:, -1:]
    token = torch.searchsorted(cumulative, target, right=True)[:, 0]
    return token.clamp(max=logits.shape[-1] - 1)  # beyond the end only where logits are NaN


def _nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """The fewest of the most likely tokens that have ``top_p`` together; at least one."""
    ordered, order = probabilities.sort(dim=-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    kept = torch.where(before < top_p, ordered, 0.0)
    return torch.zeros_like(probabilities).scatter_(-1, order, kept)
