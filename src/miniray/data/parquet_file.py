"""One parquet file open in one thread: row groups, whole or in slices, as rows in memory.

Local files are mapped into memory, so that pages go from the page cache into Arrow without a copy
between; what was read is then unmapped again (``MADV_DONTNEED``), or the whole file would in time
be counted as this process's memory.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miniray.data.arrow_rows import ArrowRows, rows_of
from miniray.data.footer import ValueFile, encrypted_leaves, footer_bytes, mark_of, unchanged
from miniray.data.sources.base import Slabs
from miniray.data.sources.files import is_remote
from miniray.errors import DataError

_CHUNK = 4 << 20  # bytes decoded at a time
#: By what stores tell one version of a file from another.
_VERSIONS = ("ETag", "etag", "generation", "LastModified", "last_modified", "mtime")


@dataclass
class _Cursor:
    """Where in a row group too large to be held the reading has come to."""

    group: int
    names: Sequence[str]
    batches: Iterator[Any]
    row: int = 0  # the first that has not been read
    last: Any = None  # the batch before it


@dataclass(frozen=True)
class Looked:
    """What is known of a file that was open before, so that it need not be parsed again."""

    stamp: Any  # None: another file may have the same
    mark: str
    metadata: Any


class OpenParquet:
    """Raises ``DataError`` with the file, and the row group, where it cannot be opened or read.

    ``mark`` changes with the content. ``encrypted`` are leaves, of a file that was not ``looked``
    at before: Arrow ends the process where it is asked for more than their names.
    """

    def __init__(self, path: str, memory_map: bool = True, looked: Looked | None = None) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self.path = path
        self._file: ValueFile | None = None
        self._mapped: mmap.mmap | None = None
        self._cursor: _Cursor | None = None
        self.encrypted: set[int] = set()
        try:
            source, read = (self._open_remote if is_remote(path) else self._open_local)(memory_map)
            metadata = None
            if looked is not None and looked.stamp is not None and looked.stamp == self.stamp:
                self.mark, metadata = looked.mark, looked.metadata
            else:
                footer = footer_bytes(read, self.size)
                self.mark = mark_of(footer, self.size)
                if footer:  # what ends without one is Arrow's to refuse
                    end = len(footer).to_bytes(4, "little") + b"PAR1"
                    metadata = pq.read_metadata(pa.BufferReader(footer + end))
                    if metadata.serialized_size < len(footer):  # it has been signed
                        self.encrypted = encrypted_leaves(footer)
            self.reader = pq.ParquetFile(
                source, metadata=metadata, buffer_size=0 if self._mapped else 1 << 20
            )
        except FileNotFoundError as error:
            raise DataError(f"{path} does not exist any more") from error
        except (OSError, pa.ArrowException) as error:
            raise DataError(
                f"{path} cannot be opened as parquet: {_first_line(error)}. It may be truncated"
                " (its writer was interrupted), encrypted, or be no parquet file"
            ) from error

    def _open_local(self, memory_map: bool) -> tuple[Any, Callable[[int, int], bytes]]:
        import pyarrow as pa

        file = self._file = ValueFile(self.path)
        self.stamp: Any = file.stamp()
        self.size: int = self.stamp.size
        if self.size == 0:
            raise DataError(f"{self.path} is empty (0 bytes), which is no parquet file")
        if not memory_map:
            return pa.OSFile(self.path), file.read
        self._mapped = mmap.mmap(file.handle, self.size, prot=mmap.PROT_READ)
        return pa.BufferReader(pa.py_buffer(self._mapped)), file.read

    def _open_remote(self, _memory_map: bool) -> tuple[Any, Callable[[int, int], bytes]]:
        import fsspec
        import pyarrow as pa

        handle = fsspec.open(self.path, "rb").open()
        self.size = int(handle.size)
        details = getattr(handle, "details", None) or {}
        versions = [details.get(key) for key in _VERSIONS]
        self.stamp = [self.size, *versions] if any(versions) else None

        def read(start: int, size: int) -> bytes:
            handle.seek(start)
            return bytes(handle.read(size))

        return pa.PythonFile(handle, mode="r"), read

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
            if self._file is not None:
                where = f"{self.path}, row group {group}"
                self.stamp = unchanged(self._file, self.stamp, self.mark, where)
            part = start > 0 or stop < rows
            chunk = max(1, rows * _CHUNK // max(1, nbytes))
            if not part:
                batches = self._batches(group, names, chunk)
            else:
                chunk = max(1, min(chunk, (stop - start) // 4))
                batches, start = self._slice(group, names, chunk, start, stop)
            if casts is not None:
                from miniray.data.sources.schemas import cast

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
