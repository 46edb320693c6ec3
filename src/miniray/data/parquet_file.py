"""One Parquet file open in one thread: row groups, whole or in slices, as rows in memory.

Files are read through a buffer. A memory map would end the process with SIGBUS if the file is
truncated while it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miniray.data.arrow_rows import ArrowRows, rows_of
from miniray.data.footer import ValueFile, footer_bytes, mark_of, unchanged
from miniray.data.sources.base import Slabs
from miniray.data.sources.files import is_remote
from miniray.data.validation import check_batch, get_first_line, release_unused
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
    """Read row groups of ``path``. Raise ``DataError`` with the file if that fails.

    Attributes:
        mark: Changes with the content.
        footer: Encoded footer. Empty if the file was ``looked`` at before.
    """

    def __init__(self, path: str, looked: Looked | None = None) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self.path = path
        self._file: ValueFile | None = None
        self._cursor: _Cursor | None = None
        self.footer = b""
        try:
            source, read = self._open_remote() if is_remote(path) else self._open_local()
            metadata = None
            if looked is not None and looked.stamp is not None and looked.stamp == self.stamp:
                self.mark, metadata = looked.mark, looked.metadata
            else:
                self.footer = footer = footer_bytes(read, self.size)
                self.mark = mark_of(footer, self.size)
                if footer:  # Arrow raises an error for a file that doesn't end with a footer.
                    end = len(footer).to_bytes(4, "little") + b"PAR1"
                    metadata = pq.read_metadata(pa.BufferReader(footer + end))
            self.reader = pq.ParquetFile(
                source, metadata=metadata, buffer_size=1 << 20, pre_buffer=False
            )
        except FileNotFoundError as error:
            raise DataError(f"{path} does not exist any more", path) from error
        except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
            raise self.open_error(error) from error

    def open_error(self, error: Exception) -> DataError:
        """Return the error for a file that can't be opened because of ``error``."""
        return DataError(
            f"{self.path} cannot be opened as parquet: {get_first_line(error)}. The file may be"
            " truncated (its writer was interrupted), damaged, encrypted, or not a Parquet file",
            self.path,
        )

    def _open_local(self) -> tuple[Any, Callable[[int, int], bytes]]:
        import pyarrow as pa

        file = self._file = ValueFile(self.path)
        self.stamp: Any = file.stamp()
        self.size: int = self.stamp.size
        if self.size == 0:
            raise DataError(
                f"{self.path} is empty (0 bytes), which isn't a Parquet file", self.path
            )
        return pa.OSFile(self.path), file.read

    def _open_remote(self) -> tuple[Any, Callable[[int, int], bytes]]:
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
                where = f", row group {group}"
                self.stamp = unchanged(self._file, self.stamp, self.mark, where)
            part = start > 0 or stop < rows
            chunk = max(1, rows * _CHUNK // max(1, nbytes))
            if not part:
                batches: Iterable[Any] = self._batches(group, names, chunk)
            else:
                chunk = max(1, min(chunk, (stop - start) // 4))
                batches, start = self._slice(group, names, chunk, start, stop)
            if casts is not None:
                from miniray.data.sources.schemas import cast

                batches = (cast(batch, casts) for batch in batches)
            found = rows_of(batches, start, slabs)
        except FileNotFoundError as error:
            raise DataError(f"{self.path} does not exist any more", self.path) from error
        except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
            raise DataError(
                f"{self.path}, row group {group} cannot be read: {get_first_line(error)}",
                self.path,
                self._first_row(group),
            ) from error
        finally:
            release_unused()
        if found.start + found.num_rows < min(stop, rows):
            raise DataError(
                f"{self.path}, row group {group} should have {rows} rows but has fewer; the file"
                " is damaged",
                self.path,
                self._first_row(group),
            )
        return found

    def _first_row(self, group: int) -> int:
        """Return the index in the file of the first row of a row group."""
        metadata = self.reader.metadata
        return sum(metadata.row_group(number).num_rows for number in range(group))

    def _batches(self, group: int, names: Sequence[str], size: int) -> Iterator[Any]:
        # Arrow takes ``a.b`` for field ``b`` of column ``a`` and may return more columns.
        has_dots = any("." in name for name in names)
        row = self._first_row(group)
        for batch in self.reader.iter_batches(
            size, row_groups=[group], columns=names, use_threads=False
        ):
            check_batch(batch, self.path, row)
            row += batch.num_rows
            yield batch.select(names) if has_dots else batch

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
