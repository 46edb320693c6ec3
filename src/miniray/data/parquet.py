"""Parquet files read in place: row groups are the blocks, and only the wanted columns are read."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from miniray.data.arrow_rows import ArrowRows
from miniray.data.file_source import FileBlocks, FileSource
from miniray.data.files import FileList, Spec
from miniray.data.parquet_file import OpenParquet
from miniray.data.permutation import derive_key
from miniray.data.slabs import Slabs
from miniray.data.source import wanted
from miniray.errors import DataError

_OPEN_FILES = 16  # a thread keeps open
_READERS = 16  # threads that read footers


class ParquetSource(FileSource):
    kind = "parquet"
    _kept = ("_list", "_columns", "_memory_map")

    def __init__(
        self,
        files: Spec,
        columns: Sequence[str] | None = None,
        *,
        memory_map: bool = True,
    ) -> None:
        self._memory_map = memory_map
        super().__init__(FileList(files, (".parquet", ".pq")), columns)

    def _forget(self) -> None:
        super()._forget()
        self._schema: Any = None
        self._metadata: dict[str, Any] = {}  # of some files, which need not be parsed again
        self._local = threading.local()
        self._pid = os.getpid()

    # -- metadata --------------------------------------------------------------------------------

    def column_names(self) -> list[str]:
        return wanted(self.schema.names, self._columns, self.paths[0])

    @property
    def schema(self) -> Any:
        """The Arrow schema of the files, with all columns."""
        self.blocks  # noqa: B018
        return self._schema

    def _look(self) -> list[FileBlocks]:
        """Read all footers, and refuse files that do not belong together."""
        paths = self.paths
        if len(paths) == 1:
            footers = [self._footer(paths[0])]
        else:
            with ThreadPoolExecutor(min(_READERS, len(paths))) as pool:
                footers = list(pool.map(self._footer, paths))
        # Files without rows may have any columns: writers may know no types where nothing is.
        filled = [(p, f) for p, f in zip(paths, footers, strict=True) if any(f.found.rows)]
        first, schema = (
            (filled[0][0], filled[0][1].schema) if filled else (paths[0], footers[0].schema)
        )
        for path, footer in filled:
            names = wanted(footer.schema.names, self._columns, path)
            _same_columns(first, schema, path, footer.schema, names, self._columns is None)
        self._schema = schema
        return [footer.found for footer in footers]

    def _footer(self, path: str) -> _Footer:
        opened = OpenParquet(path, self._memory_map)
        try:
            meta = opened.reader.metadata
            rows = [0] * meta.num_row_groups
            nbytes = [0] * meta.num_row_groups
            names = None if self._columns is None else set(self._columns)
            leaves: list[int] = []
            if meta.num_row_groups:
                group = meta.row_group(0)
                for leaf in range(group.num_columns):
                    top = group.column(leaf).path_in_schema.split(".", 1)[0]
                    if names is None or top in names:
                        leaves.append(leaf)
            for number in range(meta.num_row_groups):
                group = meta.row_group(number)
                rows[number] = group.num_rows
                for leaf in leaves:
                    chunk = group.column(leaf)
                    # Dictionary pages and run lengths are smaller than what they stand for.
                    nbytes[number] += max(chunk.total_uncompressed_size, 4 * group.num_rows)
                    begin = chunk.dictionary_page_offset or chunk.data_page_offset
                    if begin + chunk.total_compressed_size > opened.size:
                        raise DataError(
                            f"{path}, row group {number}: column {chunk.path_in_schema} ends at"
                            f" byte {begin + chunk.total_compressed_size}, the file at"
                            f" {opened.size}; the file is truncated or damaged"
                        )
            if len(self._metadata) < _OPEN_FILES:
                self._metadata[path] = meta
            mark = f"{derive_key(meta.num_rows, rows, meta.created_by):x}"
            return _Footer(opened.reader.schema_arrow, FileBlocks(rows, nbytes, opened.size, mark))
        finally:
            opened.close()

    # -- reading ---------------------------------------------------------------------------------

    def _opened(self, file: int) -> OpenParquet:
        """The file as this thread has it open."""
        if self._pid != os.getpid():
            # After a fork: the parent's maps and readers are left to it.
            self._local, self._pid, self._lock = threading.local(), os.getpid(), threading.Lock()
        handles: OrderedDict[int, OpenParquet] | None = getattr(self._local, "handles", None)
        if handles is None:
            handles = self._local.handles = OrderedDict()
        for other, opened in handles.items():
            if other != file:
                opened.forget()
        if file in handles:
            handles.move_to_end(file)
            return handles[file]
        known = self._metadata.get(self.paths[file])
        handles[file] = OpenParquet(self.paths[file], self._memory_map, known)
        while len(handles) > _OPEN_FILES:
            handles.popitem(last=False)[1].close()
        return handles[file]

    def close(self) -> None:
        """Close what this thread has open; it opens again when needed."""
        handles = self.__dict__["_local"].__dict__.pop("handles", {})
        for opened in handles.values():
            opened.close()

    def read(
        self,
        block: int,
        start: int,
        stop: int,
        columns: Sequence[str] | None = None,
        slabs: Slabs | None = None,
    ) -> ArrowRows:
        table = self.blocks
        opened = self._opened(int(table.file[block]))
        names = self._columns if columns is None else list(columns)
        nbytes = int(table.nbytes[block])
        return opened.read(int(table.number[block]), start, stop, names, nbytes, slabs)


@dataclass
class _Footer:
    schema: Any
    found: FileBlocks


def _same_columns(
    first: str, expected: Any, path: str, found: Any, names: Sequence[str], everything: bool
) -> None:
    """Refuse a file whose columns differ from the first file's."""
    if everything:
        extra = [name for name in [*expected.names, *found.names] if name not in names]
        absent = [name for name in extra if name not in found.names] or [
            name for name in names if name not in expected.names
        ]
        if absent:
            has, lacks = (first, path) if absent[0] in expected.names else (path, first)
            raise DataError(
                f"mixed schemas: {has} has a column {absent[0]!r} and {lacks} has not. Name the"
                " columns to read with columns=[...], or keep such files apart"
            )
    for name in names:
        one, other = expected.field(name).type, found.field(name).type
        if one != other:
            raise DataError(
                f"mixed schemas: column {name!r} is {one} in {first} and {other} in {path}"
            )
