"""What all sources over files share: which files, looked at once in a process, and who they are."""

from __future__ import annotations

import os
import threading
from abc import abstractmethod
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

from miniray.data.files import FileList, is_remote
from miniray.data.permutation import derive_key
from miniray.data.source import Blocks, Source, column_list
from miniray.errors import DataError


@dataclass(frozen=True)
class FileBlocks:
    """What a look into one file tells: its blocks' rows and bytes, and what changes when it does.

    ``mark`` is the same for a copy of the file. There is none of a table in memory.
    """

    rows: Sequence[int]
    nbytes: Sequence[int]
    mark: str = ""


class FileSource(Source):
    """Subclasses say how to look into files (``_look``) and how to read.

    Pickled without what was looked up; files that have changed when it is looked up again are a
    ``DataError``. ``files`` is None for data that is no file, under the name ``table``.
    """

    #: Attributes that are pickled, beside what is expected of the files.
    _kept: tuple[str, ...] = ("_list", "_columns")

    def __init__(self, files: FileList | None, columns: Sequence[str] | None) -> None:
        self._list = files
        self._columns = column_list("columns", columns)
        self._expected: str | None = None
        self._forget()

    def _forget(self) -> None:
        self._blocks: Blocks | None = None
        self._marks: list[str] = []
        self._fingerprint = ""
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: self.__dict__[name] for name in self._kept}
        return {**kept, "_expected": self._fingerprint or self._expected}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    @property
    def paths(self) -> list[str]:
        return ["table"] if self._list is None else self._list.paths

    @abstractmethod
    def _look(self) -> list[FileBlocks]:
        """Look into all files, in the order of ``paths``. Raises ``DataError`` for bad ones."""

    @property
    def blocks(self) -> Blocks:
        if self._blocks is None:  # a lock that is not needed cannot be left held by a fork
            with self._lock:
                if self._blocks is None:
                    self._put_together(self._look())
        assert self._blocks is not None
        return self._blocks

    def _put_together(self, found: Sequence[FileBlocks]) -> None:
        paths, counts = self.paths, [len(file.rows) for file in found]
        blocks = Blocks(
            files=paths,
            file=_joined([number] * count for number, count in enumerate(counts)),
            number=_joined(range(count) for count in counts),
            first=_joined(accumulate([0, *file.rows[:-1]]) for file in found if file.rows),
            rows=_joined(file.rows for file in found),
            nbytes=_joined(file.nbytes for file in found),
        )
        marks = [file.mark for file in found]
        fingerprint = blocks.fingerprint(marks)
        if self._expected not in (None, fingerprint):
            raise DataError(
                f"the files (the first is {paths[0]}) are not those the dataset was made with:"
                " names, sizes, rows or content differ. Make the dataset again"
            )
        self._marks, self._fingerprint, self._blocks = marks, fingerprint, blocks

    @property
    def fingerprint(self) -> str:
        self.blocks  # noqa: B018
        return self._fingerprint

    def identity(self, file: int) -> str:
        self.blocks  # noqa: B018
        path = self.paths[file]
        changed = _last_change(path) if self.lasting else ""
        return f"{derive_key(path):x}-{self._marks[file]}-{changed}"

    @property
    def lasting(self) -> bool:
        return self._list is not None

    def folder(self, file: int) -> str | None:
        path = self.paths[file]
        return None if self._list is None or is_remote(path) else os.path.dirname(path)


def _last_change(path: str) -> str:
    """What tells that a file was written to, as far as its file system can say."""
    try:
        if not is_remote(path):
            return str(os.stat(path).st_mtime_ns)
        import fsspec

        system, inside = fsspec.core.url_to_fs(path)
        return f"{derive_key(system.ukey(inside)):x}"
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist any more") from error


def _joined(parts: Iterable[Iterable[int]]) -> Sequence[int]:
    return array("q", chain.from_iterable(parts))
