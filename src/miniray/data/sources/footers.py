"""Metadata of files, cached for datasets of many files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from miniray.data.filter.store import get_cache_folder

_VERSION = 1
_THREADS = 16
_RACY_NS = 1_000_000_000
#: Number of files from which on the cache is used. Few footers are read as quickly as the cache.
_MIN_FILES = 16


class FileMetadata(NamedTuple):
    """Metadata of a file: rows and decoded bytes of each run, and what identifies its content.

    ``mark`` is the same for a copy of the file. ``schema`` is the serialized Arrow schema as
    hexadecimal digits, empty for formats without one. ``dictionaries`` are columns to be read as
    Arrow dictionaries.
    """

    rows: Sequence[int]
    nbytes: Sequence[int]
    mark: str = ""
    schema: str = ""
    dictionaries: Sequence[str] = ()


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
        if len(paths) < self._min_files or any("://" in path for path in paths):
            return _read_all(paths, read_metadata)
        text = json.dumps([_VERSION, key, list(paths)])
        name = hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
        path = self._directory / f"{name}.json"
        entries, schemas = _read_index(path)
        stamps = {file: _stamp(file) for file in paths}
        found: dict[str, FileMetadata] = {}
        for file in paths:
            entry = entries.get(file)
            if entry is not None and stamps[file] is not None and entry[0] == stamps[file]:
                rows, nbytes, mark, schema, dictionaries = entry[1:]
                found[file] = FileMetadata(rows, nbytes, mark, schemas[schema], dictionaries)
        missing = [file for file in paths if file not in found]
        if missing:
            found.update(zip(missing, _read_all(missing, read_metadata), strict=True))
            # A file that changes while it is read, or could change again within the resolution of
            # its times, gets no entry.
            latest = time.time_ns() - _RACY_NS
            settled = {
                file: metadata
                for file, metadata in found.items()
                if (stamp := stamps[file]) is not None
                and stamp == _stamp(file)
                and max(stamp[2:]) < latest
            }
            if settled:
                _write_index(path, settled, stamps)
        return [found[file] for file in paths]


def _stamp(path: str) -> list[int] | None:
    """Return size, inode and times of a file. Any write changes them."""
    try:
        status = os.stat(path)
    except OSError:
        return None  # reading the file raises the error
    return [status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns]


def _read_all(
    paths: Sequence[str], read_metadata: Callable[[str], FileMetadata]
) -> list[FileMetadata]:
    if len(paths) == 1:
        return [read_metadata(paths[0])]
    with ThreadPoolExecutor(min(_THREADS, len(paths))) as pool:
        return list(pool.map(read_metadata, paths))


def _read_index(path: Path) -> tuple[dict[str, Any], list[str]]:
    try:
        content = json.loads(path.read_bytes())
        return content["files"], content["schemas"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}, []  # missing, or damaged: it is written again


def _write_index(
    path: Path, metadata: dict[str, FileMetadata], stamps: dict[str, list[int] | None]
) -> None:
    schemas = list(dict.fromkeys(file.schema for file in metadata.values()))
    numbers = {schema: number for number, schema in enumerate(schemas)}
    files = {
        name: [
            stamps[name],
            list(file.rows),
            list(file.nbytes),
            file.mark,
            numbers[file.schema],
            list(file.dictionaries),
        ]
        for name, file in metadata.items()
    }
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    with contextlib.suppress(OSError):  # without a cache, the metadata is read at every start
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_text(json.dumps({"schemas": schemas, "files": files}))
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
