"""Parquet files, read with pyarrow in blocks of about 8 MB by cursors that move forward."""

from __future__ import annotations

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from miniray.data.locations import Int64s
from miniray.data.sources.base import select_columns
from miniray.data.sources.chunks import ColumnChunk, read_chunks
from miniray.data.sources.files import FileList, FileSource, Spec, is_remote
from miniray.data.sources.footers import FileMetadata, MetadataIndex
from miniray.data.sources.schemas import cast, find_common_types
from miniray.data.sources.validation import (
    check_batch,
    check_names,
    create_change_error,
    get_first_line,
)
from miniray.errors import DataError

_OPEN_FILES = 4  # per thread
_BATCH_BYTES = 2_000_000  # blocks up to this size are decoded at once, others in four parts
_TAIL_BYTES = 1 << 14  # read at once; most footers are shorter
#: Keys by which object stores distinguish versions of a file.
_VERSIONS = ("ETag", "etag", "generation", "LastModified", "last_modified", "mtime")
#: pyarrow raises UnicodeDecodeError for damaged names.
_READ_ERRORS = (OSError, UnicodeDecodeError, pa.ArrowException)


class ParquetSource(FileSource):
    """Rows of Parquet files."""

    kind = "parquet"

    def __init__(self, files: Spec, columns: Sequence[str] | None = None) -> None:
        super().__init__(FileList(files, (".parquet", ".pq")), columns)

    def _reset(self) -> None:
        super()._reset()
        self._names: list[str] = []
        self._casts: dict[int, dict[str, Any]] = {}  # by file, if its types differ
        self._dictionaries: list[str] = []
        self._local = threading.local()
        self._pid = os.getpid()

    # -- metadata --------------------------------------------------------------------------------

    def list_columns(self) -> list[str]:
        self.list_blocks()
        return select_columns(self._names, self._columns, self.files[0])

    def _read_metadata(self) -> list[FileMetadata]:
        key = [self.kind, pa.__version__, self._columns]
        metadata = MetadataIndex().load(self.files, key, self._read_footer)
        schemas = {text: pa.ipc.read_schema(pa.py_buffer(bytes.fromhex(text)))
                   for text in {file.schema for file in metadata}}  # fmt: skip
        # Files without rows can have any schema: writers can't infer types from nothing.
        filled = [n for n, file in enumerate(metadata) if any(file.rows)]
        first = schemas[metadata[filled[0] if filled else 0].schema]
        self._names = first.names
        by_file = [(self.files[n], schemas[metadata[n].schema]) for n in filled]
        types = find_common_types(by_file, self._columns) if by_file else {}
        for number in filled:
            schema = schemas[metadata[number].schema]
            if any(str(schema.field(name).type) != str(kind) for name, kind in types.items()):
                self._casts[number] = types
        self._dictionaries = sorted({name for n in filled for name in metadata[n].dictionaries})
        return metadata

    def _read_footer(self, path: str) -> FileMetadata:
        opened = _OpenFile(path)
        try:
            metadata, schema = opened.metadata, opened.schema
            check_names(schema)
            rows = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
            groups = read_chunks(opened.footer)
            leaves = list(_iter_leaves(schema, self._columns, metadata.num_columns))
            opened.check_chunks(groups, leaves)
            dictionaries = _find_dictionaries(leaves, groups)
            nbytes = [
                sum(
                    chunks[leaf.number].estimate_bytes(leaf.name in dictionaries) for leaf in leaves
                )
                for chunks in groups
            ]
            text = schema.remove_metadata().serialize().to_pybytes().hex()
            is_sound = len(nbytes) == len(rows) and sum(rows) == metadata.num_rows
            if not is_sound or any(not 0 <= n < 2**62 for n in (*rows, *nbytes)):
                raise OSError("the sizes of row groups in the footer are damaged")
            return FileMetadata(rows, nbytes, opened.mark, text, dictionaries)
        except (IndexError, *_READ_ERRORS) as error:
            raise opened.create_error(error) from error
        finally:
            opened.close()

    # -- reading ---------------------------------------------------------------------------------

    def read_block(self, block: int, columns: Sequence[str] | None = None) -> Any:
        found = self.list_blocks()[block]
        path = self.files[found.file]
        # Select by name: files can have their columns in different orders.
        names = list(columns or self._columns or self._names)
        place = f"{path}, row group {found.run}, row {found.first_row}"
        front = int(self._run_fronts[block])
        first = int(found.first_row - self.list_blocks().first_row[front])
        batch_rows = int(self.list_blocks().rows[front])
        if self.list_blocks().nbytes[front] > _BATCH_BYTES:
            batch_rows = max(1, batch_rows // 4)  # pyarrow's pages and the block are held at once
        try:
            opened = self._open(found.file, names)
            batch = opened.read(found.run, first, found.rows, batch_rows)
            check_batch(batch, path, found.first_row)
            casts = self._casts.get(found.file)
            return batch if casts is None else cast(batch, casts)
        except FileNotFoundError as error:
            raise DataError(f"File {path} no longer exists.", path, found.first_row) from error
        except _READ_ERRORS as error:
            raise DataError(
                f"{place}: the row group can't be read: {get_first_line(error)}. The file may be"
                " damaged.",
                path,
                found.first_row,
            ) from error

    @cached_property
    def _run_fronts(self) -> Int64s:
        """First block of the row group of each block."""
        blocks = self.list_blocks()
        is_front = (np.diff(blocks.file, prepend=-1) != 0) | (np.diff(blocks.run, prepend=-1) != 0)
        return np.maximum.accumulate(np.where(is_front, np.arange(len(blocks)), 0))

    def _open(self, file: int, names: list[str]) -> _OpenFile:
        if self._pid != os.getpid():  # after a fork, leave the readers to the parent
            self._local, self._pid = threading.local(), os.getpid()
        opened: OrderedDict[Any, _OpenFile] | None = getattr(self._local, "files", None)
        if opened is None:
            opened = self._local.files = OrderedDict()
        path, key = self.files[file], (file, tuple(names))
        found = opened.get(key)
        if found is not None and not found.is_unchanged():
            opened.pop(key).close()
            found = None
        if found is None:
            found = opened[key] = _OpenFile(path, names, self._dictionaries)
            select_columns(found.schema.names, names, path)
            if found.mark != self._marks[file]:
                opened.pop(key).close()
                raise create_change_error(path)
        opened.move_to_end(key)
        for other, other_file in opened.items():
            if other != key:
                other_file.release()
        while len(opened) > _OPEN_FILES:
            opened.popitem(last=False)[1].close()
        return found

    def normalize(self, batch: Any) -> Any:
        """Decode the columns that are read as dictionaries only to save memory."""
        if not self._dictionaries:
            return batch
        columns = [
            column.dictionary_decode()
            if name in self._dictionaries and pa.types.is_dictionary(column.type)
            else column
            for name, column in zip(batch.schema.names, batch.columns, strict=True)
        ]
        return pa.RecordBatch.from_arrays(columns, batch.schema.names)


class _Cursor:
    """Rows of a row group from front to back."""

    def __init__(self, group: int, batches: Iterator[Any]) -> None:
        self.group, self._batches = group, batches
        self.row = 0  # the next one
        self._rest: Any = None  # rows that were decoded and not returned yet

    def read(self, stop: int) -> list[Any]:
        """Return the rows up to ``stop`` as batches."""
        parts: list[Any] = []
        while self.row < stop:
            batch = next(self._batches, None) if self._rest is None else self._rest
            self._rest = None
            if batch is None:
                break
            if batch.num_rows > stop - self.row:
                self._rest = batch.slice(stop - self.row)
                batch = batch.slice(0, stop - self.row)
            self.row += batch.num_rows
            parts.append(batch)
        return parts


class _OpenFile:
    """One Parquet file opened by one thread.

    Files are read through a buffer and never mapped: a truncated map would end the process.
    """

    def __init__(
        self, path: str, names: Sequence[str] | None = None, dictionaries: Sequence[str] = ()
    ) -> None:
        self.path = path
        self._names = names
        self._cursor: _Cursor | None = None
        try:
            source, read, self._stamp, size = (_open_remote if is_remote(path) else _open_local)(
                path
            )
            if size == 0:
                raise DataError(f"{path} is empty (0 bytes) and not a Parquet file.", path)
            footer = _read_footer_bytes(read, size)
            self.size = size
            self.mark = f"{size}-{hashlib.blake2b(footer, digest_size=8).hexdigest()}"
            metadata = None
            if footer and is_remote(path):  # don't request it again
                end = len(footer).to_bytes(4, "little") + b"PAR1"
                metadata = pq.read_metadata(pa.BufferReader(footer + end))
            self.footer = footer
            self.reader = pq.ParquetFile(
                source,
                metadata=metadata,
                read_dictionary=list(dictionaries) or None,
                memory_map=False,
                buffer_size=1 << 20,
                pre_buffer=False,
            )
            self.metadata, self.schema = self.reader.metadata, self.reader.schema_arrow
        except FileNotFoundError as error:
            raise DataError(f"File {path} no longer exists.", path) from error
        except _READ_ERRORS as error:
            raise self.create_error(error) from error

    def is_unchanged(self) -> bool:
        """Return whether the file at this path is still the one that was opened."""
        return is_remote(self.path) or _stamp_local(self.path) == self._stamp

    def close(self) -> None:
        self.release()
        self.reader.close()

    def release(self) -> None:
        """Release the decoded rows that are kept for the next block."""
        self._cursor = None

    def create_error(self, error: Exception) -> DataError:
        """Return the error for a file that can't be opened because of ``error``."""
        return DataError(
            f"{self.path} can't be opened as Parquet: {get_first_line(error)}. It may be"
            " truncated (its writer was interrupted), damaged, encrypted, or not a Parquet file.",
            self.path,
        )

    def check_chunks(
        self, groups: Sequence[Sequence[ColumnChunk]], leaves: Sequence[_Leaf]
    ) -> None:
        """Raise ``DataError`` for an encrypted column or one that ends after the file."""
        for number, chunks in enumerate(groups):
            for leaf in leaves:
                chunk = chunks[leaf.number]
                if chunk.is_encrypted:
                    column = self.metadata.schema.column(leaf.number).path
                    raise DataError(
                        f"{self.path}: column {column} is encrypted, and keys can't be passed."
                        " Select other columns with columns=[...], or write the file without"
                        " encryption.",
                        self.path,
                    )
                if chunk.start + chunk.size > self.size:
                    column = self.metadata.schema.column(leaf.number).path
                    raise DataError(
                        f"{self.path}, row group {number}: column {column} ends at byte"
                        f" {chunk.start + chunk.size}, but the file ends at {self.size}. The file"
                        " is truncated or damaged.",
                        self.path,
                    )

    def read(self, group: int, first: int, rows: int, batch_rows: int) -> Any:
        """Read rows of a row group as one record batch.

        Rows can't be skipped without decoding them, so reading backward starts again at the front.
        """
        cursor, self._cursor = self._cursor, None
        if cursor is None or cursor.group != group or cursor.row > first:
            cursor = None  # release its pages before the next ones are decoded
            batches = self.reader.iter_batches(
                batch_rows, row_groups=[group], columns=self._names, use_threads=False
            )
            cursor = _Cursor(group, batches)
        while cursor.row < first:
            before = cursor.row
            cursor.read(min(first, cursor.row + batch_rows))
            if cursor.row == before:
                break
        parts = cursor.read(first + rows)
        if cursor.row < first + rows:
            raise OSError(f"the row group ends at row {cursor.row}, before its footer says")
        if cursor.row < self.metadata.row_group(group).num_rows:
            self._cursor = cursor  # only after success: a failed read starts again
        batch = parts[0] if len(parts) == 1 else pa.concat_batches(parts)
        names = self._names or batch.schema.names
        # By name: pyarrow takes ``a.b`` for field b of a. Without metadata and null flags, so that
        # batches of different files have the same schema.
        return pa.RecordBatch.from_arrays([batch.column(name) for name in names], list(names))


class _Leaf(NamedTuple):
    number: int
    name: str  # of its top-level column
    is_text: bool  # a top-level column of text or bytes


def _iter_leaves(schema: Any, names: Sequence[str] | None, total: int) -> Iterator[_Leaf]:
    """Yield the leaves of columns. Paths don't identify them: names can contain dots."""
    number = 0
    found = []
    for field in schema:
        count = _count_leaves(field.type)
        if names is None or field.name in names:
            is_text = count == 1 and field.type in _TEXT_TYPES
            found += [_Leaf(number + i, field.name, is_text) for i in range(count)]
        number += count
    yield from found if number == total else (_Leaf(i, "", False) for i in range(total))


_TEXT_TYPES = (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())


def _count_leaves(kind: Any) -> int:
    kind = getattr(kind, "storage_type", kind)  # of an extension type
    return sum(_count_leaves(kind.field(i).type) for i in range(kind.num_fields)) or 1


def _find_dictionaries(
    leaves: Sequence[_Leaf], groups: Sequence[Sequence[ColumnChunk]]
) -> list[str]:
    """Return the text columns that take much less memory as dictionaries in all row groups."""
    names = []
    for leaf in leaves:
        chunks = [chunks[leaf.number] for chunks in groups if leaf.is_text]
        if chunks and all(c.is_repetitive for c in chunks) and any(c.is_long for c in chunks):
            names.append(leaf.name)
    return names


# -- files -----------------------------------------------------------------------------------------

Read = Callable[[int, int], bytes]


def _stamp_local(path: str) -> Any:
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    return status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns


def _open_local(path: str) -> tuple[Any, Read, Any, int]:
    stamp = _stamp_local(path)
    file = pa.OSFile(path)
    size = int(file.size())
    if stamp != _stamp_local(path):
        raise OSError("the file changed while it was opened")

    def read(start: int, count: int) -> bytes:
        return bytes(file.read_at(count, start))

    return file, read, stamp, size


def _open_remote(path: str) -> tuple[Any, Read, Any, int]:
    import fsspec

    handle = fsspec.open(path, "rb").open()
    details: Mapping[str, Any] = getattr(handle, "details", None) or {}

    def read(start: int, count: int) -> bytes:
        handle.seek(start)
        return bytes(handle.read(count))

    stamp = [details.get(key) for key in _VERSIONS]
    return pa.PythonFile(handle, mode="r"), read, stamp, int(handle.size)


def _read_footer_bytes(read: Read, size: int) -> bytes:
    """Return the footer without its length and magic, or nothing if the file has none."""
    tail = read(max(0, size - _TAIL_BYTES), min(size, _TAIL_BYTES))
    if len(tail) < 12 or tail[-4:] != b"PAR1":
        return b""
    length = int.from_bytes(tail[-8:-4], "little")
    if length + 8 > size:
        return b""
    if length + 8 > len(tail):
        return read(size - 8 - length, length)
    return tail[-8 - length : -8]
