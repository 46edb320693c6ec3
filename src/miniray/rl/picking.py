"""Choosing the next token: temperature, top-k, top-p, and a random number of each row's own.

A row's random numbers come from its seed alone, one for each position. So what is sampled for it
does not depend on which worker, batch or place in a batch it is in.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from miniray.rl.sampling import Sampling


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
