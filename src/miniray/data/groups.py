"""Find the groups of rows with the same value in a column."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator

from miniray.data.loader.columns import to_rows
from miniray.data.plan.selection import Selection
from miniray.data.sources.base import Source
from miniray.errors import DataError


def find_group_starts(source: Source, column: str, selection: Selection) -> list[int]:
    """Return the ordinals of selected rows at which groups begin. Reads the column once.

    Raises ``DataError`` if rows of a group aren't adjacent.
    """
    starts: list[int] = []
    seen: dict[object, tuple[str, int]] = {}
    previous = object()
    for ordinal, (block, row, key) in enumerate(_iter_keys(source, column, selection)):
        if key == previous:
            continue
        file, number = source.name_row(block, row)
        if not isinstance(key, Hashable):
            raise DataError(
                f"{file}, row {number}: {column}={key!r} can't identify a group. group_by= requires"
                " a column of numbers or text.",
                file,
                number,
            )
        if key in seen:
            raise DataError(
                f"Rows of group {column}={key!r} aren't adjacent: one run begins at"
                f" {seen[key][0]}, row {seen[key][1]}, another one at {file}, row {number}. Sort"
                f" the data by {column!r}.",
                file,
                number,
            )
        seen[key] = file, number
        starts.append(ordinal)
        previous = key
    return starts


def _iter_keys(
    source: Source, column: str, selection: Selection
) -> Iterator[tuple[int, int, object]]:
    for block in range(len(source.list_blocks())):
        if not selection.sizes[block]:
            continue
        encoded = source.read_block(block, [column])
        rows = to_rows(encoded, functools.partial(source.name_row, block))
        for row in selection.select_rows(block).tolist():
            yield block, row, rows[row][column]
