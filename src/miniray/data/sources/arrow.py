"""Arrow files (IPC file or stream, as Hugging Face datasets keeps them) and tables in memory.

Record batches are the blocks. Files are mapped into memory; uncompressed ones are not read until
rows are asked for.
"""

from __future__ import annotations

import mmap
import os
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from miniray.data.arrow_rows import ArrowRows, rows_of
from miniray.data.sources.base import Slabs, wanted
from miniray.data.sources.files import FileBlocks, FileList, FileSource, is_remote
from miniray.data.sources.schemas import cast, common_types
from miniray.errors import DataError

_ENDS = 1 << 16  # bytes at each end of a file by which its content is known


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
        self._batches: list[list[Any]] = []
        self._maps: list[mmap.mmap | None] = []
        self._names: list[str] = []
        self._types: dict[str, Any] = {}

    def column_names(self) -> list[str]:
        self.blocks  # noqa: B018
        return wanted(self._names, self._columns, "the data")

    def _look(self) -> list[FileBlocks]:
        opened = [self._open(path) for path in self.paths]
        self._batches, self._maps = [found[0] for found in opened], [found[1] for found in opened]
        by_path = zip(self.paths, self._batches, strict=True)
        schemas = [(path, batches[0].schema) for path, batches in by_path if batches]
        if not schemas:
            raise DataError(f"{self.paths[0]} has no rows")
        self._names = schemas[0][1].names
        self._types = common_types(schemas, self._columns)
        return [
            FileBlocks(
                [batch.num_rows for batch in batches],
                [self._project(batch).nbytes for batch in batches],
                mark,
            )
            for batches, _, mark in opened
        ]

    def _open(self, path: str) -> tuple[list[Any], mmap.mmap | None, str]:
        import pyarrow as pa

        if self._table is not None:
            return self._table.to_batches(), None, ""
        try:
            if is_remote(path):
                import fsspec

                with fsspec.open(path, "rb") as file:
                    buffer, mapped = pa.py_buffer(file.read()), None
            else:
                with open(path, "rb") as file:
                    size = os.fstat(file.fileno()).st_size
                    if size == 0:
                        raise DataError(f"{path} is empty (0 bytes), which is no Arrow file")
                    mapped = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ)
                buffer = pa.py_buffer(mapped)
            content = memoryview(buffer)
            mark = f"{len(content)}-{zlib.crc32(content[-_ENDS:], zlib.crc32(content[:_ENDS])):x}"
            if buffer.slice(0, 6).to_pybytes() == b"ARROW1":
                reader = pa.ipc.open_file(buffer)
                return [reader.get_batch(i) for i in range(reader.num_record_batches)], mapped, mark
            return list(pa.ipc.open_stream(buffer)), mapped, mark
        except (OSError, pa.ArrowException) as error:
            line = (str(error).splitlines() or [""])[0]
            raise DataError(f"{path} cannot be opened as an Arrow file: {line}") from error

    def _project(self, batch: Any, columns: Sequence[str] | None = None) -> Any:
        return batch.select(list(columns or self._columns or self._names))

    def read(
        self,
        block: int,
        start: int,
        stop: int,
        columns: Sequence[str] | None = None,
        slabs: Slabs | None = None,
    ) -> ArrowRows:
        table = self.blocks
        file, number = int(table.file[block]), int(table.number[block])
        batch = self._project(self._batches[file][number], columns).slice(start, stop - start)
        found = rows_of([cast(batch, self._types)], start, slabs)
        mapped = self._maps[file]
        if mapped is not None:
            mapped.madvise(mmap.MADV_DONTNEED)
        return found
