"""Parquet files, read with pyarrow in blocks of about 8 MB by cursors that move forward."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from miniray.data.locations import Int64s
from miniray.data.sources.base import select_columns
from miniray.data.sources.chunks import find_dictionaries, find_leaves, read_chunks
from miniray.data.sources.files import FileSource, Spec, is_remote, resolve_files
from miniray.data.sources.footers import FileMetadata, MetadataIndex, stamp_file
from miniray.data.sources.schemas import CommonSchema, decode_dictionaries
from miniray.data.sources.validation import check_batch, convert_errors, open_file
from miniray.errors import DataError

_BATCH_BYTES = 2_000_000  # blocks up to this size are decoded at once, others in four parts
_TAIL_BYTES = 1 << 14  # read at once; most footers are shorter


class ParquetSource(FileSource):
    """Rows of Parquet files."""

    kind = "parquet"

    def __init__(self, files: Spec, columns: Sequence[str] | None = None) -> None:
        super().__init__(resolve_files(files, (".parquet", ".pq")), columns)

    # -- metadata --------------------------------------------------------------------------------

    def list_columns(self) -> list[str]:
        self.list_blocks()
        return select_columns(self._schema.names, self._columns, self.files[0])

    def _read_metadata(self) -> list[FileMetadata]:
        key = [self.kind, pa.__version__, self._columns]
        metadata = MetadataIndex().load(self.files, key, self._read_footer)
        files = list(zip(self.files, metadata, strict=True))
        # Files without rows can have any schema: writers can't infer types from nothing.
        filled = [(path, file) for path, file in files if any(file.rows)]
        paths: dict[str, str] = {}  # of the first file with each schema
        for path, file in filled or files[:1]:
            paths.setdefault(file.schema, path)
        schemas = [
            (path, pa.ipc.read_schema(pa.py_buffer(bytes.fromhex(schema))))
            for schema, path in paths.items()
        ]
        self._schema = CommonSchema(schemas, self._columns if filled else [])
        self._dictionaries = sorted({name for _, file in filled for name in file.dictionaries})
        return metadata

    def _read_footer(self, path: str) -> FileMetadata:
        with convert_errors(path, "Parquet"):
            opened = _OpenFile(path)
            metadata, schema = opened.reader.metadata, opened.reader.schema_arrow
            rows = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
            groups = read_chunks(opened.footer, metadata.num_columns)
            leaves = find_leaves(schema, self._columns, metadata.num_columns)
            for number, field in leaves.items():
                if any(group[number].is_encrypted for group in groups):
                    raise DataError(
                        f"{path}: column {field.name} is encrypted, and keys can't be passed."
                        " Select other columns with columns=[...], or write the file without"
                        " encryption.",
                        path,
                    )
            dictionaries = find_dictionaries(leaves, groups)
            nbytes = [
                sum(
                    group[number].estimate_bytes(field.name in dictionaries)
                    for number, field in leaves.items()
                )
                for group in groups
            ]
            is_sound = len(nbytes) == len(rows) and sum(rows) == metadata.num_rows
            if not is_sound or any(not 0 <= n < 2**62 for n in (*rows, *nbytes)):
                raise OSError("the sizes of row groups in the footer are damaged")
            text = schema.remove_metadata().serialize().to_pybytes().hex()
            return FileMetadata(rows, nbytes, opened.mark, text, dictionaries)

    # -- reading ---------------------------------------------------------------------------------

    def read_block(self, block: int, columns: Sequence[str] | None = None) -> Any:
        found, blocks = self.list_blocks()[block], self.list_blocks()
        path = self.files[found.file]
        # Select by name: files can have their columns in different orders.
        names = list(columns or self._columns or self._schema.names)
        front = int(self._run_fronts[block])
        first = found.first_row - int(blocks.first_row[front])
        batch_rows = int(blocks.rows[front])
        if blocks.nbytes[front] > _BATCH_BYTES:
            batch_rows = max(1, batch_rows // 4)  # pyarrow's pages and the block are held at once
        place = f", row group {found.run}, row {found.first_row}"
        with convert_errors(path, "Parquet", place, found.first_row):
            opened = self._open(found.file, names)
            batch = opened.read(found.run, first, found.rows, batch_rows)
            check_batch(batch, path, found.first_row)
            return self._schema.select(batch, names, path)

    @cached_property
    def _run_fronts(self) -> Int64s:
        """First block of the row group of each block."""
        blocks = self.list_blocks()
        is_front = (np.diff(blocks.file, prepend=-1) != 0) | (np.diff(blocks.run, prepend=-1) != 0)
        return np.maximum.accumulate(np.where(is_front, np.arange(len(blocks)), 0))

    def _open(self, file: int, names: list[str]) -> _OpenFile:
        """Return a file, which this thread keeps open for the next block."""
        path = self.files[file]
        key = os.getpid(), file, names, stamp_file(path)  # a fork shares the position in the file
        kept: tuple[Any, _OpenFile] | None = getattr(self._local, "kept", None)
        if kept is None or kept[0] != key:
            self._local.kept = kept = None  # release its memory
            opened = _OpenFile(path, names, self._dictionaries)
            self.check_unchanged(file, lambda: opened.mark)
            self._local.kept = kept = key, opened
        return kept[1]

    def normalize(self, batch: Any) -> Any:
        """Decode the columns that are read as dictionaries only to save memory."""
        return decode_dictionaries(batch, self._dictionaries) if self._dictionaries else batch


class _OpenFile:
    """One Parquet file opened by one thread, and a cursor in one of its row groups."""

    def __init__(
        self, path: str, names: Sequence[str] | None = None, dictionaries: Sequence[str] = ()
    ) -> None:
        self._file, self._names = open_file(path), names
        self._cursor: _Cursor | None = None
        metadata = None
        if is_remote(path) and self.footer:  # don't request it again
            end = len(self.footer).to_bytes(4, "little") + b"PAR1"
            metadata = pq.read_metadata(pa.BufferReader(self.footer + end))
        self.reader = pq.ParquetFile(
            self._file,
            metadata=metadata,
            read_dictionary=list(dictionaries) or None,
            buffer_size=1 << 20,
            pre_buffer=False,  # would read in other threads, and hold a row group in memory
        )

    @cached_property
    def footer(self) -> bytes:
        """The footer without its length and magic, or nothing if the file has none."""
        size = self._file.size()
        tail: bytes = self._file.read_at(min(size, _TAIL_BYTES), max(0, size - _TAIL_BYTES))
        length = int.from_bytes(tail[-8:-4], "little") + 8
        if tail[-4:] != b"PAR1" or length > size:
            return b""
        if length > len(tail):
            tail = self._file.read_at(length, size - length)
        return tail[-length:-8]

    @property
    def mark(self) -> str:
        """Identifier of the content; the same for a copy of the file."""
        digest = hashlib.blake2b(self.footer, digest_size=8).hexdigest()
        return f"{self._file.size()}-{digest}"

    def read(self, group: int, first: int, rows: int, batch_rows: int) -> Any:
        """Read rows of a row group as one record batch.

        Rows can't be skipped without decoding them, so reading backward starts again at the front.
        """
        cursor, self._cursor = self._cursor, None
        if cursor is None or cursor.group != group or cursor.row > first:
            cursor = None  # release its pages before the next ones are decoded
            batches = self.reader.iter_batches(
                batch_rows, row_groups=[group], columns=self._names, use_threads=False
            )
            cursor = _Cursor(group, batches)
        while cursor.row < first:
            cursor.read(min(first, cursor.row + batch_rows))
        parts = cursor.read(first + rows)
        if cursor.row < self.reader.metadata.row_group(group).num_rows:
            self._cursor = cursor  # only after success: a failed read starts again
        return parts[0] if len(parts) == 1 else pa.concat_batches(parts)


class _Cursor:
    """Rows of a row group from front to back."""

    def __init__(self, group: int, batches: Iterator[Any]) -> None:
        self.group, self._batches = group, batches
        self.row = 0  # the next one
        self._rest: Any = None  # rows that were decoded and not returned yet

    def read(self, stop: int) -> list[Any]:
        """Return the rows up to ``stop`` as batches."""
        parts: list[Any] = []
        while self.row < stop:
            batch = next(self._batches, None) if self._rest is None else self._rest
            if batch is None:
                raise OSError(f"the row group ends at row {self.row}, before its footer says")
            self._rest = None
            if batch.num_rows > stop - self.row:
                self._rest = batch.slice(stop - self.row)
                batch = batch.slice(0, stop - self.row)
            parts.append(batch)
            self.row += batch.num_rows
        return parts
