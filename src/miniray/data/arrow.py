"""Arrow files (IPC file or stream, as Hugging Face datasets keeps them) and tables in memory.

Record batches are the blocks. Files are mapped into memory; uncompressed ones are not read until
rows are asked for.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from miniray.data.arrow_rows import ArrowRows, rows_of
from miniray.data.files import FileList, is_remote
from miniray.data.permutation import derive_key
from miniray.data.slabs import Slabs
from miniray.data.source import Blocks, Source, wanted
from miniray.errors import DataError


class ArrowSource(Source):
    kind = "arrow"

    def __init__(self, data: Any, columns: Sequence[str] | None = None) -> None:
        self._columns = None if columns is None else list(columns)
        self._list: FileList | None = None
        self._table: Any = None
        if hasattr(data, "to_batches"):
            self._table = data
        else:
            self._list = FileList(data, (".arrow", ".feather", ".ipc"))
        self._expected: str | None = None
        self._forget()

    def _forget(self) -> None:
        self._blocks: Blocks | None = None
        self._batches: list[list[Any]] = []
        self._maps: list[mmap.mmap | None] = []
        self._identities: list[str] = []
        self._fingerprint = ""
        self._schema: Any = None
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        expected = self._fingerprint or self._expected
        return {
            "_list": self._list,
            "_table": self._table,
            "_columns": self._columns,
            "_expected": expected,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    @property
    def blocks(self) -> Blocks:
        if self._blocks is None:  # a lock that is not needed cannot be left held by a fork
            with self._lock:
                if self._blocks is None:
                    self._look()
        assert self._blocks is not None
        return self._blocks

    @property
    def fingerprint(self) -> str:
        self.blocks  # noqa: B018
        return self._fingerprint

    def identity(self, file: int) -> str:
        self.blocks  # noqa: B018
        return self._identities[file]

    def folder(self, file: int) -> str | None:
        if self._list is None or is_remote(self._list.paths[file]):
            return None
        return os.path.dirname(self._list.paths[file])

    def column_names(self) -> list[str]:
        self.blocks  # noqa: B018
        return wanted(self._schema.names, self._columns, "the data")

    def _look(self) -> None:
        paths = ["table"] if self._list is None else self._list.paths
        identities: list[str] = []
        for path in paths:
            batches, mapped, size = self._open(path)
            if batches and self._schema is None:
                self._schema = batches[0].schema
            for batch in batches:
                names = wanted(batch.schema.names, self._columns, path)
                for name in names:
                    if batch.schema.field(name).type != self._schema.field(name).type:
                        raise DataError(f"mixed schemas: column {name!r} differs in {path}")
            self._batches.append(batches)
            self._maps.append(mapped)
            changed = os.stat(path).st_mtime_ns if mapped is not None else 0
            identities.append(f"{derive_key(path):x}-{size}-{changed}")
        if self._schema is None:
            raise DataError(f"{paths[0]} has no rows")
        per_file = [len(batches) for batches in self._batches]
        rows = [[b.num_rows for b in batches] for batches in self._batches]
        self._blocks = Blocks(
            files=paths,
            file=np.repeat(np.arange(len(paths)), per_file),
            number=np.array([i for count in per_file for i in range(count)], dtype=np.int64),
            first=np.array(
                [f for each in rows for f in np.cumsum([0, *each])[:-1]], dtype=np.int64
            ),
            rows=np.array([r for each in rows for r in each], dtype=np.int64),
            nbytes=np.array(
                [self._project(b).nbytes for batches in self._batches for b in batches],
                dtype=np.int64,
            ),
        )
        self._identities = identities
        self._fingerprint = self._blocks.fingerprint()
        if self._expected not in (None, self._fingerprint):
            raise DataError(f"{paths[0]} and the others are not what the dataset was made with")

    def _open(self, path: str) -> tuple[list[Any], mmap.mmap | None, int]:
        import pyarrow as pa

        if self._table is not None:
            return self._table.to_batches(), None, self._table.nbytes
        try:
            if is_remote(path):
                import fsspec

                with fsspec.open(path, "rb") as file:
                    data = file.read()
                buffer, mapped, size = pa.py_buffer(data), None, len(data)
            else:
                with open(path, "rb") as file:
                    size = os.fstat(file.fileno()).st_size
                    if size == 0:
                        raise DataError(f"{path} is empty (0 bytes), which is no Arrow file")
                    mapped = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ)
                buffer = pa.py_buffer(mapped)
            if buffer.slice(0, 6).to_pybytes() == b"ARROW1":
                reader = pa.ipc.open_file(buffer)
                return [reader.get_batch(i) for i in range(reader.num_record_batches)], mapped, size
            return list(pa.ipc.open_stream(buffer)), mapped, size
        except (OSError, pa.ArrowException) as error:
            line = (str(error).splitlines() or [""])[0]
            raise DataError(f"{path} cannot be opened as an Arrow file: {line}") from error

    def _project(self, batch: Any, columns: Sequence[str] | None = None) -> Any:
        names = self._columns if columns is None else list(columns)
        return batch if names is None else batch.select(names)

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
        found = rows_of([batch], start, slabs)
        mapped = self._maps[file]
        if mapped is not None:
            mapped.madvise(mmap.MADV_DONTNEED)
        return found
