"""Columns of a batch: a numpy array for numbers and equal arrays, a list for everything else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def columns_of(rows: Sequence[Any]) -> dict[str, Any]:
    """Dicts as one dict of columns; keys that some rows lack are ``None`` there.

    Rows that are not dicts make one column named ``item``.
    """
    if not all(isinstance(row, Mapping) for row in rows):
        return {"item": from_rows(rows)}
    names = list(dict.fromkeys(name for row in rows for name in row))
    return {name: from_rows([row.get(name) for row in rows]) for name in names}


def from_rows(rows: Sequence[Any]) -> Any:
    """One column from Python values: numpy for numbers and equal arrays, a list otherwise."""
    first = rows[0] if rows else None
    if isinstance(first, (bool, int, float, np.number, np.bool_)):
        try:
            packed = np.asarray(rows)
        except (ValueError, OverflowError):
            return list(rows)
        return packed if packed.dtype.kind in "biuf" and packed.ndim == 1 else list(rows)
    if isinstance(first, np.ndarray):
        same = all(
            isinstance(row, np.ndarray) and row.shape == first.shape and row.dtype == first.dtype
            for row in rows
        )
        return np.stack(rows) if same else list(rows)
    return list(rows)
