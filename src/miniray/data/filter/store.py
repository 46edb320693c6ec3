"""Keep the answers of filters on disk, with one bit per row.

Files are written under a temporary name, flushed and renamed, and end with a checksum. If a write
is interrupted, readers find the previous file or none.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from miniray.data.sources.footers import get_cache_folder
from miniray.errors import DataError
from miniray.files import replace_atomically

Bits = npt.NDArray[np.uint8]

_MAGIC = b"miniray-filter-1\n"
_FOLDER, _CACHED = ".miniray", "filters"


def list_folders(beside: str | None) -> list[Path]:
    """Return the directories that can contain an index of data in the directory ``beside``."""
    here = [] if beside is None else [Path(beside) / _FOLDER]
    return [*here, get_cache_folder() / _CACHED]


def choose_folder(beside: str | None) -> Path:
    """Return the directory to which to write an index of data in the directory ``beside``.

    If that isn't writable, warn and return the cache directory.
    """
    reason: OSError | None = None
    if beside is not None:
        folder = Path(beside) / _FOLDER
        try:
            folder.mkdir(exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return folder
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise _create_write_error(folder, error) from error
            reason = error
    folder = get_cache_folder() / _CACHED
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _create_write_error(folder, error) from error
    if reason is not None:
        warnings.warn(
            f"the filter's answers are kept in {folder}: {beside} is not writable"
            f" ({reason.strerror})",
            RuntimeWarning,
            stacklevel=2,
        )
    return folder


def _create_write_error(path: Path, error: OSError) -> DataError:
    return DataError(
        f"the filter's index could not be written to {path}: {error.strerror}. Nothing torn is"
        " left; make room and start again (what is finished is kept), or set MINIRAY_CACHE to"
        " another folder"
    )


def write(
    path: Path, entries: Mapping[str, tuple[str, int, Bits]], *, durable: bool = True
) -> None:
    """Write (identity, rows, packed bits) by name. ``DataError`` leaves the previous file intact.

    Without ``durable``, the file can be lost in a power failure.
    """
    header = json.dumps([[k, i, r, len(bits)] for k, (i, r, bits) in entries.items()]).encode()
    body = b"".join(bits.tobytes() for _, _, bits in entries.values())
    data = _MAGIC + len(header).to_bytes(8, "little") + header + body
    data += hashlib.blake2b(data, digest_size=16).digest()
    try:
        replace_atomically(path, data, sync=durable)
    except OSError as error:
        raise _create_write_error(path, error) from error


def read(path: Path) -> dict[str, tuple[str, int, Bits]]:
    """Return the entries of a file, or none if it doesn't exist or is incomplete."""
    try:
        data = path.read_bytes()
    except OSError:
        return {}
    checksum, data = data[-16:], data[:-16]
    if not data.startswith(_MAGIC) or hashlib.blake2b(data, digest_size=16).digest() != checksum:
        return {}
    start = len(_MAGIC) + 8
    position = start + int.from_bytes(data[len(_MAGIC) : start], "little")
    found: dict[str, tuple[str, int, Bits]] = {}
    for name, identity, rows, size in json.loads(data[start:position]):
        bits = np.frombuffer(data, dtype=np.uint8, count=size, offset=position)
        found[name] = (identity, rows, bits)
        position += size
    return found


@contextlib.contextmanager
def claim(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """Yield whether this process holds the lock of ``path``, until it ends.

    On a file system without locks, all processes hold it. They do the same work and get the same
    result.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ENOENT:  # the directory of work items has been removed
            yield False
            return
        raise _create_write_error(path, error) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        except OSError:
            pass
        yield True
    finally:
        os.close(descriptor)
