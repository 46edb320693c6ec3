"""Column chunks of a Parquet file, as its footer describes them.

pyarrow's accessor, ``RowGroupMetaData.column``, aborts the process if the metadata of the column is
damaged or encrypted.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from miniray.data.sources.thrift import DAMAGED, read_struct

_COLUMNS, _COLUMN_METADATA, _CRYPTO_METADATA = 1, 3, 8
_TYPE, _VALUES, _DECODED, _SIZE, _DATA, _DICTIONARY, _STATISTICS = 1, 5, 6, 7, 9, 11, 12
_NULL_COUNT, _MAX_VALUE, _MIN_VALUE = 3, 5, 6
#: Bytes per value of fixed-width types: BOOLEAN, INT32, INT64, INT96, FLOAT, DOUBLE.
_WIDTHS = {0: 1, 1: 4, 2: 8, 3: 8, 4: 4, 5: 8}
#: Encoded bytes per value below which values of a dictionary are likely to repeat.
_DICTIONARY_BYTES = 16
#: Length of values from which on reading them as an Arrow dictionary saves memory.
_LONG_VALUE_BYTES = 64
#: Length of values from which on writers leave them out of the statistics.
_MAX_STATISTICS_BYTES = 4096


class ColumnChunk(NamedTuple):
    """Location and size of one leaf column in one row group."""

    start: int
    size: int
    encoded_bytes: int  # without compression
    values: int
    width: int | None  # bytes per value, None for BYTE_ARRAY and FIXED_LEN_BYTE_ARRAY
    has_dictionary: bool
    value_bytes: int  # length of the values, guessed from the statistics
    is_encrypted: bool

    @property
    def is_repetitive(self) -> bool:
        """Whether values are encoded in few bytes each, so that decoding can take much memory."""
        return self.has_dictionary and self.encoded_bytes < _DICTIONARY_BYTES * self.values

    @property
    def is_long(self) -> bool:
        """Whether values are long enough to be read as an Arrow dictionary."""
        return self.value_bytes >= _LONG_VALUE_BYTES

    def estimate_bytes(self, as_dictionary: bool) -> int:
        """Estimate the decoded size."""
        if self.width is not None:
            return self.width * self.values
        size = self.encoded_bytes
        if self.is_repetitive and not as_dictionary:
            size = max(size, self.value_bytes * self.values)
        return size + 4 * self.values


def read_chunks(footer: bytes) -> list[list[ColumnChunk]]:
    """Return the column chunks of each row group. Raise ``OSError`` for a damaged footer."""
    fields = (_TYPE, _VALUES, _DECODED, _SIZE, _DATA, _DICTIONARY)
    column: dict[int, Any] = dict.fromkeys(fields)
    column[_STATISTICS] = dict.fromkeys((_NULL_COUNT, _MAX_VALUE, _MIN_VALUE))
    wanted = {4: {_COLUMNS: {_COLUMN_METADATA: column, _CRYPTO_METADATA: None}}}
    try:
        groups = read_struct(footer, 0, wanted, until=4)[0].get(4, [])
        return [[_create_chunk(described) for described in group[_COLUMNS]] for group in groups]
    except DAMAGED as error:
        raise OSError("the metadata of a column is damaged") from error


def _create_chunk(described: dict[int, Any]) -> ColumnChunk:
    if _CRYPTO_METADATA in described:
        return ColumnChunk(0, 0, 0, 0, None, False, 0, True)
    column = described[_COLUMN_METADATA]
    statistics = column.get(_STATISTICS) or {}
    bounds = [len(statistics[key]) for key in (_MAX_VALUE, _MIN_VALUE) if key in statistics]
    # Without bounds, the values are long, or all are missing.
    is_empty = statistics.get(_NULL_COUNT, 0) >= column[_VALUES]
    # A dictionary comes before the data.
    return ColumnChunk(
        column.get(_DICTIONARY) or column[_DATA],
        column[_SIZE],
        column[_DECODED],
        column[_VALUES],
        _WIDTHS.get(column[_TYPE]),
        bool(column.get(_DICTIONARY)),
        max(bounds, default=0 if is_empty else _MAX_STATISTICS_BYTES),
        False,
    )
