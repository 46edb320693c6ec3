"""Parquet files read in place: row groups are the blocks, and only the wanted columns are read."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from miniray.data.file_source import FileBlocks, FileSource
from miniray.data.files import FileList, Spec, is_remote
from miniray.data.footer import LONGEST, Footer, read_footer
from miniray.data.permutation import derive_key
from miniray.data.plain import PlainFile
from miniray.data.slabs import Slabs
from miniray.data.source import Rows, wanted
from miniray.errors import DataError

if TYPE_CHECKING:
    from miniray.data.arrow_rows import ArrowRows
    from miniray.data.parquet_file import OpenParquet

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
        self._names: list[str] = []
        self._plain: list[Footer] = []  # if all files can be read without Arrow
        self._metadata: dict[str, Any] = {}  # of some files, which need not be parsed again
        self._local = threading.local()
        self._pid = os.getpid()

    # -- metadata --------------------------------------------------------------------------------

    def column_names(self) -> list[str]:
        self.blocks  # noqa: B018
        return wanted(self._names, self._columns, self.paths[0])

    def _look(self) -> list[FileBlocks]:
        """Read all footers, and refuse files that do not belong together."""
        self._plain = self._look_plainly()
        if self._plain:
            self._names = [column.name for column in self._plain[0].columns]
            return [
                FileBlocks(f.rows, f.nbytes, f.size, _mark(f.rows, f.created_by))
                for f in self._plain
            ]
        paths = self.paths
        if len(paths) == 1:
            footers = [self._footer(paths[0])]
        else:
            from concurrent.futures import ThreadPoolExecutor

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
        self._names = schema.names
        return [footer.found for footer in footers]

    def _look_plainly(self) -> list[Footer]:
        """The footers, if all files can be read without Arrow, and belong together; else none."""
        found: list[Footer] = []
        left = LONGEST
        for path in self.paths:
            footer = _plain_footer(path, self._columns, left)
            if footer is None or not footer.complete:
                return []
            if found and footer.types != found[0].types:
                return []
            found.append(footer)
            left -= footer.length
        return found

    def _footer(self, path: str) -> _Footer:
        from miniray.data.parquet_file import OpenParquet

        opened = OpenParquet(path, self._memory_map)
        try:
            meta, schema = opened.reader.metadata, opened.reader.schema_arrow
            rows = [0] * meta.num_row_groups
            nbytes = [0] * meta.num_row_groups
            leaves = _leaves_of(schema, self._columns, meta.num_columns)
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
            blocks = FileBlocks(rows, nbytes, opened.size, _mark(rows, meta.created_by))
            return _Footer(schema, blocks)
        finally:
            opened.close()

    # -- reading ---------------------------------------------------------------------------------

    def _opened(self, file: int, plainly: bool) -> Any:
        """The file as this thread has it open, for Arrow or for ourselves."""
        if self._pid != os.getpid():
            # After a fork: the parent's maps and readers are left to it.
            self._local, self._pid, self._lock = threading.local(), os.getpid(), threading.Lock()
        handles: OrderedDict[tuple[int, bool], Any] | None = getattr(self._local, "handles", None)
        if handles is None:
            handles = self._local.handles = OrderedDict()
        key = file, plainly
        for other, opened in handles.items():
            if other[0] != file and opened is not None:
                opened.forget()
        if key in handles:
            handles.move_to_end(key)
            return handles[key]
        path = self.paths[file]
        if plainly:
            footer = self._plain[file] if self._plain else _plain_footer(path, self._columns)
            handles[key] = None if footer is None else PlainFile(footer)
        else:
            from miniray.data.parquet_file import OpenParquet

            handles[key] = OpenParquet(path, self._memory_map, self._metadata.get(path))
        while len(handles) > _OPEN_FILES:
            _, longest_unused = handles.popitem(last=False)
            if longest_unused is not None:
                longest_unused.close()
        return handles[key]

    def read(
        self,
        block: int,
        start: int,
        stop: int,
        columns: Sequence[str] | None = None,
        slabs: Slabs | None = None,
    ) -> Rows:
        table = self.blocks
        file, number, rows = table.file[block], table.number[block], table.rows[block]
        names = self._columns if columns is None else list(columns)
        plain: PlainFile | None = self._opened(file, True)

        nbytes = table.nbytes[block]

        def others(names: Sequence[str]) -> ArrowRows:
            opened: OpenParquet = self._opened(file, False)
            return opened.read(number, 0, rows, names, nbytes // 4, slabs)

        if plain is not None and plain.has(number, rows, names):
            found = plain.read(number, names, start > 0 or stop < rows, others)
            if found is not None:
                return found
        opened: OpenParquet = self._opened(file, False)
        return opened.read(number, start, stop, names, nbytes, slabs)


def _plain_footer(path: str, names: Sequence[str] | None, longest: int = LONGEST) -> Footer | None:
    try:
        return None if is_remote(path) else read_footer(path, names, longest)
    except OSError:
        return None  # Arrow will say


def _mark(rows: Sequence[int], created_by: str | None) -> str:
    """Changes where a file was written anew."""
    return f"{derive_key(sum(rows), list(rows), created_by):x}"


def _leaves_of(schema: Any, names: Sequence[str] | None, total: int) -> Sequence[int]:
    """The numbers of the leaves of columns. Paths do not tell: names may have dots in them."""
    found: list[int] = []
    number = 0
    for field in schema:
        count = _leaf_count(field.type)
        if names is None or field.name in names:
            found += range(number, number + count)
        number += count
    return found if number == total else range(total)


def _leaf_count(kind: Any) -> int:
    kind = getattr(kind, "storage_type", kind)  # of an extension
    return sum(_leaf_count(kind.field(i).type) for i in range(kind.num_fields)) or 1


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
