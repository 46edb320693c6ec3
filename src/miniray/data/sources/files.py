"""Resolve paths, and the base class of sources that read files."""

from __future__ import annotations

import glob
import hashlib
import os
import threading
import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from miniray.data.locations import Blocks, cumulate
from miniray.data.sources.base import BLOCK_BYTES, Source, check_column_list
from miniray.data.sources.footers import FileMetadata, stamp_file
from miniray.errors import DataError

Spec = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def is_remote(path: str) -> bool:
    """Return whether ``path`` is an fsspec URL (``s3://...``) instead of a local file."""
    return "://" in path and not path.startswith("file://")


def resolve_files(spec: Spec, suffixes: tuple[str, ...]) -> list[str]:
    """Return the files of paths, directories, globs and fsspec URLs.

    Files of a directory have one of the suffixes. Within a directory or glob, they are sorted.
    """
    if isinstance(spec, Mapping) or hasattr(spec, "__arrow_c_stream__") or hasattr(spec, "iloc"):
        raise TypeError(
            f"files must be paths, not {type(spec).__name__}. Use ArrowDataset(df), or write"
            " it with df.to_parquet(path)."
        )
    if not isinstance(spec, (str, bytes, os.PathLike, Iterable)):
        raise TypeError(f"files must be a path, a glob or a list of these, not {spec!r}")
    given = [spec] if isinstance(spec, (str, bytes, os.PathLike)) else list(spec)
    if not given:
        raise DataError("files= is empty. Pass at least one path.")
    items = map(os.fsdecode, given)
    return [path for item in items for path in _resolve_item(item, suffixes)]


def _resolve_item(item: str, suffixes: tuple[str, ...]) -> list[str]:
    if is_remote(item):
        return _resolve_remote(item, suffixes)
    item = os.path.abspath(os.path.expanduser(item.removeprefix("file://")))
    if os.path.isdir(item):
        found = sorted(_iter_directory(item, suffixes))
        if not found:
            kinds = " or ".join(f"*{suffix}" for suffix in suffixes)
            raise DataError(f"Directory {item} contains no {kinds} files.", item)
        return found
    if os.path.exists(item):
        return [item]
    if not glob.has_magic(item):
        raise DataError(f"File {item} doesn't exist.", item)
    found = sorted(path for path in glob.glob(item, recursive=True) if os.path.isfile(path))
    if not found:
        raise DataError(f"No file matches {item}.")
    return found


def _iter_directory(directory: str, suffixes: tuple[str, ...]) -> Iterable[str]:
    seen: set[str] = set()
    for parent, folders, names in os.walk(directory, followlinks=True):
        real = os.path.realpath(parent)
        if real in seen:  # through a different link, possibly in a cycle
            folders.clear()
            continue
        seen.add(real)
        # Skip hidden directories, such as .miniray, and those of unfinished writers.
        folders[:] = sorted(name for name in folders if not name.startswith((".", "_")))
        for name in names:
            if name.endswith(suffixes) and not name.startswith((".", "_")):
                yield os.path.join(parent, name)


def _resolve_remote(item: str, suffixes: tuple[str, ...]) -> list[str]:
    import fsspec

    system, path = fsspec.core.url_to_fs(item)
    if glob.has_magic(path):
        found = sorted(system.glob(path))
    elif system.isdir(path):
        found = sorted(name for name in system.find(path) if name.endswith(suffixes))
    else:
        return [item]
    if not found:
        raise DataError(f"No file matches {item}.")
    protocol = item.split("://", 1)[0]
    return [f"{protocol}://{name}" for name in found]


class FileSource(Source):
    """Base class of sources that read files. Subclasses read the metadata and the blocks.

    Pickled without metadata. ``DataError`` is raised if the files have changed when the metadata is
    read again.
    """

    is_persistent = True
    #: Whether runs are cut into blocks.
    _cuts_runs = True

    def __init__(self, files: Sequence[str], columns: Sequence[str] | None) -> None:
        self.files = files
        self._columns = check_column_list("columns", columns)
        self._expected: str | None = None
        self._reset()

    def _reset(self) -> None:
        self._blocks: Blocks | None = None
        self._marks: list[str] = []
        self._stamps: list[Sequence[int] | None] = []
        self._fingerprint = ""
        self._lock = threading.Lock()
        #: The file or record batch that each thread keeps for the next block.
        self._local = threading.local()

    def __getstate__(self) -> dict[str, Any]:
        # Compressed: thousands of numbered files take a few KB.
        files = zlib.compress(os.fsencode("\0".join(self.files)), 9)
        expected = self._fingerprint or self._expected
        return {"files": files, "_columns": self._columns, "_expected": expected}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.files = os.fsdecode(zlib.decompress(state["files"])).split("\0")
        self._reset()

    @abstractmethod
    def _read_metadata(self) -> list[FileMetadata]:
        """Read the metadata of all files. Raises ``DataError`` for unusable ones."""

    def list_blocks(self) -> Blocks:
        if self._blocks is None:  # without the lock, which a fork could copy in the locked state
            with self._lock:
                if self._blocks is None:
                    self._blocks = self._create_blocks(self._read_metadata())
        return self._blocks

    def _create_blocks(self, metadata: Sequence[FileMetadata]) -> Blocks:
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
        self._stamps = [file.stamp for file in metadata]
        self._fingerprint = fingerprint
        return cut_blocks(metadata, BLOCK_BYTES if self._cuts_runs else None)

    def compute_fingerprint(self) -> str:
        self.list_blocks()
        return self._fingerprint

    def check_unchanged(self, file: int, compute_mark: Callable[[], str]) -> None:
        """Raise ``DataError`` if a file has changed since its metadata was read."""
        path, stamp = self.files[file], self._stamps[file]
        if (stamp is None or stamp != stamp_file(path)) and compute_mark() != self._marks[file]:
            raise create_change_error(path)

    def identify_file(self, file: int) -> str:
        self.list_blocks()
        path = self.files[file]
        changed = _find_last_change(path) if self.is_persistent else ""
        digest = hashlib.blake2b(path.encode(), digest_size=8).hexdigest()
        return f"{digest}-{self._marks[file]}-{changed}"

    def find_folder(self, file: int) -> str | None:
        path = self.files[file]
        return os.path.dirname(path) if self.is_persistent and not is_remote(path) else None


def create_change_error(path: str, row: int = -1) -> DataError:
    """Return the error for a file that was changed."""
    return DataError(
        f"{path} has changed its size or content since the dataset was created. Don't write to the"
        " files of a run.",
        path,
        row,
    )


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
