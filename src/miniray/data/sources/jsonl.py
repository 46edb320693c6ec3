"""Files with one JSON document per line. Blocks are runs of lines of about a megabyte.

The files are read once when the dataset is created, to find the blocks. Empty lines are skipped. A
line that isn't JSON raises ``RowError`` when it is parsed.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import zlib
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np

from miniray.data.sources.base import LazyRows
from miniray.data.sources.files import (
    FileSource,
    Spec,
    create_change_error,
    is_remote,
    resolve_files,
)
from miniray.data.sources.footers import FileMetadata, MetadataIndex
from miniray.errors import DataError, RowError

_BLOCK_BYTES = 1 << 20
_EMPTY_LINES = (b"", b"\r")
#: Memory of a line besides its bytes.
_LINE_OVERHEAD = 64


class JsonlSource(FileSource):
    """Rows of JSON Lines files."""

    kind = "jsonl"
    _cuts_runs = False  # blocks are cut by the scan

    def __init__(self, files: Spec, columns: Sequence[str] | None = None) -> None:
        super().__init__(resolve_files(files, (".jsonl", ".ndjson", ".json")), columns)

    def list_columns(self) -> list[str] | None:
        return self._columns

    def _read_metadata(self) -> list[FileMetadata]:
        metadata = MetadataIndex(min_files=1).load(self.files, [self.kind, _BLOCK_BYTES], _scan)
        #: First and last byte of each block.
        self._offsets: list[tuple[int, int]] = []
        for file in metadata:
            ends = np.cumsum(file.nbytes).tolist()
            bounds = zip([0, *ends[:-1]], ends, file.rows, strict=True)
            self._offsets += [(begin, end) for begin, end, rows in bounds if rows]
        return metadata

    def read_block(self, block: int, columns: Sequence[str] | None = None) -> LazyRows:
        found = self.list_blocks()[block]
        lines = self._read_lines(block)
        return self._create_rows(lines, self.files[found.file], found.first_row, columns)

    def _read_lines(self, block: int) -> list[bytes]:
        found = self.list_blocks()[block]
        path = self.files[found.file]
        begin, end = self._offsets[block]
        with _open(path, found.first_row) as file:
            file.seek(begin)
            data = file.read(end - begin)
        lines = [line for line in data.split(b"\n") if line not in _EMPTY_LINES]
        if len(data) != end - begin or len(lines) != found.rows:
            raise create_change_error(path, found.first_row)
        return lines

    def _create_rows(
        self, lines: Sequence[bytes], path: str, first: int, columns: Sequence[str] | None
    ) -> LazyRows:
        columns = self._columns if columns is None else columns
        nbytes = sum(map(len, lines)) + _LINE_OVERHEAD * len(lines)
        parse = functools.partial(_parse_line, lines, path, first, columns)
        return LazyRows(parse, range(len(lines)), nbytes)

    def encode_block(self, block: int) -> Any:
        import pyarrow as pa

        lines = pa.array(self._read_lines(block), pa.large_binary())
        return pa.RecordBatch.from_arrays([lines], ["line"])

    def decode_rows(self, batch: Any, number: int) -> LazyRows:
        edges = self.list_blocks().edges
        block = int(np.searchsorted(edges, number, side="right")) - 1
        found = self.list_blocks()[block]
        first = found.first_row + number - int(edges[block])
        return self._create_rows(batch.column(0).to_pylist(), self.files[found.file], first, None)


def _parse_line(
    lines: Sequence[bytes], path: str, first: int, columns: Sequence[str] | None, index: int
) -> Any:
    try:
        value = json.loads(lines[index])
        return value if columns is None else {name: value[name] for name in columns}
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        is_parsed = isinstance(error, (KeyError, TypeError))
        problem = f"has no column {error}" if is_parsed else f"is not JSON: {error}"
        row = first + index
        line = _find_line(path, row)
        raise RowError(f"{path}, row {row} (line {line}) {problem}", path, row) from error


def _find_line(path: str, row: int) -> int:
    """Return the number of the line of a row, from 1, including empty lines."""
    with contextlib.suppress(DataError), _open(path) as file:
        full = (
            number for number, line in enumerate(file, 1) if line.rstrip(b"\n") not in _EMPTY_LINES
        )
        return next(islice(full, row, None), row + 1)
    return row + 1


@contextlib.contextmanager
def _open(path: str, row: int = -1) -> Iterator[Any]:
    """Open a file. Errors that occur while it is open become ``DataError``."""
    try:
        if is_remote(path):
            import fsspec

            raw = fsspec.open(path, "rb").open()
        else:
            raw = open(path, "rb", buffering=0)
        with io.BufferedReader(raw, _BLOCK_BYTES) as file:
            yield file
    except OSError as error:
        raise DataError(f"{path} can't be read: {error}", path, row) from error


def _scan(path: str) -> FileMetadata:
    """Cut a file into blocks and compute a checksum. The bytes of the blocks cover the file."""
    sizes: list[int] = []
    counts: list[int] = []
    checksum = 0
    with _open(path) as file:
        if file.peek(2)[:2] == b"\x1f\x8b":
            raise DataError(
                f"{path} is compressed, so lines can't be found in it. Decompress it.", path
            )
        while lines := file.readlines(
            _BLOCK_BYTES - 1
        ):  # the last one makes the block large enough
            text = b"".join(lines)
            checksum = zlib.crc32(text, checksum)
            sizes.append(len(text))
            counts.append(len(lines) - sum(map(lines.count, (b"\n", b"\r\n", b"\r"))))
    if not sizes:
        raise DataError(f"{path} is empty (0 bytes).", path)
    return FileMetadata(counts, sizes, f"{sum(sizes)}-{checksum:x}")
