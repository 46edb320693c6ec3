"""Arrow IPC files (file or stream format, as Hugging Face datasets writes) and tables in memory."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from miniray.data.locations import cumulate
from miniray.data.sources.base import select_columns
from miniray.data.sources.files import FileSource, Spec, create_change_error, resolve_files
from miniray.data.sources.footers import FileMetadata, stamp_file
from miniray.data.sources.schemas import CommonSchema
from miniray.data.sources.validation import check_batch, convert_errors, open_file
from miniray.errors import DataError

_ENDS = 1 << 16  # bytes at each end of a file that identify its content


class ArrowSource(FileSource):
    """Rows of Arrow IPC files, or of a table in memory (which has random access).

    All record batches of files are validated when the source is opened, and again when they are
    read. Every read opens the file again, so the number of files isn't limited by descriptors.
    """

    kind = "arrow"

    def __init__(self, data: Spec | Any, columns: Sequence[str] | None = None) -> None:
        self._table: Any = None
        if isinstance(data, Mapping) or hasattr(data, "__arrow_c_stream__"):
            self._table = pa.table(data)
            files = ["table"]
        else:
            files = resolve_files(data, (".arrow", ".feather", ".ipc"))
        super().__init__(files, columns)

    def _reset(self) -> None:
        super()._reset()
        self.random_access = self._table is not None
        self.is_persistent = self._table is None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_table": self._table}

    def list_columns(self) -> list[str]:
        self.list_blocks()
        return select_columns(self._schema.names, self._columns, "the data")

    def _read_metadata(self) -> list[FileMetadata]:
        if self._table is not None:
            self._batches = self._table.to_batches()
            rows = [batch.num_rows for batch in self._batches]
            metadata = [FileMetadata(rows, [0] * len(rows))]
            schemas = [("table", self._table.schema)]
        else:
            stamps = list(map(stamp_file, self.files))
            self._files = [_ArrowFile(path, self._columns) for path in self.files]
            pa.default_memory_pool().release_unused()
            metadata = [
                FileMetadata(file.rows, file.nbytes, file.mark, stamp=stamp)
                for file, stamp in zip(self._files, stamps, strict=True)
            ]
            schemas = [(file.path, file.schema) for file in self._files if file.rows]
            if not schemas:
                raise DataError(f"{self.files[0]} has no rows.", self.files[0])
        self._schema = CommonSchema(schemas, self._columns)
        #: First row of each record batch within its file, and the rows of the file.
        self._edges = [cumulate(file.rows) for file in metadata]
        return metadata

    def read_block(self, block: int, columns: Sequence[str] | None = None) -> Any:
        found = self.list_blocks()[block]
        path = self.files[found.file]
        names = select_columns(self._schema.names, columns or self._columns, path)
        batch = self._read_batch(found.file, found.run, names)
        part = batch.slice(found.first_row - self._edges[found.file][found.run], found.rows)
        if found.rows < batch.num_rows and self._table is None:
            # Copied, so that a block doesn't keep a larger record batch in memory.
            part = pa.concat_batches([part, part.slice(0, 0)])
        return self._schema.select(part, names, path)

    def _read_batch(self, file: int, run: int, names: list[str]) -> Any:
        """Read a record batch, which this thread keeps for the next block."""
        if self._table is not None:
            return self._batches[run]
        key = file, run, names
        kept, batch = getattr(self._local, "kept", (None, None))
        if kept != key:
            self._local.kept = None, None
            path, first = self.files[file], int(self._edges[file][run])
            with convert_errors(path, "an Arrow file", row=first), open_file(path) as opened:
                self.check_unchanged(file, lambda: _compute_mark(opened))
                batch = self._files[file].read(opened, run, names)
                check_batch(batch, path, first)
            self._local.kept = key, batch
        return batch


class _ArrowFile:
    """Where the record batches of a file are. All of them are checked when it is created.

    ``columns`` are read, except those that the file doesn't have.
    """

    def __init__(self, path: str, columns: Sequence[str] | None) -> None:
        self.path = path
        self.rows: list[int] = []
        self.nbytes: list[int] = []
        #: Where messages are in a stream: the schema and the dictionaries before each record
        #: batch, and the batch itself. Empty in the file format.
        self._messages: list[list[tuple[int, int]]] = []
        with convert_errors(path, "an Arrow file"), open_file(path) as file:
            self.mark = _compute_mark(file)
            self._is_stream = file.read_at(6, 0) != b"ARROW1"
            file.seek(0)
            self.schema = self._get_opener()(file).schema
            names = [name for name in self.schema.names if columns is None or name in columns]
            for batch in self._iter_batches(file, names):
                check_batch(batch, path, sum(self.rows))
                self.rows.append(batch.num_rows)
                self.nbytes.append(batch.nbytes)

    def read(self, file: Any, number: int, names: Sequence[str]) -> Any:
        """Return columns of a record batch of the opened file."""
        if self._is_stream:
            batch = self._read_message(file, number, names)
        else:
            batch = self._open_reader(file, names).get_batch(number)
        if batch.num_rows != self.rows[number]:
            raise create_change_error(self.path)
        return batch

    def _get_opener(self) -> Any:
        return pa.ipc.open_stream if self._is_stream else pa.ipc.open_file

    def _open_reader(self, file: Any, names: Sequence[str]) -> Any:
        fields = [n for n, name in enumerate(self.schema.names) if name in names]
        return self._get_opener()(file, options=pa.ipc.IpcReadOptions(included_fields=fields))

    def _iter_batches(self, file: Any, names: Sequence[str]) -> Iterator[Any]:
        if not self._is_stream:
            reader = self._open_reader(file, names)
            yield from map(reader.get_batch, range(reader.num_record_batches))
            return
        file.seek(0)
        start = 0
        before: list[tuple[int, int]] = []
        for message in pa.ipc.MessageReader.open_stream(file):
            end = file.tell()
            if message.type == "record batch":
                self._messages.append([*before, (start, end)])
                yield self._read_message(file, len(self._messages) - 1, names)
                file.seek(end)
            else:
                before.append((start, end))
            start = end
        if file.tell() != file.size():
            raise pa.ArrowInvalid(f"the stream ends at byte {file.tell()} of {file.size()}")

    def _read_message(self, file: Any, number: int, names: Sequence[str]) -> Any:
        """Read a record batch of a stream as a separate stream, with all it depends on."""
        messages = self._messages[number]
        buffer = pa.allocate_buffer(sum(end - start for start, end in messages))
        view, at = memoryview(buffer), 0
        for start, end in messages:
            file.seek(start)
            if file.readinto(view[at : at + end - start]) != end - start:
                raise create_change_error(self.path)
            at += end - start
        return self._open_reader(buffer, names).read_next_batch()


def _compute_mark(file: Any) -> str:
    size = file.size()
    start = file.read_at(min(size, _ENDS), 0)
    end = file.read_at(min(size, _ENDS), max(0, size - _ENDS))
    return f"{size}-{zlib.crc32(end, zlib.crc32(start)):x}"
