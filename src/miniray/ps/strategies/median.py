"""``median``: the middle value of each number over the workers.

    w[k] ← median(w₁[k], …, wₙ[k])          the mean of the middle two when n is even

Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates",
https://arxiv.org/abs/1803.01498: right as long as fewer than half of the workers are broken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from miniray.ps.leaves import Array
from miniray.ps.strategies.base import Strategy, register_strategy

#: Up to here whole rows are compared with each other, which is vectorised; beyond, a real sort.
_FEW = 16


@register_strategy("median")
class Median(Strategy):
    """The median of each number. Has no options; with two workers it is their mean."""

    compares_workers = True
    shows_nonfinite = False

    def combine(
        self,
        global_weights: Array | None,
        worker_weights: Sequence[Array],
        weights: Sequence[float],
    ) -> Array:
        rows = sorted_rows(worker_weights, self.scratch)
        middle = len(rows) // 2
        if len(rows) % 2:
            return rows[middle]
        # Halved first: the sum of two large numbers could overflow.
        np.multiply(rows[middle - 1], 0.5, out=rows[middle - 1])
        np.multiply(rows[middle], 0.5, out=rows[middle])
        return np.add(rows[middle - 1], rows[middle], out=self.out)


def sorted_rows(workers: Sequence[Array], scratch: Callable[[Any], Array]) -> Sequence[Array]:
    """The values of each number over all workers, ascending: row 0 has the smallest of each."""
    count = len(workers)
    if count > _FEW:
        return list(np.sort(np.stack(workers), axis=0))
    rows = [scratch(("row", i)) for i in range(count)]
    for row, values in zip(rows, workers, strict=True):
        np.copyto(row, values)
    spare = scratch("spare")
    # Odd-even transposition: `count` rounds of comparing neighbours sort any input.
    for turn in range(count):
        for i in range(turn % 2, count - 1, 2):
            np.minimum(rows[i], rows[i + 1], out=spare)
            np.maximum(rows[i], rows[i + 1], out=rows[i + 1])
            rows[i], spare = spare, rows[i]
    return rows
