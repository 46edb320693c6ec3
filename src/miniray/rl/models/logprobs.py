"""Compute log-probs of tokens and entropies with few copies of the logits.

Vocabularies can have more than 100,000 tokens, so the logits need more memory than the rest of a
micro-batch, and a loss in plain torch operations keeps about eight copies of them. This module
keeps two, the logits and their gradient, and computes intermediate results in blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

#: Values per block: small enough for the cache of a CPU, large enough to keep a GPU busy.
_BLOCK = {"cpu": 1 << 19}
_LARGE_BLOCK = 1 << 26


def chosen_log_probs(
    logits: Tensor, tokens: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return (log-probs of ``tokens``, entropies in nats).

    Both have the shape of ``tokens``, (sequences, tokens), and single precision, and are
    differentiable. ``logits`` has shape (sequences, columns, vocabulary) and any precision. If it
    has more columns than ``tokens``, the remaining columns are ignored. A logit of -inf excludes a
    token.
    """
    made: tuple[Tensor, Tensor] = _Chosen.apply(logits, tokens, temperature)
    return made


class _Chosen(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, tokens: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        logp, total, spread = (
            torch.empty(tokens.shape, dtype=torch.float32, device=logits.device) for _ in range(3)
        )
        for block in _blocks(logits, tokens):
            scaled = _scaled(logits[block], temperature)
            total[block] = torch.logsumexp(scaled, dim=-1)
            own = scaled.gather(-1, tokens[block][..., None])[..., 0]
            logp[block] = own - total[block]
            every = scaled - total[block][..., None]
            # Clamp so that 0 * log(0) is 0 instead of NaN.
            spread[block] = -(every.exp() * every.clamp_(min=_LEAST)).sum(-1)
        ctx.save_for_backward(logits, tokens, total, spread)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return logp, spread

    @staticmethod
    def backward(
        ctx: Any, of_logp: Tensor | None, of_spread: Tensor | None
    ) -> tuple[Tensor | None, None, None]:
        logits, tokens, total, spread = ctx.saved_tensors
        if of_logp is None and of_spread is None:
            return None, None, None
        gradient = torch.empty_like(logits)
        gradient[:, tokens.shape[1] :] = 0
        for block in _blocks(logits, tokens):
            every = _scaled(logits[block], ctx.temperature) - total[block][..., None]
            chances = every.exp()
            made = torch.zeros_like(chances)
            if of_spread is not None:
                away = every.clamp_(min=_LEAST).add_(spread[block][..., None])
                made.addcmul_(chances * away, of_spread[block][..., None], value=-1)
            if of_logp is not None:
                own = of_logp[block][..., None]
                made.addcmul_(chances, own, value=-1)
                made.scatter_add_(-1, tokens[block][..., None], own)
            gradient[block] = made.div_(ctx.temperature)
        return gradient, None, None


#: Lower bound of log-probs: the logarithm of the smallest normal float32.
_LEAST = math.log(torch.finfo(torch.float32).tiny)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    single = logits.float()
    return single if temperature == 1 else single / temperature


def _blocks(logits: Tensor, tokens: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield blocks, which are several sequences or a part of a large one, as pairs of slices."""
    count, width = tokens.shape
    most = _BLOCK.get(logits.device.type, _LARGE_BLOCK)
    at_once = max(1, most // max(1, logits.shape[-1]))
    rows, columns = max(1, at_once // max(1, width)), min(width, at_once)
    for row in range(0, count, rows):
        for column in range(0, width, max(1, columns)):
            yield slice(row, row + rows), slice(column, min(column + columns, width))
