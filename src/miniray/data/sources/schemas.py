"""Common types of files whose schemas differ but whose rows are the same Python values.

Writers store text as ``string``, ``large_string`` or a dictionary, and a column of missing values
as ``null``. Files are read as the type that can hold all of them. Other differences are errors.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pyarrow as pa

from miniray.data.sources.base import select_columns
from miniray.errors import DataError

_TEXT = {pa.string(), pa.large_string()}
_BYTES = {pa.binary(), pa.large_binary()}


class CommonSchema:
    """Column names and types as which to read all files.

    Args:
        schemas: File and schema, for files that differ in their schema.
        columns: Columns to check, or None for all.

    Raises:
        DataError: There is no common type. Names the file and the column.
    """

    def __init__(self, schemas: Sequence[tuple[str, Any]], columns: Sequence[str] | None) -> None:
        self.names: list[str] = schemas[0][1].names
        types = _find_common_types(schemas, columns)
        #: Types of columns that aren't the same in all files.
        self._casts = {
            name: kind
            for name, kind in types.items()
            if any(str(schema.field(name).type) != str(kind) for _, schema in schemas)
        }

    def select(self, batch: Any, names: Sequence[str], path: str) -> Any:
        """Return columns of a record batch in their common types.

        Without metadata and null flags, so that batches of different files have the same schema.
        """
        try:
            columns = [batch.column(name) for name in names]
        except KeyError:
            select_columns(batch.schema.names, names, path)
            raise
        if self._casts:
            kinds = [self._casts.get(name) for name in names]
            columns = [c.cast(kind) if kind else c for c, kind in zip(columns, kinds, strict=True)]
        return pa.RecordBatch.from_arrays(columns, names)


def decode_dictionaries(batch: Any, names: Collection[str] | None = None) -> Any:
    """Convert dictionary columns, or those in ``names``, to their values."""
    columns = [
        column.dictionary_decode()
        if pa.types.is_dictionary(column.type) and (names is None or name in names)
        else column
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, batch.schema.names)


def _find_common_types(
    schemas: Sequence[tuple[str, Any]], columns: Sequence[str] | None
) -> dict[str, Any]:
    (first, expected), *_ = schemas
    types: dict[str, Any] = {}
    for path, schema in schemas:
        names = select_columns(schema.names, columns, path)
        if columns is None and set(names) != set(expected.names):
            _raise_missing(first, expected.names, path, names)
        for name in names:
            if schema.get_field_index(name) < 0:
                raise DataError(
                    f"{path} has more than one column {name!r}. Rename one of them.", path
                )
            other = schema.field(name).type
            try:
                common = _find_common_type(types.get(name, other), other)
            except UnicodeDecodeError:  # a damaged name of a nested field
                common = None
            if common is None:
                raise DataError(
                    f"Mixed schemas: column {name!r} is {types[name]} in {first} and {other} in"
                    f" {path}.",
                    path,
                )
            types[name] = common
    return types


def _raise_missing(first: str, expected: list[str], path: str, names: list[str]) -> None:
    absent = [name for name in expected if name not in names]
    has, lacks = (first, path) if absent else (path, first)
    absent = absent or [name for name in names if name not in expected]
    raise DataError(
        f"Mixed schemas: {has} has a column {absent[0]!r}, but {lacks} doesn't. Select the columns"
        " to read with columns=[...], or use a dataset per schema.",
        lacks,
    )


def _find_common_type(one: Any, other: Any) -> Any:
    """Return the type that can hold the values of both, or None."""
    if str(one) == str(other) or pa.types.is_null(other):
        return one
    if pa.types.is_null(one):
        return other
    one, other = (t.value_type if pa.types.is_dictionary(t) else t for t in (one, other))
    if one == other:
        return one
    for alike in (_TEXT, _BYTES):
        if one in alike and other in alike:
            return pa.large_string() if alike is _TEXT else pa.large_binary()
    if one.num_fields != other.num_fields or not one.num_fields:
        return None
    fields = [
        _find_common_type(one.field(i).type, other.field(i).type) for i in range(one.num_fields)
    ]
    if None in fields:
        return None
    if pa.types.is_struct(one) and pa.types.is_struct(other):
        names, others = ([field.name for field in kind] for kind in (one, other))
        return pa.struct(zip(names, fields, strict=True)) if names == others else None
    if pa.types.is_fixed_size_list(one) and pa.types.is_fixed_size_list(other):
        return pa.list_(fields[0], one.list_size) if one.list_size == other.list_size else None
    if _is_list(one) and _is_list(other):
        large = pa.types.is_large_list(one) or pa.types.is_large_list(other)
        return (pa.large_list if large else pa.list_)(fields[0])
    return None


def _is_list(kind: Any) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))
