"""Resolve paths, and the base class of sources that read files."""

from __future__ import annotations

import glob
import hashlib
import os
import threading
import zlib
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from miniray.data.locations import Blocks, cumulate
from miniray.data.sources.base import BLOCK_BYTES, Source, check_column_list
from miniray.data.sources.footers import FileMetadata
from miniray.errors import DataError

Spec = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def is_remote(path: str) -> bool:
    """Return whether ``path`` is an fsspec URL (``s3://...``) instead of a local file."""
    return "://" in path and not path.startswith("file://")


class FileList:
    """Paths of files, directories, globs and fsspec URLs: sorted within a glob or directory.

    Pickled compressed: thousands of numbered files take a few KB.
    """

    def __init__(self, spec: Spec, suffixes: Sequence[str]) -> None:
        self._suffixes = tuple(suffixes)
        self.paths = self._resolve(spec)

    def _resolve(self, spec: Spec) -> list[str]:
        if (
            isinstance(spec, Mapping)
            or hasattr(spec, "__arrow_c_stream__")
            or hasattr(spec, "iloc")
        ):
            raise TypeError(
                f"files must be paths, not {type(spec).__name__}. Use ArrowDataset(df), or write"
                " it with df.to_parquet(path)."
            )
        if not isinstance(spec, (str, bytes, os.PathLike, Iterable)):
            raise TypeError(f"files must be a path, a glob or a list of these, not {spec!r}")
        given = [spec] if isinstance(spec, (str, bytes, os.PathLike)) else list(spec)
        if not given:
            raise DataError("files= is empty. Pass at least one path.")
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
                raise DataError(f"Directory {item} contains no {kinds} files.", item)
            return found
        if glob.has_magic(item) and not os.path.exists(item):
            found = sorted(p for p in glob.glob(item, recursive=True) if os.path.isfile(p))
            if not found:
                raise DataError(f"No file matches {item}.")
            return found
        if not os.path.exists(item):
            raise DataError(f"File {item} doesn't exist.", item)
        return [item]

    def _within(self, folder: str) -> Iterable[str]:
        seen: set[str] = set()
        for where, folders, names in os.walk(folder, followlinks=True):
            real = os.path.realpath(where)
            if real in seen:  # through a different link, possibly in a cycle
                folders.clear()
                continue
            seen.add(real)
            # Skip hidden directories, such as .miniray, and those of unfinished writers.
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
            raise DataError(f"No file matches {item}.")
        return [f"{protocol}://{p}" for p in found]

    def __getstate__(self) -> dict[str, Any]:
        packed = zlib.compress("\n".join(self.paths).encode(), 9)
        return {"packed": packed, "suffixes": self._suffixes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._suffixes = state["suffixes"]
        self.paths = zlib.decompress(state["packed"]).decode().split("\n")


# -- sources ---------------------------------------------------------------------------------------


class FileSource(Source):
    """Base class of sources that read files. Subclasses read the metadata and the blocks.

    Pickled without metadata. ``DataError`` is raised if the files have changed when the metadata is
    read again. ``files`` is None for data in memory, which is named ``table``.
    """

    #: Attributes that are pickled, besides the expected fingerprint.
    _pickled: tuple[str, ...] = ("_list", "_columns")
    #: Whether runs are cut into blocks.
    _cuts_runs = True

    def __init__(self, files: FileList | None, columns: Sequence[str] | None) -> None:
        self._list = files
        self._columns = check_column_list("columns", columns)
        self._expected: str | None = None
        self._reset()

    def _reset(self) -> None:
        self._blocks: Blocks | None = None
        self._marks: list[str] = []
        self._fingerprint = ""
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        state = {name: self.__dict__[name] for name in self._pickled}
        return {**state, "_expected": self._fingerprint or self._expected}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    @property
    def files(self) -> list[str]:
        return ["table"] if self._list is None else self._list.paths

    @property
    def is_persistent(self) -> bool:  # type: ignore[override]
        return self._list is not None

    @abstractmethod
    def _read_metadata(self) -> list[FileMetadata]:
        """Read the metadata of all files. Raises ``DataError`` for unusable ones."""

    def list_blocks(self) -> Blocks:
        if self._blocks is None:  # without the lock, which a fork could copy in the locked state
            with self._lock:
                if self._blocks is None:
                    self._create_blocks(self._read_metadata())
        assert self._blocks is not None
        return self._blocks

    def _create_blocks(self, metadata: Sequence[FileMetadata]) -> None:
        blocks = cut_blocks(metadata, BLOCK_BYTES if self._cuts_runs else None)
        digest = hashlib.blake2b(digest_size=8)
        for path, file in zip(self.files, metadata, strict=True):
            name = path.replace("\\", "/").rsplit("/", 1)[-1]
            digest.update(f"{name}\0{file.mark}\0{list(file.rows)}\0".encode())
        fingerprint = digest.hexdigest()
        if self._expected not in (None, fingerprint):
            raise DataError(
                f"The files ({self.files[0]}, ...) have changed since the dataset was created:"
                " names, sizes, rows or content differ. Create the dataset again.",
                self.files[0],
            )
        self._marks = [file.mark for file in metadata]
        self._fingerprint, self._blocks = fingerprint, blocks

    def compute_fingerprint(self) -> str:
        self.list_blocks()
        return self._fingerprint

    def identify_file(self, file: int) -> str:
        self.list_blocks()
        path = self.files[file]
        changed = _find_last_change(path) if self.is_persistent else ""
        digest = hashlib.blake2b(path.encode(), digest_size=8).hexdigest()
        return f"{digest}-{self._marks[file]}-{changed}"

    def find_folder(self, file: int) -> str | None:
        path = self.files[file]
        return None if self._list is None or is_remote(path) else os.path.dirname(path)


def cut_blocks(metadata: Sequence[FileMetadata], block_bytes: int | None) -> Blocks:
    """Cut runs into blocks of about ``block_bytes``, with equal rows except in the last one."""
    runs = np.array([len(file.rows) for file in metadata], dtype=np.int64)
    rows = np.array([n for file in metadata for n in file.rows], dtype=np.int64)
    nbytes = np.array([n for file in metadata for n in file.nbytes], dtype=np.int64)
    first = cumulate(rows)[:-1] - np.repeat(cumulate(rows)[cumulate(runs)[:-1]], runs)
    file = np.repeat(np.arange(len(metadata)), runs)
    run = np.arange(len(rows)) - np.repeat(cumulate(runs)[:-1], runs)
    # Empty runs have no block.
    count = np.minimum(rows, 1 if block_bytes is None else np.maximum(1, -(-nbytes // block_bytes)))
    size = -(-rows // np.maximum(1, count))
    count = -(-rows // np.maximum(1, size))
    place = np.arange(count.sum()) - np.repeat(cumulate(count)[:-1], count)

    def spread(values: Any) -> Any:
        return np.repeat(values, count)

    begin = place * spread(size)
    block_rows = np.minimum(spread(size), spread(rows) - begin)
    decoded_bytes = -(-spread(nbytes) * block_rows // np.maximum(1, spread(rows)))
    return Blocks(spread(file), spread(run), spread(first) + begin, block_rows, decoded_bytes)


def _find_last_change(path: str) -> str:
    """Return an identifier of the last modification, as the file system reports it."""
    try:
        if not is_remote(path):
            return str(os.stat(path).st_mtime_ns)
        import fsspec

        system, inside = fsspec.core.url_to_fs(path)
        return hashlib.blake2b(str(system.ukey(inside)).encode(), digest_size=8).hexdigest()
    except FileNotFoundError as error:
        raise DataError(f"File {path} no longer exists.", path) from error
