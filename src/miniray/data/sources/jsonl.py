"""Files with a JSON document a line. Blocks are runs of lines of about a megabyte.

The files are read through once when the dataset is made, to find where lines begin; after that only
the blocks that are needed. Empty lines are no rows. A line that is not JSON is named when it is
parsed.
"""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import numpy as np

from miniray.data.sources.base import Rows, Slabs
from miniray.data.sources.files import FileBlocks, FileList, FileSource, Spec, is_remote
from miniray.errors import DataError, RowError

_BLOCK = 1 << 20
_SCAN = 8 << 20
_EMPTY = (b"", b"\r")  # lines that are no rows


class LineRows(Rows):
    """Lines of a block, parsed when they are asked for."""

    def __init__(
        self, lines: Sequence[bytes], path: str, first: int, columns: Sequence[str] | None
    ) -> None:
        self._lines, self._path, self._first, self._columns = lines, path, first, columns
        self.start = 0
        self.nbytes = sum(map(len, lines)) + 64 * len(lines)

    def rows(self, index: Sequence[int]) -> list[Any]:
        return [self._parse(i) for i in index]

    def _parse(self, i: int) -> Any:
        try:
            value = json.loads(self._lines[i])
        except ValueError as error:
            raise self._error(i, f"is not JSON: {error}") from error
        if self._columns is None:
            return value
        try:
            return {name: value[name] for name in self._columns}
        except (KeyError, TypeError) as error:
            raise self._error(i, f"has no column {error}") from error

    def _error(self, i: int, what: str) -> RowError:
        row = self._first + i
        line = _line_of(self._path, row)
        return RowError(f"{self._path}, row {row} (line {line}) {what}", self._path, row)


class JsonlSource(FileSource):
    kind = "jsonl"

    def __init__(self, files: Spec, columns: Sequence[str] | None = None) -> None:
        super().__init__(FileList(files, (".jsonl", ".ndjson", ".json")), columns)

    def _forget(self) -> None:
        super()._forget()
        self._offsets: list[tuple[int, int]] = []

    def column_names(self) -> list[str] | None:
        return self._columns

    def _look(self) -> list[FileBlocks]:
        with ThreadPoolExecutor(min(8, len(self.paths))) as pool:
            scanned = list(pool.map(_scan, self.paths))
        self._offsets = [(begin, end) for found, _ in scanned for begin, end, _ in found]
        return [
            FileBlocks([lines for _, _, lines in found], [b - a for a, b, _ in found], mark)
            for found, mark in scanned
        ]

    def read(
        self,
        block: int,
        start: int,
        stop: int,
        columns: Sequence[str] | None = None,
        slabs: Slabs | None = None,
    ) -> LineRows:
        table = self.blocks
        path, first = table.files[int(table.file[block])], int(table.first[block])
        begin, end = self._offsets[block]
        try:
            with _opened(path) as file:
                file.seek(begin)
                data = file.read(end - begin)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error}") from error
        lines = [line for line in data.split(b"\n") if line not in _EMPTY]
        if len(data) != end - begin or len(lines) != table.rows[block]:
            raise DataError(
                f"{path}, rows {first} to {first + table.rows[block] - 1}: the file has changed"
                " while it was read"
            )
        return LineRows(lines, path, first, self._columns if columns is None else columns)


def _opened(path: str) -> Any:
    if is_remote(path):
        import fsspec

        return fsspec.open(path, "rb").open()
    return open(path, "rb")


def _scan(path: str) -> tuple[list[tuple[int, int, int]], str]:
    """Blocks of a file as (start, end, rows), and what tells its content from other content."""
    found: list[tuple[int, int, int]] = []
    begin = position = rows = checksum = 0
    try:
        with _opened(path) as file:
            for text in _whole_lines(file):
                if position == 0 and text[:2] == b"\x1f\x8b":
                    raise DataError(f"{path} is compressed; lines cannot be found in it. Unpack it")
                checksum = zlib.crc32(text, checksum)
                data = np.frombuffer(text, dtype=np.uint8)
                ends = np.flatnonzero(data == 10)
                if not text.endswith(b"\n"):  # the last line may lack its end
                    ends = np.append(ends, len(text))
                lengths = np.diff(ends, prepend=-1) - 1
                full = lengths > 1
                single = np.flatnonzero(lengths == 1)
                full[single] = data[ends[single] - 1] != 13
                counted, done = np.cumsum(full), 0
                ends = np.minimum(ends + 1, len(text)) + position
                while True:
                    # The first line end that makes the block large enough.
                    at = int(np.searchsorted(ends, begin + _BLOCK))
                    if at == len(ends):
                        break
                    found.append((begin, int(ends[at]), rows + int(counted[at]) - done))
                    begin, rows, done = int(ends[at]), 0, int(counted[at])
                rows += int(counted[-1]) - done
                position += len(text)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if position == 0:
        raise DataError(f"{path} is empty (0 bytes)")
    if rows:
        found.append((begin, position, rows))
    return [block for block in found if block[2]], f"{position}-{checksum:x}"


def _whole_lines(file: Any) -> Iterator[bytes]:
    """The file in pieces that end with a line."""
    rest = b""
    while chunk := file.read(_SCAN):
        end = chunk.rfind(b"\n") + 1
        if end:
            yield rest + chunk[:end]
            rest = chunk[end:]
        else:
            rest += chunk
    if rest:
        yield rest


def _line_of(path: str, row: int) -> int:
    """The number of the line, from 1, that has a row, counting empty ones too."""
    with contextlib.suppress(OSError), _opened(path) as file:
        full = (number for number, line in enumerate(file, 1) if line.rstrip(b"\n") not in _EMPTY)
        return next(islice(full, row, None), row + 1)
    return row + 1
