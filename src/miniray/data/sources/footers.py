"""Metadata of files, cached for datasets of many files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from miniray.files import replace_atomically

_VERSION = 1
_THREADS = 16
_RACY_NS = 1_000_000_000
#: Number of files from which on the cache is used. Few footers are read as quickly as the cache.
_MIN_FILES = 16


class FileMetadata(NamedTuple):
    """Metadata of a file: rows and decoded bytes of each run, and what identifies its content.

    ``mark`` is the same for a copy of the file. ``schema`` is the serialized Arrow schema as
    hexadecimal digits, empty for formats without one. ``dictionaries`` are columns to be read as
    Arrow dictionaries. While the file has ``stamp``, it hasn't changed; None if that isn't certain.
    """

    rows: Sequence[int]
    nbytes: Sequence[int]
    mark: str = ""
    schema: str = ""
    dictionaries: Sequence[str] = ()
    stamp: Sequence[int] | None = None


class MetadataIndex:
    """Metadata of many files in one JSON file, validated by ``stat`` of each file.

    If several processes write the index, the last one wins. An entry is never wrong: it is only
    used if the size, inode and times of its file are the same.
    """

    def __init__(self, directory: Path | None = None, min_files: int = _MIN_FILES) -> None:
        self._directory = get_cache_folder() / "metadata" if directory is None else directory
        self._min_files = min_files

    def load(
        self, paths: Sequence[str], key: Any, read_metadata: Callable[[str], FileMetadata]
    ) -> list[FileMetadata]:
        """Return the metadata of ``paths``, read by ``read_metadata`` if it isn't cached.

        ``key`` identifies what else the metadata depends on: the format and the columns.
        """
        stamps = {path: stamp_file(path) for path in paths}
        is_used = len(paths) >= self._min_files and None not in stamps.values()
        text = json.dumps([_VERSION, key, list(paths)])
        name = hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
        index = self._directory / f"{name}.json"
        entries = _read_index(index) if is_used else {}
        found = {path: entry for path, entry in entries.items() if entry.stamp == stamps.get(path)}
        missing = [path for path in paths if path not in found]
        if missing:
            # A file that changes while it is read, or could change again within the resolution of
            # its times, gets no entry.
            latest = time.time_ns() - _RACY_NS
            for path, metadata in zip(missing, _read_all(missing, read_metadata), strict=True):
                stamp = stamps[path]
                if stamp is not None and (max(stamp[2:]) >= latest or stamp != stamp_file(path)):
                    stamp = None
                found[path] = metadata._replace(stamp=stamp)
            settled = {path: found[path] for path in paths if found[path].stamp is not None}
            if is_used and settled:
                _write_index(index, settled)
        return [found[path] for path in paths]


def get_cache_folder() -> Path:
    """Return the directory for caches of all kinds."""
    given = os.environ.get("MINIRAY_CACHE")
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "miniray"


def stamp_file(path: str) -> list[int] | None:
    """Return size, inode and times of a local file, any of which a write changes."""
    try:
        status = os.stat(path)
    except OSError:
        return None  # remote, or reading the file raises the error
    return [status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns]


def _read_all(
    paths: Sequence[str], read_metadata: Callable[[str], FileMetadata]
) -> list[FileMetadata]:
    if len(paths) == 1:
        return [read_metadata(paths[0])]
    with ThreadPoolExecutor(min(_THREADS, len(paths))) as pool:
        return list(pool.map(read_metadata, paths))


def _read_index(path: Path) -> dict[str, FileMetadata]:
    try:
        content = json.loads(path.read_bytes())
        schemas = content["schemas"]
        return {
            name: FileMetadata(rows, nbytes, mark, schemas[schema], dictionaries, stamp)
            for name, (stamp, rows, nbytes, mark, schema, dictionaries) in content["files"].items()
        }
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}  # missing, or damaged: it is written again


def _write_index(path: Path, metadata: Mapping[str, FileMetadata]) -> None:
    schemas = list(dict.fromkeys(file.schema for file in metadata.values()))
    numbers = {schema: number for number, schema in enumerate(schemas)}
    files = {
        name: [file.stamp, file.rows, file.nbytes, file.mark, numbers[file.schema],
               file.dictionaries]
        for name, file in metadata.items()
    }  # fmt: skip
    with contextlib.suppress(OSError):  # without a cache, the metadata is read at every start
        path.parent.mkdir(parents=True, exist_ok=True)
        content = json.dumps({"schemas": schemas, "files": files})
        replace_atomically(path, content.encode(), sync=False)
