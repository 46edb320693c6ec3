"""Files with a JSON document a line. Blocks are runs of lines of about a megabyte.

The files are read through once when the dataset is made, to find where lines begin; after that only
the blocks that are needed. A line that is not JSON is named when it is parsed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from miniray.data.file_source import FileBlocks, FileSource
from miniray.data.files import FileList, Spec, is_remote
from miniray.data.slabs import Slabs
from miniray.data.source import Rows
from miniray.errors import DataError, RowError

_BLOCK = 1 << 20
_SCAN = 8 << 20


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
        where = f"{self._path}, row {self._first + i} (line {self._first + i + 1})"
        try:
            value = json.loads(self._lines[i])
        except ValueError as error:
            text = f"{where} is not JSON: {error}"
            raise RowError(text, self._path, self._first + i) from error
        if self._columns is None:
            return value
        try:
            return {name: value[name] for name in self._columns}
        except (KeyError, TypeError) as error:
            text = f"{where} has no column {error}"
            raise RowError(text, self._path, self._first + i) from error


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
            FileBlocks([lines for _, _, lines in found], [b - a for a, b, _ in found], size)
            for found, size in scanned
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
        lines = data.removesuffix(b"\n").split(b"\n")
        if len(data) != end - begin or len(lines) != table.rows[block]:
            raise DataError(
                f"{path}, lines {first + 1} to {first + int(table.rows[block])}: the file has"
                " changed while it was read"
            )
        return LineRows(lines, path, first, self._columns if columns is None else columns)


def _opened(path: str) -> Any:
    if is_remote(path):
        import fsspec

        return fsspec.open(path, "rb").open()
    return open(path, "rb")


def _scan(path: str) -> tuple[list[tuple[int, int, int]], int]:
    """Blocks of a file as (start, end, lines), and the file's size."""
    found: list[tuple[int, int, int]] = []
    begin = position = lines = 0
    unended = False
    try:
        with _opened(path) as file:
            for chunk in _chunks(file):
                if position == 0 and chunk[:2] == b"\x1f\x8b":
                    raise DataError(f"{path} is compressed; lines cannot be found in it. Unpack it")
                ends = np.flatnonzero(np.frombuffer(chunk, dtype=np.uint8) == 10) + position + 1
                done = 0
                while len(ends):
                    # The first line end that makes the block large enough.
                    at = int(np.searchsorted(ends, begin + _BLOCK))
                    if at == len(ends):
                        lines += len(ends) - done
                        break
                    found.append((begin, int(ends[at]), lines + at + 1 - done))
                    begin, lines, done = int(ends[at]), 0, at + 1
                position += len(chunk)
                unended = not chunk.endswith(b"\n")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if position == 0:
        raise DataError(f"{path} is empty (0 bytes)")
    lines += unended  # the last line may lack its end
    if lines:
        found.append((begin, position, lines))
    return found, position


def _chunks(file: Any) -> Iterator[bytes]:
    while chunk := file.read(_SCAN):
        yield chunk
