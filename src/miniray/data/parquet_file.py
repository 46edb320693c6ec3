"""One parquet file open in one thread: row groups, whole or in slices, as rows in memory.

Local files are mapped into memory, so that pages go from the page cache into Arrow without a copy
between; what was read is then unmapped again (``MADV_DONTNEED``), or the whole file would in time
be counted as this process's memory.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from miniray.data.arrow_rows import ArrowRows, Large, fits, rows_of
from miniray.data.files import is_remote
from miniray.data.pages import (
    StoredValues,
    ValueFile,
    has_changed,
    may_be_stored,
    stored_values,
)
from miniray.data.slabs import Slabs
from miniray.data.values import Path
from miniray.errors import DataError

_CHUNK = 4 << 20  # bytes decoded at a time
_SMALL = 1 << 20  # bytes that Arrow's own memory is good enough for

Names = Sequence[str] | None


@dataclass
class _Cursor:
    """Where in a row group too large to be held the reading has come to."""

    group: int
    names: Names
    batches: Iterator[Any]
    row: int = 0  # the first that has not been read
    last: Any = None  # the batch before it


class OpenParquet:
    """Raises ``DataError`` with the file, and the row group, where it cannot be opened or read."""

    def __init__(self, path: str, memory_map: bool = True, metadata: Any = None) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self.path = path
        self._mapped: mmap.mmap | None = None
        self._values: ValueFile | None = None  # for values that are not taken through Arrow
        self._cursor: _Cursor | None = None
        self._whole: tuple[int, Names, ArrowRows] | None = None
        try:
            if is_remote(path):
                import fsspec

                handle = fsspec.open(path, "rb").open()
                self.size = int(handle.size)
                source: Any = pa.PythonFile(handle, mode="r")
            else:
                source = self._open_local(path, memory_map)
            self.reader = pq.ParquetFile(
                source, metadata=metadata, buffer_size=0 if self._mapped else 1 << 20
            )
        except FileNotFoundError as error:
            raise DataError(f"{path} does not exist any more") from error
        except (OSError, pa.ArrowException) as error:
            raise DataError(
                f"{path} cannot be opened as parquet: {_first_line(error)}. It may be truncated"
                " (its writer was interrupted) or be no parquet file"
            ) from error

    def _open_local(self, path: str, memory_map: bool) -> Any:
        import pyarrow as pa

        with open(path, "rb") as file:
            self.size = os.fstat(file.fileno()).st_size
            if self.size == 0:
                raise DataError(f"{path} is empty (0 bytes), which is no parquet file")
            if not memory_map:
                return pa.OSFile(path)
            self._mapped = mmap.mmap(file.fileno(), self.size, prot=mmap.PROT_READ)
        return pa.BufferReader(pa.py_buffer(self._mapped))

    def close(self) -> None:
        self.forget()
        self.reader.close()

    def forget(self) -> None:
        """Let go of what is kept for the next slice, which may be large."""
        self._cursor = self._whole = None

    def read(
        self, group: int, start: int, stop: int, names: Names, nbytes: int, slabs: Slabs | None
    ) -> ArrowRows:
        """Rows ``start`` to ``stop`` of a row group of about ``nbytes``, or more of it."""
        import pyarrow as pa

        rows = self.reader.metadata.row_group(group).num_rows
        try:
            if self._size_now() != self.size:
                raise has_changed(f"{self.path}, row group {group}")
            part = start > 0 or stop < rows
            found = self._with_stored(group, names, slabs)
            if found is not None:
                self._whole = (group, names, found) if part else None
            else:
                chunk = max(1, rows * _CHUNK // max(1, nbytes))
                if not part:
                    batches = self._batches(group, names, chunk)
                else:
                    chunk = max(1, min(chunk, (stop - start) // 4))
                    batches, start = self._slice(group, names, chunk, start, stop)
                found = rows_of(batches, start, slabs)
        except FileNotFoundError as error:
            raise DataError(f"{self.path} does not exist any more") from error
        except (OSError, pa.ArrowException) as error:
            raise DataError(
                f"{self.path}, row group {group} cannot be read: {_first_line(error)}"
            ) from error
        finally:
            if self._mapped is not None:
                self._mapped.madvise(mmap.MADV_DONTNEED)
        if found.start + found.num_rows < min(stop, rows):
            raise DataError(
                f"{self.path}, row group {group}: its footer says {rows} rows, but it has fewer;"
                " the file is damaged"
            )
        return found

    def _size_now(self) -> int:
        if self._mapped is not None:
            return self._mapped.size()
        return self.size if is_remote(self.path) else os.stat(self.path).st_size

    def _batches(self, group: int, names: Names, size: int) -> Any:
        return self.reader.iter_batches(size, row_groups=[group], columns=names, use_threads=False)

    def _slice(
        self, group: int, names: Names, chunk: int, start: int, stop: int
    ) -> tuple[list[Any], int]:
        """Part of a row group too large to be held: read on from where the last part ended.

        Rows cannot be skipped in a parquet file without decoding them, so going back costs the rows
        before; orders are made so that a reader goes forward.
        """
        cursor, self._cursor = self._cursor, None
        if (
            cursor is None
            or (cursor.group, cursor.names) != (group, names)
            or start < cursor.row - (0 if cursor.last is None else cursor.last.num_rows)
        ):
            cursor = None  # lets go of its page before the next is decoded
            cursor = _Cursor(group, names, self._batches(group, names, chunk))
        kept: list[Any] = [cursor.last] if cursor.row > start else []
        while cursor.row < stop:
            batch = next(cursor.batches, None)
            if batch is None:
                break
            cursor.row += batch.num_rows
            cursor.last = batch
            if cursor.row > start:
                kept.append(batch)
        if cursor.row < self.reader.metadata.row_group(group).num_rows:
            self._cursor = cursor  # only if nothing was raised: what failed begins anew
        return kept, cursor.row - sum(batch.num_rows for batch in kept)

    # -- large values, left where they are ---------------------------------------------------------

    def _with_stored(self, group: int, names: Names, slabs: Slabs | None) -> ArrowRows | None:
        """The row group with its large values left in the file; None if it has no such values."""
        if is_remote(self.path):
            return None
        if self._whole is not None and self._whole[:2] == (group, names):
            return self._whole[2]
        meta, arrow = self.reader.metadata.row_group(group), self.reader.schema_arrow
        fields = [field for field in arrow if names is None or field.name in names]
        asked = {field.name for field in fields}
        rest: list[str] = []
        stored: dict[Path, StoredValues] = {}
        for leaf in range(meta.num_columns):
            chunk = meta.column(leaf)
            path = chunk.path_in_schema.split(".")
            if path[0] not in asked:
                continue
            where = _place(arrow, path) if may_be_stored(chunk) else None
            values = None if where is None else self._stored(leaf, chunk)
            if where is None or values is None:
                rest.append(chunk.path_in_schema)
            else:
                stored[where] = values
        if not stored:
            return None
        table = self.reader.read_row_group(group, columns=rest, use_threads=False)
        batches = table.combine_chunks().to_batches()
        large = Large(fields, stored, meta.num_rows)
        if not fits(batches, large):
            return None  # values are missing: which ones is for Arrow to find out
        return rows_of(batches, 0, slabs if table.nbytes > _SMALL else None, large)

    def _stored(self, leaf: int, chunk: Any) -> StoredValues | None:
        column = self.reader.schema.column(leaf)
        levels = (column.max_repetition_level, column.max_definition_level)
        if self._values is None:
            self._values = ValueFile(self.path)
        return stored_values(self._values, chunk, levels)


def _place(schema: Any, path: list[str]) -> Path | None:
    """Where the values of a column go in a row; None if they are no bytes, or no struct's field."""
    import pyarrow as pa

    names: Path = ()
    kind, rest = pa.struct(list(schema)), path
    while rest:
        if pa.types.is_struct(kind) and kind.get_field_index(rest[0]) >= 0:
            names, kind, rest = (*names, rest[0]), kind.field(rest[0]).type, rest[1:]
        elif len(rest) > 2 and (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
            kind, rest = kind.value_type, rest[2:]
        else:
            return None
    return names if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) else None


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
