"""Arrow IPC files (file or stream format, as Hugging Face datasets writes) and tables in memory.

IPC files are validated once per version of a file, and read with a cursor that moves forward. They
are never mapped: a truncated map would end the process.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import pyarrow as pa

from miniray.data.locations import Blocks
from miniray.data.sources.base import select_columns
from miniray.data.sources.files import FileList, FileSource, is_remote
from miniray.data.sources.footers import FileMetadata, MetadataIndex
from miniray.data.sources.schemas import cast, find_common_types
from miniray.errors import DataError

_END_BYTES = 1 << 16  # at each end of a file, which identify its content
_FILE_MAGIC = b"ARROW1"
#: pyarrow raises SystemError for some kinds of damage.
_READ_ERRORS = (OSError, pa.ArrowException, SystemError)


class ArrowSource(FileSource):
    """Rows of Arrow IPC files, or of a table in memory (which has random access)."""

    kind = "arrow"
    _pickled = ("_list", "_columns", "_table")

    def __init__(self, data: Any, columns: Sequence[str] | None = None) -> None:
        self._table: Any = None
        if isinstance(data, Mapping) or hasattr(data, "__arrow_c_stream__"):
            self._table = pa.table(data)
        files = None if self._table is not None else FileList(data, (".arrow", ".feather", ".ipc"))
        super().__init__(files, columns)

    def _reset(self) -> None:
        super()._reset()
        self.random_access = self._table is not None
        self._names: list[str] = []
        self._types: dict[str, Any] = {}
        self._local = threading.local()
        self._pid = os.getpid()

    def list_columns(self) -> list[str]:
        self.list_blocks()
        return select_columns(self._names, self._columns, "the data")

    def _read_metadata(self) -> list[FileMetadata]:
        if self._table is not None:
            batches = self._table.to_batches()
            self._names = self._table.schema.names
            select_columns(self._names, self._columns, "the data")
            self._batches = [self._project(batch, self._columns) for batch in batches]
            rows = [batch.num_rows for batch in batches]
            return [FileMetadata(rows, [0] * len(rows))]
        key = [self.kind, pa.__version__, self._columns]
        metadata = MetadataIndex(min_files=1).load(self.files, key, self._scan)
        schemas = [
            (path, pa.ipc.read_schema(pa.py_buffer(bytes.fromhex(file.schema))))
            for path, file in zip(self.files, metadata, strict=True)
            if any(file.rows)
        ]
        if not schemas:
            raise DataError(f"{self.files[0]} has no rows.", self.files[0])
        self._names = schemas[0][1].names
        self._types = find_common_types(schemas, self._columns)
        return metadata

    def _scan(self, path: str) -> FileMetadata:
        """Validate a file and return the rows and bytes of its record batches."""
        file, mark = _open(path)
        with file:
            rows, nbytes = [], []
            schema = None
            try:
                reader = _BatchReader(file)
                schema = reader.schema
                for batch in reader.iter_batches():
                    batch.validate(full=True)
                    rows.append(batch.num_rows)
                    # A missing column is an error of find_common_types, which names it.
                    names = [n for n in self._columns or schema.names if n in schema.names]
                    is_single = len(set(schema.names)) == len(schema.names)
                    nbytes.append((batch.select(names) if is_single else batch).nbytes)
            except _READ_ERRORS as error:
                raise DataError(
                    f"{path} can't be opened as an Arrow file: {_first_line(error)}. It may be"
                    " truncated, damaged, or not an Arrow file.",
                    path,
                    sum(rows),
                ) from error
            text = schema.remove_metadata().serialize().to_pybytes().hex()
            return FileMetadata(rows, nbytes, mark, text)

    def _create_blocks(self, metadata: Sequence[FileMetadata]) -> None:
        super()._create_blocks(metadata)
        #: First row of each record batch within its file, and the rows of the file.
        self._edges = [list(accumulate(file.rows, initial=0)) for file in metadata]

    def _project(self, batch: Any, columns: Sequence[str] | None) -> Any:
        names = select_columns(self._names, columns or self._columns, self.files[0])
        batch = pa.RecordBatch.from_arrays([batch.column(name) for name in names], names)
        return cast(batch, self._types)

    def read_block(self, block: int, columns: Sequence[str] | None = None) -> Any:
        blocks: Blocks = self.list_blocks()
        found = blocks[block]
        if self._table is not None:
            batch = self._batches[found.run]
            if columns is not None:
                batch = self._project(self._table.to_batches()[found.run], columns)
            first = found.first_row - self._edges[0][found.run]
            return batch.slice(first, found.rows)
        path = self.files[found.file]
        try:
            batch = self._read_batch(found.file, found.run)
        except FileNotFoundError as error:
            raise DataError(f"File {path} no longer exists.", path, found.first_row) from error
        except _READ_ERRORS as error:
            raise DataError(
                f"{path}, row {found.first_row}: the record batch can't be read:"
                f" {_first_line(error)}. The file may be truncated or damaged.",
                path,
                found.first_row,
            ) from error
        first = found.first_row - self._edges[found.file][found.run]
        batch = self._project(batch, columns)
        if found.rows == batch.num_rows:
            return batch
        part = batch.slice(first, found.rows)
        # Concatenating copies, so that a block doesn't keep a larger record batch in memory.
        return pa.concat_batches([part, part.slice(0, 0)])

    def _read_batch(self, file: int, run: int) -> Any:
        """Read a record batch, moving forward if possible."""
        if self._pid != os.getpid():
            self._local, self._pid = threading.local(), os.getpid()
        cursor: _Cursor | None = getattr(self._local, "cursor", None)
        path, rows = self.files[file], np.diff(self._edges[file]).tolist()
        if cursor is None or cursor.file != file or cursor.has_passed(run) or cursor.has_changed():
            self._local.cursor = None
            cursor = self._local.cursor = _Cursor(path, file, self._marks[file])
        return cursor.read(run, rows)


class _BatchReader:
    """Record batches of an open file of either format."""

    def __init__(self, file: Any) -> None:
        file.seek(0)
        self.is_file = file.read(6) == _FILE_MAGIC
        file.seek(0)
        self.reader = (pa.ipc.open_file if self.is_file else pa.ipc.open_stream)(file)
        self.schema = self.reader.schema

    def iter_batches(self) -> Iterator[Any]:
        if not self.is_file:
            return iter(self.reader)
        return (self.reader.get_batch(i) for i in range(self.reader.num_record_batches))


class _Cursor:
    """The record batches of a file from front to back; those of the file format in any order."""

    def __init__(self, path: str, file: int, mark: str) -> None:
        self.file, self._path = file, path
        self._stamp = _stamp(path)
        self._handle, found = _open(path)
        if found != mark:
            raise DataError(
                f"{path} has changed its size or content since the dataset was created. Don't"
                " write to the files of a run.",
                path,
            )
        self._reader = _BatchReader(self._handle)
        self._batches = self._reader.iter_batches()
        self._run = -1
        self._batch: Any = None

    def has_passed(self, run: int) -> bool:
        return not self._reader.is_file and run < self._run

    def has_changed(self) -> bool:
        return bool(_stamp(self._path) != self._stamp)

    def read(self, run: int, rows: Sequence[int]) -> Any:
        if self._reader.is_file and run != self._run:
            self._batch, self._run = self._reader.reader.get_batch(run), run
        while self._run < run:
            self._batch, self._run = next(self._batches), self._run + 1
        self._batch.validate(full=True)  # damaged since it was scanned
        if self._batch.num_rows != rows[run]:
            raise OSError(f"record batch {run} has {self._batch.num_rows} rows, not {rows[run]}")
        return self._batch


def _stamp(path: str) -> Any:
    if is_remote(path):
        return None
    status = os.stat(path)
    return status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns


def _open(path: str) -> tuple[Any, str]:
    """Open a file and return it with an identifier of its content."""
    try:
        if is_remote(path):
            import fsspec

            with fsspec.open(path, "rb") as remote:
                file: Any = pa.BufferReader(remote.read())
        else:
            file = pa.OSFile(path)
    except FileNotFoundError as error:
        raise DataError(f"File {path} no longer exists.", path) from error
    except OSError as error:
        raise DataError(f"{path} can't be opened: {_first_line(error)}.", path) from error
    size = file.size()
    if size == 0:
        raise DataError(f"{path} is empty (0 bytes) and not an Arrow file.", path)
    head = file.read_at(min(size, _END_BYTES), 0)
    tail = file.read_at(min(size, _END_BYTES), max(0, size - _END_BYTES))
    return file, f"{size}-{zlib.crc32(tail, zlib.crc32(head)):x}"


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
