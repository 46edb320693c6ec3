"""Columns of a batch: a numpy array for numbers and equal arrays, a list for everything else.

numpy is imported for a column that needs it; images and text do not.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from miniray.data.sources.base import Layout, Rows

#: (rows of a block, which of them, where they go in the batch)
Part = tuple[Rows, Sequence[int], Sequence[int]]

_FLOATS = {"halffloat": "float16", "float": "float32", "double": "float64"}
_INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
#: numpy's types of numbers by Arrow's. ``to_pandas_dtype`` would import pandas, before version 26.
NUMBERS = {**_FLOATS, "bool": "bool", **{name: name for name in _INTEGERS}}


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
    if not isinstance(first, (bool, int, float)) and "numpy" not in sys.modules:
        return list(rows)  # then nothing can be numpy's either
    import numpy as np

    if isinstance(first, (bool, int, float, np.number, np.bool_)):
        try:
            packed = np.asarray(rows)
        except (ValueError, OverflowError):
            return list(rows)
        kind = packed.dtype.kind
        if kind == "f" and not any(isinstance(row, (float, np.floating)) for row in rows):
            return list(rows)  # integers of which no type holds all: as floats, ids would be others
        return packed if kind in "biuf" and packed.ndim == 1 else list(rows)
    if isinstance(first, np.ndarray):
        same = all(
            isinstance(row, np.ndarray) and row.shape == first.shape and row.dtype == first.dtype
            for row in rows
        )
        return np.stack(rows) if same else list(rows)
    return list(rows)


def from_parts(parts: Sequence[Part], layout: Layout) -> dict[str, Any]:
    """Rows of blocks that have ``layout``, put together as columns.

    Numbers make numpy arrays; missing ones are NaN there, and integers and booleans then float64.
    Lists of a fixed number of numbers make an array of two dimensions. All else makes lists.
    """
    total = sum(len(index) for _, index, _ in parts)
    found: dict[str, Any] = {}
    for name, kind in layout:
        if kind in NUMBERS and total >= 8 * len(parts):
            array = _numbers(parts, name, kind, total)
            if array is not None:
                found[name] = array
                continue
        values: list[Any] = [None] * total
        for rows, index, places in parts:
            get = rows.getter(name)
            for place, i in zip(places, index, strict=True):
                values[place] = get(i)
        found[name] = _as_column(values, kind)
    return found


def _numbers(parts: Sequence[Part], name: str, kind: str, total: int) -> Any:
    import numpy as np

    array = np.empty(total, dtype=NUMBERS[kind])
    for rows, index, places in parts:
        some = rows.numbers(name, index)
        if some is None:
            return None
        array[places] = some
    return array


def _as_column(values: list[Any], kind: str) -> Any:
    vector = ""  # of what kind of numbers lists of a fixed length are
    if kind.startswith("fixed_size_list<"):
        vector = kind.split(": ", 1)[1].split(">", 1)[0].removesuffix(" not null")
    if kind not in NUMBERS and vector not in NUMBERS:
        return values
    import numpy as np

    if vector:
        complete = all(value is not None and None not in value for value in values)
        return np.array(values, dtype=NUMBERS[vector]) if complete else values
    if None not in values:
        return np.array(values, dtype=NUMBERS[kind])
    if "64" in kind and any(value is not None and abs(value) > 1 << 53 for value in values):
        return values  # numbers that a float does not hold, ids for one
    missing = [np.nan if value is None else value for value in values]
    return np.array(missing, dtype=NUMBERS[kind] if kind in _FLOATS else np.float64)
