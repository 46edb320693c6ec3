"""Files with one JSON document per line. Blocks are runs of lines of about a megabyte.

The files are read once when the dataset is created, to find the blocks. Empty lines are skipped. A
line that isn't JSON raises ``RowError`` when it is parsed.
"""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, overload

import numpy as np

from miniray.data.sources.files import FileList, FileSource, Spec, is_remote
from miniray.data.sources.footers import FileMetadata, MetadataIndex
from miniray.errors import DataError, RowError

_BLOCK_BYTES = 1 << 20
_SCAN_BYTES = 8 << 20
_EMPTY_LINES = (b"", b"\r")
#: Memory of a line besides its bytes.
_LINE_OVERHEAD = 64


class LineRows(Sequence[Any]):
    """Lines of a block, parsed when they are accessed."""

    def __init__(
        self, lines: Sequence[bytes], path: str, first_row: int, columns: Sequence[str] | None
    ) -> None:
        self.lines, self._path, self._first, self._columns = lines, path, first_row, columns
        self.nbytes = sum(map(len, lines)) + _LINE_OVERHEAD * len(lines)

    def __len__(self) -> int:
        return len(self.lines)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            start = range(len(self.lines))[index].start
            return LineRows(self.lines[index], self._path, self._first + start, self._columns)
        try:
            value = json.loads(self.lines[index])
        except (ValueError, RecursionError) as error:
            raise self._create_error(index, f"is not JSON: {error}") from error
        if self._columns is None:
            return value
        try:
            return {name: value[name] for name in self._columns}
        except (KeyError, TypeError) as error:
            raise self._create_error(index, f"has no column {error}") from error

    def _create_error(self, index: int, problem: str) -> RowError:
        row = self._first + index
        line = _find_line(self._path, row)
        return RowError(f"{self._path}, row {row} (line {line}) {problem}", self._path, row)


class JsonlSource(FileSource):
    """Rows of JSON Lines files."""

    kind = "jsonl"
    _cuts_runs = False  # blocks are cut by the scan

    def __init__(self, files: Spec, columns: Sequence[str] | None = None) -> None:
        super().__init__(FileList(files, (".jsonl", ".ndjson", ".json")), columns)

    def _reset(self) -> None:
        super()._reset()
        self._offsets: list[tuple[int, int]] = []

    def list_columns(self) -> list[str] | None:
        return self._columns

    def _read_metadata(self) -> list[FileMetadata]:
        metadata = MetadataIndex(min_files=1).load(self.files, [self.kind, _BLOCK_BYTES], _scan)
        self._offsets = []
        for file in metadata:
            ends = np.cumsum(file.nbytes).tolist()
            bounds = zip([0, *ends[:-1]], ends, file.rows, strict=True)
            self._offsets += [(begin, end) for begin, end, rows in bounds if rows]
        return metadata

    def read_block(self, block: int, columns: Sequence[str] | None = None) -> LineRows:
        found = self.list_blocks()[block]
        path, first = self.files[found.file], found.first_row
        begin, end = self._offsets[block]
        try:
            with _open(path) as file:
                file.seek(begin)
                data = file.read(end - begin)
        except OSError as error:
            raise DataError(f"{path} can't be read: {error}", path, first) from error
        lines = [line for line in data.split(b"\n") if line not in _EMPTY_LINES]
        if len(data) != end - begin or len(lines) != found.rows:
            raise DataError(
                f"{path}, rows {first} to {first + found.rows - 1}: the file has changed since the"
                " dataset was created. Don't write to the files of a run.",
                path,
                first,
            )
        return LineRows(lines, path, first, self._columns if columns is None else columns)

    def encode_rows(self, rows: LineRows) -> Any:
        import pyarrow as pa

        return pa.RecordBatch.from_arrays([pa.array(rows.lines, pa.large_binary())], ["line"])

    def decode_rows(self, batch: Any, number: int) -> LineRows:
        edges = self.list_blocks().edges
        block = int(np.searchsorted(edges, number, side="right")) - 1
        found = self.list_blocks()[block]
        first = found.first_row + number - int(edges[block])
        return LineRows(batch.column(0).to_pylist(), self.files[found.file], first, self._columns)


def _open(path: str) -> Any:
    if is_remote(path):
        import fsspec

        return fsspec.open(path, "rb").open()
    return open(path, "rb")


def _scan(path: str) -> FileMetadata:
    """Cut a file into blocks and compute a checksum. The bytes of the blocks cover the file."""
    sizes: list[int] = []
    counts: list[int] = []
    begin = position = rows = checksum = 0
    try:
        with _open(path) as file:
            for text in _iter_chunks(file):
                if position == 0 and text[:2] == b"\x1f\x8b":
                    raise DataError(
                        f"{path} is compressed, so lines can't be found in it. Decompress it.", path
                    )
                checksum = zlib.crc32(text, checksum)
                data = np.frombuffer(text, dtype=np.uint8)
                ends = np.flatnonzero(data == 10)
                if not text.endswith(b"\n"):  # the last line
                    ends = np.append(ends, len(text))
                lengths = np.diff(ends, prepend=-1) - 1
                is_row = lengths > 1
                single = np.flatnonzero(lengths == 1)
                is_row[single] = data[ends[single] - 1] != 13
                counted, done = np.cumsum(is_row), 0
                ends = np.minimum(ends + 1, len(text)) + position
                while True:
                    # The first line end that makes the block large enough.
                    at = int(np.searchsorted(ends, begin + _BLOCK_BYTES))
                    if at == len(ends):
                        break
                    sizes.append(int(ends[at]) - begin)
                    counts.append(rows + int(counted[at]) - done)
                    begin, rows, done = int(ends[at]), 0, int(counted[at])
                rows += int(counted[-1]) - done
                position += len(text)
    except OSError as error:
        raise DataError(f"{path} can't be read: {error}", path) from error
    if position == 0:
        raise DataError(f"{path} is empty (0 bytes).", path)
    if begin < position:
        sizes.append(position - begin)
        counts.append(rows)
    return FileMetadata(counts, sizes, f"{position}-{checksum:x}")


def _iter_chunks(file: Any) -> Iterator[bytes]:
    """Yield the file in chunks that end with a line."""
    rest = b""
    while chunk := file.read(_SCAN_BYTES):
        end = chunk.rfind(b"\n") + 1
        if end:
            yield rest + chunk[:end]
            rest = chunk[end:]
        else:
            rest += chunk
    if rest:
        yield rest


def _find_line(path: str, row: int) -> int:
    """Return the number of the line of a row, from 1, including empty lines."""
    with contextlib.suppress(OSError), _open(path) as file:
        full = (
            number for number, line in enumerate(file, 1) if line.rstrip(b"\n") not in _EMPTY_LINES
        )
        return next(islice(full, row, None), row + 1)
    return row + 1
