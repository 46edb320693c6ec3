"""Parquet files read in place: row groups are the blocks, and only the wanted columns are read.

Local files are mapped into memory, so that pages go from the page cache into Arrow without a copy
between; what was read is then unmapped again (``MADV_DONTNEED``), or the whole file would in time
be counted as this process's memory.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from miniray.data.arrow_rows import ArrowRows, rows_of
from miniray.data.files import FileList, Spec, is_remote
from miniray.data.permutation import derive_key
from miniray.data.slabs import Slabs
from miniray.data.source import Blocks, Source, wanted
from miniray.errors import DataError

_OPEN_FILES = 16  # a thread keeps open
_READERS = 16  # threads that read footers
_CHUNK = 4 << 20  # bytes decoded at a time


@dataclass
class _Cursor:
    """Where in a row group too large to be held the reading has come to."""

    group: int
    names: Sequence[str] | None
    batches: Iterator[Any]
    row: int = 0  # the first that has not been read
    last: Any = None  # the batch before it


@dataclass
class _OpenFile:
    """One file open in one thread."""

    path: str
    reader: Any
    mapped: mmap.mmap | None
    size: int
    cursor: _Cursor | None = None

    def size_now(self) -> int:
        if self.mapped is not None:
            return self.mapped.size()
        return self.size if is_remote(self.path) else os.stat(self.path).st_size

    def close(self) -> None:
        self.cursor = None
        self.reader.close()


class ParquetSource(Source):
    kind = "parquet"

    def __init__(
        self,
        files: Spec,
        columns: Sequence[str] | None = None,
        *,
        memory_map: bool = True,
    ) -> None:
        self._list = FileList(files, (".parquet", ".pq"))
        self._columns = None if columns is None else list(columns)
        self._memory_map = memory_map
        self._expected: str | None = None
        self._forget()

    def _forget(self) -> None:
        self._blocks: Blocks | None = None
        self._identities: list[str] = []
        self._fingerprint = ""
        self._schema: Any = None
        self._local = threading.local()
        self._pid = os.getpid()
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {
            "_list": self._list,
            "_columns": self._columns,
            "_memory_map": self._memory_map,
            "_expected": self._fingerprint or self._expected,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    # -- metadata --------------------------------------------------------------------------------

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
        path = self._list.paths[file]
        return None if is_remote(path) else os.path.dirname(path)

    def column_names(self) -> list[str]:
        self.blocks  # noqa: B018
        return wanted(self._schema.names, self._columns, self._list.paths[0])

    @property
    def schema(self) -> Any:
        """The Arrow schema of the files, with all columns."""
        self.blocks  # noqa: B018
        return self._schema

    def _look(self) -> None:
        """Read all footers, and refuse files that do not belong together."""
        paths = self._list.paths
        if len(paths) == 1:
            footers = [self._footer(paths[0])]
        else:
            with ThreadPoolExecutor(min(_READERS, len(paths))) as pool:
                footers = list(pool.map(self._footer, paths))
        # Files without rows may have any columns: writers may know no types where nothing is.
        filled = [(p, f) for p, f in zip(paths, footers, strict=True) if any(f.rows)]
        first, schema = (
            (filled[0][0], filled[0][1].schema) if filled else (paths[0], footers[0].schema)
        )
        for path, footer in filled:
            names = wanted(footer.schema.names, self._columns, path)
            _same_columns(first, schema, path, footer.schema, names, self._columns is None)
        per_file = [len(footer.rows) for footer in footers]
        rows = np.array([r for footer in footers for r in footer.rows], dtype=np.int64)
        self._schema = schema
        self._blocks = Blocks(
            files=paths,
            file=np.repeat(np.arange(len(paths)), per_file),
            number=np.array([g for count in per_file for g in range(count)], dtype=np.int64),
            first=np.array(
                [f for footer in footers for f in np.cumsum([0, *footer.rows])[:-1]],
                dtype=np.int64,
            ),
            rows=rows,
            nbytes=np.array([b for footer in footers for b in footer.nbytes], dtype=np.int64),
        )
        self._identities = [footer.identity for footer in footers]
        self._fingerprint = self._blocks.fingerprint([footer.size for footer in footers])
        if self._expected not in (None, self._fingerprint):
            raise DataError(
                f"the parquet files (the first is {paths[0]}) are not those the dataset was made"
                " with: names, sizes or rows differ. Make the dataset again"
            )

    def _footer(self, path: str) -> _Footer:
        opened = self._open(path)
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
            identity = f"{opened.size}-{derive_key(meta.num_rows, rows, meta.created_by):x}"
            changed = 0 if is_remote(path) else os.stat(path).st_mtime_ns
            identity = f"{derive_key(path):x}-{identity}-{changed}"
            return _Footer(rows, nbytes, opened.reader.schema_arrow, opened.size, identity)
        finally:
            opened.close()

    # -- reading ---------------------------------------------------------------------------------

    def _open(self, path: str) -> _OpenFile:
        import pyarrow as pa
        import pyarrow.parquet as pq

        mapped = None
        try:
            if is_remote(path):
                import fsspec

                handle = fsspec.open(path, "rb").open()
                size = int(handle.size)
                source: Any = pa.PythonFile(handle, mode="r")
            else:
                with open(path, "rb") as file:
                    size = os.fstat(file.fileno()).st_size
                    if size == 0:
                        raise DataError(f"{path} is empty (0 bytes), which is no parquet file")
                    if self._memory_map:
                        mapped = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ)
                source = (
                    pa.OSFile(path) if mapped is None else pa.BufferReader(pa.py_buffer(mapped))
                )
            reader = pq.ParquetFile(source, buffer_size=0 if mapped else 1 << 20)
        except FileNotFoundError as error:
            raise DataError(f"{path} does not exist any more") from error
        except (OSError, pa.ArrowException) as error:
            raise DataError(
                f"{path} cannot be opened as parquet: {_first_line(error)}. It may be truncated"
                " (its writer was interrupted) or be no parquet file"
            ) from error
        return _OpenFile(path, reader, mapped, size)

    def _opened(self, file: int) -> _OpenFile:
        """The file as this thread has it open."""
        if self._pid != os.getpid():
            # After a fork: the parent's maps and readers are left to it.
            self._local, self._pid, self._lock = threading.local(), os.getpid(), threading.Lock()
        handles: OrderedDict[int, _OpenFile] | None = getattr(self._local, "handles", None)
        if handles is None:
            handles = self._local.handles = OrderedDict()
        if file in handles:
            handles.move_to_end(file)
            return handles[file]
        handles[file] = self._open(self._list.paths[file])
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
        import pyarrow as pa

        table = self.blocks
        file, group = int(table.file[block]), int(table.number[block])
        rows, path = int(table.rows[block]), table.files[file]
        names = self._columns if columns is None else list(columns)
        opened = self._opened(file)
        try:
            if opened.size_now() != opened.size:
                # Looked at before every read: a page missing from a map ends the process.
                raise DataError(
                    f"{path}, row group {group}: the file has changed its size while it was read;"
                    " files of a run must not be written to"
                )
            chunk = max(1, rows * _CHUNK // max(1, int(table.nbytes[block])))
            if start == 0 and stop >= rows:
                batches = self._batches(opened, group, names, chunk)
            else:
                chunk = max(1, min(chunk, (stop - start) // 4))
                batches, start = self._slice(opened, group, names, chunk, start, stop)
            found = rows_of(batches, start, slabs)
        except FileNotFoundError as error:
            raise DataError(f"{path} does not exist any more") from error
        except (OSError, pa.ArrowException) as error:
            raise DataError(
                f"{path}, row group {group} cannot be read: {_first_line(error)}"
            ) from error
        finally:
            if opened.mapped is not None:
                opened.mapped.madvise(mmap.MADV_DONTNEED)
        if found.start + found.num_rows < min(stop, rows):
            raise DataError(
                f"{path}, row group {group}: its footer says {rows} rows, but it has fewer; the"
                " file is damaged"
            )
        return found

    @staticmethod
    def _batches(opened: _OpenFile, group: int, names: Sequence[str] | None, size: int) -> Any:
        return opened.reader.iter_batches(
            size, row_groups=[group], columns=names, use_threads=False
        )

    def _slice(
        self,
        opened: _OpenFile,
        group: int,
        names: Sequence[str] | None,
        chunk: int,
        start: int,
        stop: int,
    ) -> tuple[list[Any], int]:
        """Part of a row group too large to be held: read on from where the last part ended.

        Rows cannot be skipped in a parquet file without decoding them, so going back costs the rows
        before; orders are made so that a reader goes forward.
        """
        cursor, opened.cursor = opened.cursor, None
        for other in self._local.handles.values():
            other.cursor = None  # each holds a decoded page, which may be large
        if (
            cursor is None
            or (cursor.group, cursor.names) != (group, names)
            or start < cursor.row - (0 if cursor.last is None else cursor.last.num_rows)
        ):
            cursor = None  # lets go of its page before the next is decoded
            cursor = _Cursor(group, names, self._batches(opened, group, names, chunk))
        kept: list[Any] = [cursor.last] if cursor.row > start else []
        while cursor.row < stop:
            batch = next(cursor.batches, None)
            if batch is None:
                break
            cursor.row += batch.num_rows
            cursor.last = batch
            if cursor.row > start:
                kept.append(batch)
        if cursor.row < opened.reader.metadata.row_group(group).num_rows:
            opened.cursor = cursor  # only if nothing was raised: what failed begins anew
        return kept, cursor.row - sum(batch.num_rows for batch in kept)


@dataclass
class _Footer:
    rows: list[int]
    nbytes: list[int]
    schema: Any
    size: int
    identity: str


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


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
