"""Sorting the workers' values of each number, for ``median`` and ``trimmed_mean``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from miniray.ps.leaves import Array

#: Up to here whole rows are compared with each other, which is vectorised; beyond, a real sort.
_FEW = 16


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
