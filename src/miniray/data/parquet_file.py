"""One parquet file open in one thread: row groups, whole or in slices, as rows in memory.

Local files are mapped into memory, so that pages go from the page cache into Arrow without a copy
between; what was read is then unmapped again (``MADV_DONTNEED``), or the whole file would in time
be counted as this process's memory.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miniray.data.arrow_rows import ArrowRows, rows_of
from miniray.data.files import is_remote
from miniray.data.slabs import Slabs
from miniray.data.value_file import has_changed
from miniray.errors import DataError

_CHUNK = 4 << 20  # bytes decoded at a time


@dataclass
class _Cursor:
    """Where in a row group too large to be held the reading has come to."""

    group: int
    names: Sequence[str]
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
        self._cursor: _Cursor | None = None
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
        self._cursor = None

    def read(
        self,
        group: int,
        start: int,
        stop: int,
        names: Sequence[str],
        nbytes: int,
        slabs: Slabs | None,
        casts: Mapping[str, Any] | None = None,
    ) -> ArrowRows:
        """Rows ``start`` to ``stop`` of a row group of about ``nbytes``, or more of it.

        ``casts``: types that columns are to be given, where other files have others.
        """
        import pyarrow as pa

        rows = self.reader.metadata.row_group(group).num_rows
        try:
            if self._size_now() != self.size:
                raise has_changed(f"{self.path}, row group {group}")
            part = start > 0 or stop < rows
            chunk = max(1, rows * _CHUNK // max(1, nbytes))
            if not part:
                batches = self._batches(group, names, chunk)
            else:
                chunk = max(1, min(chunk, (stop - start) // 4))
                batches, start = self._slice(group, names, chunk, start, stop)
            if casts is not None:
                from miniray.data.schemas import cast

                batches = (cast(batch, casts) for batch in batches)
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

    def _batches(self, group: int, names: Sequence[str], size: int) -> Any:
        batches = self.reader.iter_batches(
            size, row_groups=[group], columns=names, use_threads=False
        )
        if not any("." in name for name in names):
            return batches
        return (batch.select(names) for batch in batches)  # Arrow takes ``a.b`` for a field of a

    def _slice(
        self, group: int, names: Sequence[str], chunk: int, start: int, stop: int
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


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
