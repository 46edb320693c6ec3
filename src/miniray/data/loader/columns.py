"""Rows and columns of a batch.

Encoded rows are a ``pyarrow.RecordBatch`` or a sequence of Python objects. Columns are NumPy arrays
for numbers and equal arrays, and lists for everything else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from miniray.data.sources.base import LazyRows, Source
from miniray.errors import DataError, RowError

#: File of a row, and its number in the file.
RowId = tuple[str, int]

#: Returns the id of one of the rows.
NameRow = Callable[[int], RowId]


def is_record_batch(rows: Any) -> bool:
    """Return whether rows are a record batch, without importing pyarrow."""
    pa = sys.modules.get("pyarrow")
    return pa is not None and isinstance(rows, pa.RecordBatch)


def merge_rows(parts: Sequence[Any], sources: Sequence[Source]) -> Any:
    """Concatenate encoded rows, which are copied; ``sources`` are those of the parts.

    Returns a record batch if all parts have the same schema, otherwise a sequence.
    """
    if parts and all(map(is_record_batch, parts)):
        import pyarrow as pa

        first = parts[0].schema
        is_same = all(part.schema is first or part.schema.equals(first) for part in parts)
        if not is_same:
            parts = [source.normalize(p) for p, source in zip(parts, sources, strict=True)]
            first = parts[0].schema
            is_same = all(part.schema.equals(first) for part in parts)
        if is_same:
            # The concatenation of one part isn't a copy and would keep its block in memory.
            merged = pa.concat_batches([*parts, parts[-1].slice(0, 0)])
            return sources[0].normalize(merged)
    return LazyRows(_get_row, [(part, i) for part in parts for i in range(len(part))])


def take_rows(rows: Any, indices: Sequence[int]) -> Any:
    """Return encoded rows at ``indices``."""
    if not is_record_batch(rows):
        return LazyRows(rows.__getitem__, indices)
    import pyarrow as pa

    return pa.concat_batches([rows.slice(i, 1) for i in indices])


def to_rows(rows: Any, name_row: NameRow) -> list[Any]:
    """Return encoded rows as Python objects.

    Raise ``RowError`` if Python has no such object, as for a date after the year 9999.
    """
    try:
        return rows.to_pylist() if is_record_batch(rows) else list(rows)
    except DataError:
        raise
    except (ValueError, OverflowError) as error:
        raise _create_value_error(rows, name_row, error) from error


def _create_value_error(rows: Any, name_row: NameRow, error: Exception) -> RowError:
    """Return the error for the first row that can't become a Python object."""
    index, problem = 0, str(error)
    for i in range(len(rows)):
        try:
            _get_row((rows, i))
        except (ValueError, OverflowError) as found:
            index, problem = i, str(found)
            break
    file, row = name_row(index)
    return RowError(f"{file}, row {row} has a value that Python can't hold: {problem}", file, row)


def _get_row(place: tuple[Any, int]) -> Any:
    rows, index = place
    return rows.slice(index, 1).to_pylist()[0] if is_record_batch(rows) else rows[index]


def to_table(rows: Any) -> Any:
    """Return encoded rows as an Arrow table."""
    import pyarrow as pa

    if is_record_batch(rows):
        return pa.Table.from_batches([rows])
    rows = list(rows)
    if not all(isinstance(row, Mapping) for row in rows):
        raise DataError("format='arrow' requires rows that are dicts.")
    return pa.Table.from_pylist(rows)


def to_columns(rows: Any, name_row: NameRow) -> dict[str, Any]:
    """Return encoded rows as columns. Raise ``RowError`` as ``to_rows`` does."""
    if not is_record_batch(rows):
        return collect_columns(to_rows(rows, name_row))
    try:
        return {
            name: _convert_column(column)
            for name, column in zip(rows.schema.names, rows.columns, strict=True)
        }
    except (ValueError, OverflowError) as error:
        raise _create_value_error(rows, name_row, error) from error


def _convert_column(column: Any) -> Any:
    """Convert an Arrow column. Missing numbers are NaN, unless a float can't hold the others."""
    import pyarrow as pa

    if _is_number(column.type):
        if not column.null_count:
            return _copy_numbers(column)
        values = column.to_pylist()
        if column.type.bit_width == 64 and any(v is not None and abs(v) > 1 << 53 for v in values):
            return values
        is_float = pa.types.is_floating(column.type)
        dtype = column.type.to_pandas_dtype() if is_float else np.float64
        return np.array([np.nan if value is None else value for value in values], dtype=dtype)
    if pa.types.is_fixed_size_list(column.type) and not column.null_count:
        flat = column.flatten()
        if _is_number(flat.type) and not flat.null_count:
            return _copy_numbers(flat).reshape(len(column), -1)
    return column.to_pylist()


def _is_number(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or kind == pa.bool_())


def _copy_numbers(column: Any) -> Any:
    """Return a copy of numbers without nulls. ``to_numpy`` would import pandas."""
    if str(column.type) == "bool":
        return np.array(column.to_pylist(), dtype=bool)
    return np.from_dlpack(column).copy()


def collect_columns(rows: Sequence[Any]) -> dict[str, Any]:
    """Return dicts as one dict of columns. Keys that some rows lack are ``None`` there.

    Rows that aren't dicts make one column named ``item``.
    """
    if not all(isinstance(row, Mapping) for row in rows):
        return {"item": collect_values(rows)}
    names = list(dict.fromkeys(name for row in rows for name in row))
    return {name: collect_values([row.get(name) for row in rows]) for name in names}


def collect_values(values: Sequence[Any]) -> Any:
    """Return a column of Python values: an array of numbers or equal arrays, otherwise a list."""
    first = values[0] if len(values) else None
    if isinstance(first, (bool, int, float, np.number, np.bool_)):
        try:
            packed = np.asarray(values)
        except (ValueError, OverflowError):
            return list(values)
        kind = packed.dtype.kind
        if kind == "f" and not any(isinstance(value, (float, np.floating)) for value in values):
            return list(values)  # integers that no integer type holds; floats would change ids
        return packed if kind in "biuf" and packed.ndim == 1 else list(values)
    if isinstance(first, np.ndarray):
        is_same = all(
            isinstance(value, np.ndarray)
            and value.shape == first.shape
            and value.dtype == first.dtype
            for value in values
        )
        return np.stack(values) if is_same else list(values)
    return list(values)
