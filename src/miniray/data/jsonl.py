"""Files with a JSON document a line. Blocks are runs of lines of about a megabyte.

The files are read through once when the dataset is made, to find where lines begin; after that only
the blocks that are needed. A line that is not JSON is named when it is parsed.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from miniray.data.files import FileList, Spec, is_remote
from miniray.data.permutation import Positions, derive_key
from miniray.data.slabs import Slabs
from miniray.data.source import Blocks, Rows, Source
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

    def rows(self, index: Positions) -> list[Any]:
        return [self._parse(i) for i in index.tolist()]

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


class JsonlSource(Source):
    kind = "jsonl"

    def __init__(self, files: Spec, columns: Sequence[str] | None = None) -> None:
        self._list = FileList(files, (".jsonl", ".ndjson", ".json"))
        self._columns = None if columns is None else list(columns)
        self._expected: str | None = None
        self._forget()

    def _forget(self) -> None:
        self._blocks: Blocks | None = None
        self._offsets: list[tuple[int, int]] = []
        self._identities: list[str] = []
        self._sizes: list[int] = []
        self._fingerprint = ""
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        expected = self._fingerprint or self._expected
        return {"_list": self._list, "_columns": self._columns, "_expected": expected}

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
        path = self._list.paths[file]
        return None if is_remote(path) else os.path.dirname(path)

    def column_names(self) -> list[str] | None:
        return self._columns

    def _look(self) -> None:
        paths = self._list.paths
        with ThreadPoolExecutor(min(8, len(paths))) as pool:
            scanned = list(pool.map(_scan, paths))
        rows = [count for found, _ in scanned for _, _, count in found]
        per_file = [len(found) for found, _ in scanned]
        firsts = [np.cumsum([0, *(c for _, _, c in found)])[:-1] for found, _ in scanned]
        self._offsets = [(a, b) for found, _ in scanned for a, b, _ in found]
        self._blocks = Blocks(
            files=paths,
            file=np.repeat(np.arange(len(paths)), per_file),
            number=np.array([i for count in per_file for i in range(count)], dtype=np.int64),
            first=np.concatenate([*firsts, np.empty(0)]).astype(np.int64),
            rows=np.array(rows, dtype=np.int64),
            nbytes=np.array([b - a for a, b in self._offsets], dtype=np.int64),
        )
        self._sizes = [size for _, (size, _) in scanned]
        self._identities = [
            f"{derive_key(path):x}-{size}-{changed}"
            for path, (_, (size, changed)) in zip(paths, scanned, strict=True)
        ]
        self._fingerprint = self._blocks.fingerprint(self._sizes)
        if self._expected not in (None, self._fingerprint):
            raise DataError(
                f"the files (the first is {paths[0]}) are not those the dataset was made with:"
                " names, sizes or rows differ. Make the dataset again"
            )

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


def _scan(path: str) -> tuple[list[tuple[int, int, int]], tuple[int, int]]:
    """Blocks of a file as (start, end, lines), and the file's (size, time of last change)."""
    found: list[tuple[int, int, int]] = []
    begin = position = lines = changed = 0
    unended = False
    try:
        with _opened(path) as file:
            changed = 0 if is_remote(path) else os.fstat(file.fileno()).st_mtime_ns
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
    return found, (position, changed)


def _chunks(file: Any) -> Iterator[bytes]:
    while chunk := file.read(_SCAN):
        yield chunk
