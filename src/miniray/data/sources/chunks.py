"""Column chunks of a Parquet file, as its footer describes them, and their decoded sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from miniray.data.sources.thrift import DAMAGED, read_struct

_COLUMNS, _COLUMN_METADATA, _CRYPTO_METADATA = 1, 3, 8
_TYPE, _VALUES, _DECODED, _DICTIONARY, _STATISTICS = 1, 5, 6, 11, 12
_NULL_COUNT, _MAX_VALUE, _MIN_VALUE = 3, 5, 6
_COLUMN = {
    **dict.fromkeys((_TYPE, _VALUES, _DECODED, _DICTIONARY)),
    _STATISTICS: dict.fromkeys((_NULL_COUNT, _MAX_VALUE, _MIN_VALUE)),
}
_ROW_GROUPS = 4
_FOOTER = {_ROW_GROUPS: {_COLUMNS: {_COLUMN_METADATA: _COLUMN, _CRYPTO_METADATA: None}}}
_TEXT_TYPES = (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())
#: Bytes per value of fixed-width types: BOOLEAN, INT32, INT64, INT96, FLOAT, DOUBLE.
_WIDTHS = {0: 1, 1: 4, 2: 8, 3: 8, 4: 4, 5: 8}
#: Encoded bytes per value below which values of a dictionary are likely to repeat.
_DICTIONARY_BYTES = 16
#: Length of values from which on reading them as an Arrow dictionary saves memory.
_LONG_VALUE_BYTES = 64
#: Length of values from which on writers leave them out of the statistics.
_MAX_STATISTICS_BYTES = 4096


class ColumnChunk(NamedTuple):
    """One leaf column in one row group."""

    encoded_bytes: int  # without compression
    values: int
    width: int | None  # bytes per value, None for BYTE_ARRAY and FIXED_LEN_BYTE_ARRAY
    has_dictionary: bool
    value_bytes: int  # length of the values, guessed from the statistics
    is_encrypted: bool = False

    @property
    def is_repetitive(self) -> bool:
        """Whether values are encoded in few bytes each, so that decoding can take much memory."""
        return self.has_dictionary and self.encoded_bytes < _DICTIONARY_BYTES * self.values

    def estimate_bytes(self, as_dictionary: bool) -> int:
        """Estimate the decoded size."""
        if self.width is not None:
            return self.width * self.values
        size = self.encoded_bytes
        if self.is_repetitive and not as_dictionary:
            size = max(size, self.value_bytes * self.values)
        return size + 4 * self.values


def read_chunks(footer: bytes, columns: int) -> list[list[ColumnChunk]]:
    """Return the chunks of each row group, one per leaf column.

    Raises ``OSError`` if the footer is damaged.
    """
    try:
        groups = read_struct(footer, 0, _FOOTER)[0].get(_ROW_GROUPS, [])
        found = [[_create_chunk(column) for column in group[_COLUMNS]] for group in groups]
    except DAMAGED as error:
        raise OSError("the metadata of a column is damaged") from error
    if any(len(chunks) != columns for chunks in found):
        raise OSError("the footer is damaged: a row group has a different number of columns")
    return found


def _create_chunk(described: dict[int, Any]) -> ColumnChunk:
    if _CRYPTO_METADATA in described:
        return ColumnChunk(0, 0, None, False, 0, is_encrypted=True)
    column = described[_COLUMN_METADATA]
    statistics = column.get(_STATISTICS) or {}
    bounds = [len(statistics[key]) for key in (_MAX_VALUE, _MIN_VALUE) if key in statistics]
    # Without bounds, the values are long, or all are missing.
    is_empty = statistics.get(_NULL_COUNT, 0) >= column[_VALUES]
    return ColumnChunk(
        column[_DECODED],
        column[_VALUES],
        _WIDTHS.get(column[_TYPE]),
        bool(column.get(_DICTIONARY)),
        max(bounds, default=0 if is_empty else _MAX_STATISTICS_BYTES),
    )


def find_leaves(schema: Any, names: Sequence[str] | None, count: int) -> dict[int, Any]:
    """Return the top-level field of each selected leaf column, by the number of the leaf.

    Paths of leaves don't identify fields: names can contain dots.
    """
    fields = [field for field in schema for _ in range(_count_leaves(field.type))]
    if len(fields) != count:  # a type that this doesn't know: select all
        fields, names = [pa.field("", pa.null())] * count, None
    return {n: field for n, field in enumerate(fields) if names is None or field.name in names}


def _count_leaves(kind: Any) -> int:
    kind = getattr(kind, "storage_type", kind)  # of an extension type
    return sum(_count_leaves(kind.field(i).type) for i in range(kind.num_fields)) or 1


def find_dictionaries(
    leaves: Mapping[int, Any], groups: Sequence[Sequence[ColumnChunk]]
) -> list[str]:
    """Return the text columns that take much less memory as dictionaries in all row groups."""
    names = []
    for number, field in leaves.items():
        chunks = [group[number] for group in groups if field.type in _TEXT_TYPES]
        is_long = any(chunk.value_bytes >= _LONG_VALUE_BYTES for chunk in chunks)
        if is_long and all(chunk.is_repetitive for chunk in chunks):
            names.append(field.name)
    return names
