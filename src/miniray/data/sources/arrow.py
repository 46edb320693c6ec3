"""Arrow IPC files (file or stream format, as Hugging Face datasets writes) and tables in memory."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import pyarrow as pa

from miniray.data.sources.arrow_file import ArrowFile
from miniray.data.sources.base import select_columns
from miniray.data.sources.files import FileList, FileSource, Spec
from miniray.data.sources.footers import FileMetadata
from miniray.data.sources.schemas import cast, find_common_types
from miniray.data.sources.validation import release_unused
from miniray.errors import DataError


class ArrowSource(FileSource):
    """Rows of Arrow IPC files, or of a table in memory (which has random access).

    All record batches of files are validated when the source is opened, and again when they are
    read. Files are never mapped: a truncated map would end the process.
    """

    kind = "arrow"
    _pickled = ("_list", "_columns", "_table")

    def __init__(self, data: Spec | Any, columns: Sequence[str] | None = None) -> None:
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
        self._batches: list[Any] = []  # of the table
        self._files: list[ArrowFile] = []
        self._local = threading.local()

    def list_columns(self) -> list[str]:
        self.list_blocks()
        return select_columns(self._names, self._columns, "the data")

    def _read_metadata(self) -> list[FileMetadata]:
        if self._table is not None:
            schemas = [("table", self._table.schema)]
            self._batches = self._table.to_batches()
            rows = [batch.num_rows for batch in self._batches]
            found = [FileMetadata(rows, [0] * len(rows))]
        else:
            self._files = [ArrowFile(path, self._columns) for path in self.files]
            release_unused()
            schemas = [(file.path, file.schema) for file in self._files if file.rows]
            found = [FileMetadata(file.rows, file.nbytes, file.mark) for file in self._files]
            if not schemas:
                raise DataError(f"{self.files[0]} has no rows.", self.files[0])
        self._names = schemas[0][1].names
        self._types = find_common_types(schemas, self._columns)
        #: First row of each record batch within its file, and the rows of the file.
        self._edges = [list(accumulate(file.rows, initial=0)) for file in found]
        return found

    def read_block(self, block: int, columns: Sequence[str] | None = None) -> Any:
        found = self.list_blocks()[block]
        names = select_columns(self._names, columns or self._columns, self.files[0])
        batch = self._read_batch(found.file, found.run, names)
        first = found.first_row - self._edges[found.file][found.run]
        part = batch.slice(first, found.rows)
        # Without metadata and null flags, so that all batches have the same schema.
        part = pa.RecordBatch.from_arrays([part.column(name) for name in names], names)
        if found.rows < batch.num_rows and self._table is None:
            # Copied, so that a block doesn't keep a larger record batch in memory.
            part = pa.concat_batches([part, part.slice(0, 0)])
        return cast(part, self._types)

    def _read_batch(self, file: int, run: int, names: list[str]) -> Any:
        """Read a record batch, which is kept for its next block in the same thread."""
        if self._table is not None:
            return self._batches[run]
        key = file, run, names
        kept, batch = getattr(self._local, "last", (None, None))
        if kept != key:
            self._local.last = (None, None)
            batch = self._files[file].read(run, names)
            self._local.last = (key, batch)
        return batch
