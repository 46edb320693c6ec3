"""Arrow files (IPC file or stream, as written by Hugging Face datasets) and tables in memory.

Record batches are the blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from miniray.data.arrow_rows import ArrowRows, rows_of
from miniray.data.sources.base import Slabs, wanted
from miniray.data.sources.files import FileBlocks, FileList, FileSource
from miniray.data.sources.schemas import cast, common_types
from miniray.data.validation import release_unused
from miniray.errors import DataError

if TYPE_CHECKING:
    from miniray.data.arrow_file import ArrowFile


class ArrowSource(FileSource):
    kind = "arrow"
    _kept = ("_list", "_columns", "_table")

    def __init__(self, data: Any, columns: Sequence[str] | None = None) -> None:
        self._table: Any = None
        if isinstance(data, Mapping) or hasattr(data, "__arrow_c_stream__"):
            import pyarrow as pa

            self._table = pa.table(data)
        files = None if self._table is not None else FileList(data, (".arrow", ".feather", ".ipc"))
        super().__init__(files, columns)

    def _forget(self) -> None:
        super()._forget()
        self._batches: list[Any] = []  # of the table
        self._files: list[ArrowFile] = []
        self._last: tuple[Any, Any] = (None, None)  # batch that was read in part, and its key
        self._names: list[str] = []
        self._types: dict[str, Any] = {}

    def column_names(self) -> list[str]:
        self.blocks  # noqa: B018
        return wanted(self._names, self._columns, "the data")

    def _look(self) -> list[FileBlocks]:
        if self._table is not None:
            schemas = [("table", self._table.schema)]
            batches = self._batches = self._table.to_batches()
            names = wanted(self._table.schema.names, self._columns, "the data")
            nbytes = [batch.select(names).nbytes for batch in batches]
            found = [FileBlocks([batch.num_rows for batch in batches], nbytes)]
        else:
            from miniray.data.arrow_file import ArrowFile

            files = self._files = [ArrowFile(path, self._columns) for path in self.paths]
            release_unused()
            schemas = [(file.path, file.schema) for file in files if file.rows]
            found = [FileBlocks(file.rows, file.nbytes, file.mark) for file in files]
        if not any(file.rows for file in found):
            raise DataError(f"{self.paths[0]} has no rows", self.paths[0])
        self._names = schemas[0][1].names
        self._types = common_types(schemas, self._columns)
        return found

    def read(
        self,
        block: int,
        start: int,
        stop: int,
        columns: Sequence[str] | None = None,
        slabs: Slabs | None = None,
    ) -> ArrowRows:
        table = self.blocks
        names = list(columns or self._columns or self._names)
        file, number = int(table.file[block]), int(table.number[block])
        batch = self._read_batch(file, number, names)
        # Parts of a batch are read in order. Keep the batch until its last part was read.
        is_done = stop >= batch.num_rows
        self._last = (None, None) if is_done else ((file, number, names), batch)
        part = cast(batch.slice(start, stop - start), self._types)
        found = rows_of([part], start, slabs)
        del batch, part
        release_unused()
        return found

    def _read_batch(self, file: int, number: int, names: list[str]) -> Any:
        if self._batches:
            return self._batches[number].select(names)
        key, last = self._last
        return last if key == (file, number, names) else self._files[file].read(number, names)
