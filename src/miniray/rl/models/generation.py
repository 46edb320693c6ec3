"""Batched sampling from a causal language model with Hugging Face's calling convention.

Prompts are padded on the left, so that the next tokens of all rows are in one column. Position IDs
start at the first token of each row. Equal prompts are processed once, and their cache is copied to
all rows. Finished rows are removed from the batch when that is worth copying the cache.

The random numbers of a row depend only on its seed, with one number per position. The sampled
tokens therefore don't depend on the worker, the batch or the position in the batch.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from miniray.rl.config import Sampling
from miniray.rl.rollouts.batch import pad_left, positions

#: Returns additional arguments of the model for the rows with these indices.
Extra = Callable[[Sequence[int]], Mapping[str, Any]]

#: Share of finished rows at which they are removed from the cache, which copies it.
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
    """Generate a response for each prompt, and return the token IDs of the responses.

    A response includes its end-of-sequence token, unless it reached ``max_new_tokens`` before.

    Args:
        model: Causal language model with Hugging Face's calling convention.
        prompts: Token IDs without padding.
        seeds: One seed per prompt.
        sampling: Sampling options.
        eos_ids: Token IDs that end a response.
        extra: ``extra(indices)`` returns additional arguments, such as images, for the forward pass
            over the prompts with these indices.
        same: Key for each prompt. Prompts with equal token IDs and equal keys are processed once.

    Raises:
        ValueError: A prompt is empty, or the model's context has no room for ``max_new_tokens``.
        TypeError: The model returns no cache.
    """
    if len(prompts) != len(seeds):
        raise ValueError(f"seeds must have one value per prompt ({len(prompts)}), not {len(seeds)}")
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
    """Return the names of the arguments that the model's ``forward`` accepts.

    For wrappers that forward their arguments (PEFT, torch.compile), those of the wrapped model are
    included.
    """
    parameters = inspect.signature(model.forward).parameters
    inner = getattr(model, "_orig_mod", None)
    hands_on = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if hands_on and hasattr(model, "get_base_model"):
        inner = model.get_base_model()
    return {*parameters, *(() if inner is None else taken_by(inner))}


def _batches(lengths: Sequence[int], sampling: Sampling) -> list[slice]:
    """Split rows into slices that fit in ``batch_tokens``, with at least one row each."""
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
    """Number the prompts. Equal prompts get the same number.

    Rollouts often share the tensor of a prompt, so each tensor is read once.
    """
    distinct = {id(prompt): prompt for prompt in prompts}
    seen: dict[tuple[int, ...], int] = {}
    found = {key: seen.setdefault(tuple(p.tolist()), len(seen)) for key, p in distinct.items()}
    return [found[id(prompt)] for prompt in prompts]


class _Reader:
    """The model and the arguments of its forward passes."""

    def __init__(self, model: Any, further: Extra) -> None:
        self.device = next(model.parameters()).device
        self.name = type(model).__name__
        self._model = model
        self._further = further
        self._takes = taken_by(model)

    def prompts(self, prompts: Sequence[Tensor], rows: Sequence[int]) -> tuple[Tensor, Tensor, Any]:
        """Process the prompts of ``rows``; return (logits of the last column, mask, cache)."""
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
        """Run a forward pass with the arguments that the model accepts.

        Returns:
            (logits of the last column, cache).
        """
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
        else:  # the cache doesn't support copying rows: process every prompt
            logits, mask, cache = reader.prompts(prompts, range(count))

    rows = torch.arange(count, device=device)  # index of the response of each row of the batch
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
                f"{reader.name} returned no past_key_values. Generation requires a model with a "
                "key-value cache."
            )
        mask = torch.cat((mask, mask.new_ones(len(rows), 1)), dim=1)
        position = position + 1
        logits, cache = reader.next(token[:, None], mask, position, cache)
    # Copy all tokens at once, which synchronizes with the GPU once instead of twice per response.
    return [row[:length] for row, length in zip(tokens.cpu(), lengths.tolist(), strict=True)]


def _select(cache: Any, index: Tensor) -> bool:
    """Keep or repeat rows of the cache. Return False if the cache doesn't support it."""
    method = "batch_select_indices"
    if not all(hasattr(part, method) for part in (cache, *getattr(cache, "layers", ()))):
        return False
    cache.batch_select_indices(index)
    return True


def _check(model: Any, prompts: Sequence[Tensor], sampling: Sampling) -> None:
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    for i, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(f"prompt {i} is empty. Prompts need at least one token.")
        if limit is not None and len(prompt) + sampling.max_new_tokens > limit:
            raise ValueError(
                f"prompt {i} has {len(prompt)} tokens, which with max_new_tokens="
                f"{sampling.max_new_tokens} exceeds the model's context of {limit} tokens. "
                "Set max_prompt_tokens, or lower max_new_tokens."
            )


# -- choosing the next token -----------------------------------------------------------------------


def row_seed(*parts: int) -> int:
    """Return a 64-bit seed from the numbers that identify a row, such as seed, step and index."""
    text = ",".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def uniforms(seeds: Sequence[int], count: int) -> Tensor:
    """Return ``count`` random numbers in [0, 1) for each seed, in double precision."""
    rows = [np.random.Generator(np.random.Philox(key=seed)).random(count) for seed in seeds]
    return torch.from_numpy(np.stack(rows) if rows else np.zeros((0, count)))


def pick(logits: Tensor, uniform: Tensor, sampling: Sampling) -> Tensor:
    """Sample a token for each row of ``logits`` (rows, vocabulary), with its random number."""
    if sampling.temperature == 0:
        return logits.argmax(-1)
    logits = logits.float() / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    probabilities = torch.softmax(logits, dim=-1)
    if sampling.top_p < 1:
        probabilities = _nucleus(probabilities, sampling.top_p)
    # In single precision, the rounding error of a sum over 100,000 tokens exceeds the probability
    # of unlikely tokens.
    cumulative = probabilities.double().cumsum(-1)
    target = uniform[:, None] * cumulative[:, -1:]
    token = torch.searchsorted(cumulative, target, right=True)[:, 0]
    return token.clamp(max=logits.shape[-1] - 1)  # out of range only if logits are NaN


def _nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Keep the fewest most likely tokens whose probabilities add up to ``top_p``, at least one."""
    ordered, order = probabilities.sort(dim=-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    kept = torch.where(before < top_p, ordered, 0.0)
    return torch.zeros_like(probabilities).scatter_(-1, order, kept)
