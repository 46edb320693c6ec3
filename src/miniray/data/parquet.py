"""Parquet files read in place: row groups are the blocks, and only the wanted columns are read."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from miniray.checks import check_bool
from miniray.data.files import FileBlocks, FileList, FileSource, Spec, is_remote
from miniray.data.footer import LONGEST, Footer, has_changed, read_footer
from miniray.data.plain import PlainFile
from miniray.data.source import Rows, Slabs, wanted
from miniray.errors import DataError

if TYPE_CHECKING:
    from miniray.data.arrow_rows import ArrowRows
    from miniray.data.parquet_file import Looked, OpenParquet

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
        self._memory_map = check_bool("memory_map", memory_map)
        super().__init__(FileList(files, (".parquet", ".pq")), columns)

    def _forget(self) -> None:
        super()._forget()
        self._names: list[str] = []
        self._plain: list[Footer] = []  # if all files can be read without Arrow
        self._casts: dict[int, dict[str, Any]] = {}  # of files: the types of columns to be read as
        self._looked: dict[str, Looked] = {}  # some files
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
            return [FileBlocks(found.rows, found.nbytes, found.mark) for found in self._plain]
        from miniray.data.schemas import common_types

        paths = self.paths
        if len(paths) == 1:
            footers = [self._footer(paths[0])]
        else:
            from concurrent.futures import ThreadPoolExecutor

            with ThreadPoolExecutor(min(_READERS, len(paths))) as pool:
                footers = list(pool.map(self._footer, paths))
        # Files without rows may have any columns: writers may know no types where nothing is.
        filled = {n: schema for n, (schema, found) in enumerate(footers) if any(found.rows)}
        schemas = [(paths[number], schema) for number, schema in filled.items()]
        self._names = (schemas[0][1] if schemas else footers[0][0]).names
        types = common_types(schemas, self._columns) if schemas else {}
        for number, schema in filled.items():
            if any(str(schema.field(name).type) != str(kind) for name, kind in types.items()):
                self._casts[number] = types
        return [found for _, found in footers]

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

    def _footer(self, path: str) -> tuple[Any, FileBlocks]:
        """The schema, and what the blocks are."""
        from miniray.data.parquet_file import Looked, OpenParquet

        opened = OpenParquet(path, self._memory_map)
        try:
            meta, schema = opened.reader.metadata, opened.reader.schema_arrow
            rows = [0] * meta.num_row_groups
            nbytes = [0] * meta.num_row_groups
            leaves = _leaves_of(schema, self._columns, meta.num_columns)
            if encrypted := sorted(opened.encrypted.intersection(leaves)):
                raise DataError(
                    f"{path}: column {meta.schema.column(encrypted[0]).path} is encrypted, and"
                    " keys cannot be given here. Name the columns that are not, columns=[...], or"
                    " write the file without encryption"
                )
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
            if len(self._looked) < _OPEN_FILES:
                self._looked[path] = Looked(opened.stamp, opened.mark, meta)
            return schema, FileBlocks(rows, nbytes, opened.mark)
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
            found: Any = None if footer is None else PlainFile(footer)
            mark = self._marks[file] if footer is None else footer.mark
        else:
            from miniray.data.parquet_file import OpenParquet

            found = OpenParquet(path, self._memory_map, self._looked.get(path))
            mark = found.mark
        if mark != self._marks[file]:
            raise has_changed(path)
        handles[key] = found
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
        # Always by name: files may have their columns in different orders.
        names = list(columns or self._columns or self._names)
        casts, nbytes = self._casts.get(file), table.nbytes[block]
        plain: PlainFile | None = None if casts else self._opened(file, True)

        def others(names: Sequence[str]) -> ArrowRows:
            opened: OpenParquet = self._opened(file, False)
            return opened.read(number, 0, rows, names, nbytes // 4, slabs)

        if plain is not None and plain.has(number, rows, names):
            found = plain.read(number, names, start > 0 or stop < rows, others)
            if found is not None:
                return found
        opened: OpenParquet = self._opened(file, False)
        return opened.read(number, start, stop, names, nbytes, slabs, casts)


def _plain_footer(path: str, names: Sequence[str] | None, longest: int = LONGEST) -> Footer | None:
    try:
        return None if is_remote(path) else read_footer(path, names, longest)
    except OSError:
        return None  # Arrow will say


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
