"""Which files, and what all sources over files share: looked at once, and known by their content.

Globs, folders, lists and fsspec addresses are made a list that pickles small.
"""

from __future__ import annotations

import glob
import hashlib
import os
import threading
import zlib
from abc import abstractmethod
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

from miniray.data.plan.permutation import derive_key
from miniray.data.sources.base import Blocks, Source, column_list
from miniray.errors import DataError

Spec = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

#: A list that is longer than this when compressed is pickled as its place among its folders' files.
_LARGEST_LIST = 6000


def is_remote(path: str) -> bool:
    """Whether ``path`` is an address for fsspec (``s3://...``) and no file of this machine."""
    return "://" in path and not path.startswith("file://")


class FileList:
    """The files a user named, in order: sorted within a glob or folder, else as given.

    A pickled list of thousands of files stays under 10 KB: what does not compress is looked up
    again where it is unpickled, and ``DataError`` says so if the folder's content has changed in
    between.
    """

    def __init__(self, spec: Spec, suffixes: Sequence[str]) -> None:
        self._suffixes = tuple(suffixes)
        self.paths = self._resolve(spec)

    def _resolve(self, spec: Spec) -> list[str]:
        if isinstance(spec, Mapping) or not isinstance(spec, (str, bytes, os.PathLike, Iterable)):
            raise TypeError(f"files must be a path, a glob or a list of these, not {spec!r}")
        given = [spec] if isinstance(spec, (str, bytes, os.PathLike)) else list(spec)
        if not given:
            raise DataError("no files given: the list is empty")
        paths: list[str] = []
        for item in given:
            paths += self._resolve_one(os.fsdecode(item))
        return paths

    def _resolve_one(self, item: str) -> list[str]:
        if is_remote(item):
            return self._resolve_remote(item)
        item = os.path.abspath(os.path.expanduser(item.removeprefix("file://")))
        if os.path.isdir(item):
            found = sorted(self._within(item))
            if not found:
                kinds = " or ".join(f"*{s}" for s in self._suffixes)
                raise DataError(f"folder {item} has no {kinds} file, nor has any folder in it")
            return found
        if glob.has_magic(item) and not os.path.exists(item):
            found = sorted(p for p in glob.glob(item, recursive=True) if os.path.isfile(p))
            if not found:
                raise DataError(f"no file matches {item}")
            return found
        if not os.path.exists(item):
            raise DataError(f"file {item} does not exist")
        return [item]

    def _within(self, folder: str) -> Iterable[str]:
        seen: set[str] = set()
        for where, folders, names in os.walk(folder, followlinks=True):
            real = os.path.realpath(where)
            if real in seen:  # by another link, maybe in a circle
                folders.clear()
                continue
            seen.add(real)
            # Hidden ones, of which our own index folder is one, and those of unfinished writers.
            folders[:] = sorted(f for f in folders if not f.startswith((".", "_")))
            for name in names:
                if name.endswith(self._suffixes) and not name.startswith((".", "_")):
                    yield os.path.join(where, name)

    def _resolve_remote(self, item: str) -> list[str]:
        import fsspec

        system, path = fsspec.core.url_to_fs(item)
        protocol = item.split("://", 1)[0]
        if glob.has_magic(path):
            found = sorted(system.glob(path))
        elif system.isdir(path):
            found = sorted(p for p in system.find(path) if p.endswith(self._suffixes))
        else:
            return [item]
        if not found:
            raise DataError(f"no file matches {item}")
        return [f"{protocol}://{p}" for p in found]

    # -- pickling --------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        packed = zlib.compress("\n".join(self.paths).encode(), 9)
        if len(packed) <= _LARGEST_LIST:
            return {"packed": packed, "suffixes": self._suffixes}
        folders = list(dict.fromkeys(os.path.dirname(path) for path in self.paths))
        listing = [path for folder in folders for path in self._listing(folder)]
        place = {path: i for i, path in enumerate(listing)}
        chosen = [place.get(path, -1) for path in self.paths]
        if len(set(chosen)) != len(chosen) or -1 in chosen or chosen != sorted(chosen):
            # Not simply some of the folders' files in their order: nothing shorter describes it.
            return {"packed": packed, "suffixes": self._suffixes}
        bits = bytearray(len(listing))
        for i in chosen:
            bits[i] = 1
        return {
            "folders": folders,
            "bits": zlib.compress(bytes(bits), 9),
            "digest": self._digest(self.paths),
            "suffixes": self._suffixes,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._suffixes = state["suffixes"]
        if "packed" in state:
            self.paths = zlib.decompress(state["packed"]).decode().split("\n")
            return
        listing = [path for folder in state["folders"] for path in self._listing(folder)]
        bits = zlib.decompress(state["bits"])
        self.paths = [path for path, bit in zip(listing, bits, strict=False) if bit]
        if len(bits) != len(listing) or self._digest(self.paths) != state["digest"]:
            raise DataError(
                f"the content of {state['folders'][0]} has changed since the dataset was pickled,"
                " or differs on this machine; files must not be added or removed while a run starts"
            )

    @staticmethod
    def _listing(folder: str) -> list[str]:
        if is_remote(folder):
            import fsspec

            system, path = fsspec.core.url_to_fs(folder)
            return sorted(f"{folder}/{p.rsplit('/', 1)[-1]}" for p in system.ls(path, detail=False))
        return sorted(entry.path for entry in os.scandir(folder) if entry.is_file())

    @staticmethod
    def _digest(paths: Sequence[str]) -> str:
        return hashlib.blake2b("\n".join(paths).encode(), digest_size=8).hexdigest()


# -- sources ---------------------------------------------------------------------------------------


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
