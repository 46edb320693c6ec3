"""Answers of filters on disk: a bit a row, whole and checked, or not there at all.

A file is written beside its place, flushed and renamed, and ends with a checksum: whatever happens
while it is written, a reader finds the one before, or none.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import secrets
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from miniray.errors import DataError

Bits = npt.NDArray[np.uint8]

_MAGIC = b"miniray-filter-1\n"
_FOLDER, _CACHED = ".miniray", "filters"


def cache_folder() -> Path:
    """Where indexes go that cannot lie beside the data."""
    given = os.environ.get("MINIRAY_CACHE")
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "miniray"


def known_folders(beside: str | None) -> list[Path]:
    """Where an index of data in the folder ``beside`` may be."""
    here = [] if beside is None else [Path(beside) / _FOLDER]
    return [*here, cache_folder() / _CACHED]


def index_folder(beside: str | None) -> Path:
    """The folder to write indexes of data in the folder ``beside`` to; made if need be.

    Falls back to the cache, and says so, where that is not writable.
    """
    reason: OSError | None = None
    if beside is not None:
        folder = Path(beside) / _FOLDER
        try:
            folder.mkdir(exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return folder
        except OSError as error:
            if error.errno not in _NOT_WRITABLE:
                raise _failed(folder, error) from error
            reason = error
    folder = cache_folder() / _CACHED
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _failed(folder, error) from error
    if reason is not None:
        warnings.warn(
            f"the filter's answers are kept in {folder}: {beside} is not writable"
            f" ({reason.strerror})",
            RuntimeWarning,
            stacklevel=2,
        )
    return folder


def _failed(path: Path, error: OSError) -> DataError:
    return DataError(
        f"the filter's index could not be written to {path}: {error.strerror}. Nothing torn is"
        " left; make room and start again (what is finished is kept), or set MINIRAY_CACHE to"
        " another folder"
    )


def write(
    path: Path, entries: Mapping[str, tuple[str, int, Bits]], *, durable: bool = True
) -> None:
    """Write (identity, rows, packed bits) by name. Raises ``DataError``, leaving what was there.

    ``durable``: it is there after a power cut too; without, it may then be torn, and is not read.
    """
    header = json.dumps([[k, i, r, len(bits)] for k, (i, r, bits) in entries.items()]).encode()
    body = b"".join(bits.tobytes() for _, _, bits in entries.values())
    data = _MAGIC + len(header).to_bytes(8, "little") + header + body
    data += hashlib.blake2b(data, digest_size=16).digest()
    temporary = path.with_name(f"{_unfinished(path)}{secrets.token_hex(8)}")
    try:
        # Not tempfile's, which no other user of the data could read.
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise _failed(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)  # where it did not come to its place


def _unfinished(path: Path) -> str:
    return f".{path.name}-"


def remove_unfinished(path: Path) -> None:
    """Remove what killed writers of ``path`` left; for the one who holds its lock."""
    for left in path.parent.glob(f"{_unfinished(path)}*"):
        left.unlink(missing_ok=True)


def read(path: Path) -> dict[str, tuple[str, int, Bits]]:
    """What was written; empty where there is nothing or not all of it."""
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
    """Whether this is the one that holds the lock of ``path`` now.

    The lock ends with its holder, however that ends. A file system without locks gives it to
    everybody: work is then done more than once, and comes out the same.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ENOENT:  # the folder of finished parts has been removed
            yield False
            return
        raise _failed(path, error) from error
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


_NOT_WRITABLE = {
    errno.EPERM,
    errno.ENOENT,
    errno.EACCES,
    errno.EEXIST,  # a file where the folder should be
    errno.ENOTDIR,
    errno.EROFS,
}
