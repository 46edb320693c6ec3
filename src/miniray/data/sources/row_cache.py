"""Copies of rows in Arrow files on local disk, mapped by all processes of a machine.

A copy gives random access to rows of files, which ``shuffle="global"`` requires. The first process
builds it while the others wait, and the kernel releases the lock of a builder that is killed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import pyarrow as pa

from miniray.data.locations import Blocks, cumulate
from miniray.data.observers import cache_hooks, preparing, report_preparation
from miniray.data.sources.base import BLOCK_BYTES, Source, parse_bytes
from miniray.data.sources.footers import get_cache_folder
from miniray.data.sources.schemas import decode_dictionaries
from miniray.errors import DataError
from miniray.files import lock_file

_VERSION = 1
_ROWS_KEY = b"miniray.rows"
_WAIT_LOG_S = 5.0
_POLL_S = 0.02
_DECODE_ROWS = 256  # of dictionary columns, before their decoded size is known


class CacheFullError(DataError):
    """The row cache can't hold a copy of the data."""


class CacheEntry(NamedTuple):
    """A copy in the cache."""

    path: Path
    nbytes: int
    used: float  # time of the last use, in seconds since the epoch
    is_in_use: bool


class RowCache:
    """Arrow copies of rows in a directory, at most ``max_bytes`` of them.

    Args:
        directory: Defaults to ``rows`` under ``MINIRAY_CACHE``, or else ``~/.cache/miniray``.
        max_bytes: The least recently used copies are deleted to stay below this size.
    """

    def __init__(
        self, directory: str | os.PathLike[str] | None = None, max_bytes: int | str = "50GB"
    ) -> None:
        self.directory = get_cache_folder() / "rows" if directory is None else Path(directory)
        self.max_bytes = parse_bytes(max_bytes, "max_bytes")

    def open(self, source: Source) -> CachedSource:
        """Return a mapped copy of ``source``. Build the copy first if it doesn't exist."""
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / f"{compute_key(source)}.arrow"
        for is_last in (False, True):
            with preparing():
                lock = self._lock_entry(path, source)
            try:
                os.utime(path)
                cached = CachedSource(source, path, lock)
                break
            except (OSError, pa.ArrowException, ValueError) as error:
                lock.close()
                if is_last:
                    raise DataError(
                        f"{path} in the row cache is damaged: {error}. End the processes that use"
                        " it and delete the file.",
                        str(path),
                    ) from error
                _delete_unused(path)
        for hook in cache_hooks:
            hook(str(path.absolute()), path.stat().st_size)
        return cached

    def list_entries(self) -> list[CacheEntry]:
        """Return the copies, least recently used first."""
        entries = []
        for path in self.directory.glob("*.arrow"):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                with _try_lock(path) as is_free:
                    entries.append(CacheEntry(path, status.st_size, status.st_mtime, not is_free))
        return sorted(entries, key=lambda entry: entry.used)

    def clear(self) -> list[CacheEntry]:
        """Delete the copies that no process uses and return them."""
        return [entry for entry in self.list_entries() if _delete_unused(entry.path)]

    # -- building --------------------------------------------------------------------------------

    def _lock_entry(self, path: Path, source: Source) -> IO[str]:
        """Return the shared lock of an entry that exists, built if necessary."""
        lock = open(path.with_suffix(".lock"), "a+")
        try:
            while True:
                _wait_for_lock(lock, fcntl.LOCK_SH)
                if path.exists():
                    return lock
                _wait_for_lock(lock, fcntl.LOCK_EX)  # not atomic: another process may have built it
                if not path.exists():
                    lock.truncate(0)
                    lock.write(f"{os.getpid()}")
                    lock.flush()
                    self._build(source, path)
                # Downgrading to a shared lock isn't atomic either, so check again.
        except BaseException:
            lock.close()
            raise

    def _build(self, source: Source, path: Path) -> None:
        for leftover in self.directory.glob(f"{path.stem}.*.tmp"):
            leftover.unlink(missing_ok=True)  # of a builder that was killed
        blocks = source.list_blocks()
        needed = int(blocks.nbytes.sum() * 1.02) + (1 << 16)
        name = f"{Path(source.files[0]).name}{', ...' if len(source.files) > 1 else ''}"
        temporary = path.with_name(f"{path.stem}.{os.getpid()}.tmp")
        _print(f"Copying {blocks.total_rows:,} rows of {name} to {self.directory}")
        try:
            with open(temporary, "wb") as file:
                self._reserve(file, needed, needed, name)
                self._write(source, file, needed, name)
            os.chmod(temporary, 0o444)
            os.replace(temporary, path)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            free = shutil.disk_usage(self.directory).free
            raise self._create_full_error(name, needed, free) from error
        finally:
            temporary.unlink(missing_ok=True)

    def _reserve(self, file: IO[bytes], size: int, needed: int, name: str) -> None:
        """Extend a temporary file to ``size``, which other builders count, if ``needed`` fits.

        Least recently used copies are deleted to make room.
        """
        with lock_file(self.directory / "directory.lock"):
            free = shutil.disk_usage(self.directory).free
            used = 0
            for path in [*self.directory.glob("*.arrow"), *self.directory.glob("*.tmp")]:
                with contextlib.suppress(FileNotFoundError):
                    status = path.stat()
                    used += status.st_size
                    if path.suffix == ".tmp":  # reserved, but not yet written
                        free -= max(0, status.st_size - 512 * status.st_blocks)
            available = min(free, self.max_bytes - used)
            for entry in self.list_entries():
                if available < needed and _delete_unused(entry.path):
                    available += entry.nbytes
            if available < needed:
                raise self._create_full_error(name, needed, available)
            os.truncate(file.fileno(), size)

    def _create_full_error(self, name: str, needed: int, available: int) -> CacheFullError:
        return CacheFullError(
            f"{name} needs {-(-needed // 10**6)} MB in {self.directory}, but only"
            f" {max(0, available) // 10**6} MB are available. Pass cache_dir= on a larger disk, or"
            " use shuffle='window'."
        )

    def _write(self, source: Source, file: IO[bytes], limit: int, name: str) -> None:
        """Write all rows. ``limit`` is the reserved space, which is an estimate."""
        rows = source.list_blocks().total_rows
        metadata = {_ROWS_KEY: str(rows).encode()}
        writer: Any = None
        for batch in _iter_batches(source):
            writer = writer or pa.ipc.new_file(file, batch.schema.with_metadata(metadata))
            writer.write_batch(batch)
            report_preparation()
            if file.tell() > limit:
                more = limit // 8 + BLOCK_BYTES
                limit = file.tell() + more
                self._reserve(file, limit, more, name)
        writer = writer or pa.ipc.new_file(file, pa.schema([], metadata))
        writer.close()
        file.flush()
        file.truncate(file.tell())
        os.fsync(file.fileno())


class CachedSource(Source):
    """A mapped copy of a source in the row cache, with the rows in the same order.

    Holds the shared lock while the file is mapped.
    """

    random_access = True

    def __init__(self, source: Source, path: Path, lock: IO[str]) -> None:
        self.kind, self.files, self._source, self._lock = source.kind, source.files, source, lock
        with pa.memory_map(str(path)) as file:
            reader = pa.ipc.open_file(file)
            self._batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
            for batch in self._batches:
                batch.validate()
            metadata = reader.schema.metadata or {}
        sizes = [batch.num_rows for batch in self._batches]
        expected = source.list_blocks().total_rows
        if metadata.get(_ROWS_KEY) != str(sum(sizes)).encode() or sum(sizes) != expected:
            raise ValueError(f"it has {sum(sizes)} of {expected} rows")
        zeros = [0] * len(sizes)
        self._blocks = Blocks(zeros, range(len(sizes)), cumulate(sizes)[:-1], sizes, zeros)

    def list_blocks(self) -> Blocks:
        return self._blocks

    def list_columns(self) -> list[str] | None:
        return self._source.list_columns()

    def compute_fingerprint(self) -> str:
        return self._source.compute_fingerprint()

    def read_block(self, block: int, columns: Sequence[str] | None = None) -> Any:
        batch = self._batches[block]
        return batch if columns is None else batch.select(list(columns))

    def read_rows(self, block: int, row: int, count: int) -> Any:
        """Return some rows of a block as the original source returns them."""
        batch = self._batches[block].slice(row, count)
        return self._source.decode_rows(batch, int(self._blocks.edges[block]) + row)


def compute_key(source: Source) -> str:
    """Return the key of a copy: what its content depends on."""
    parts = [
        str(_VERSION),
        source.kind,
        source.compute_fingerprint(),
        repr(source.list_columns()),
    ]
    return hashlib.blake2b("\x1f".join(parts).encode(), digest_size=12).hexdigest()


def _iter_batches(source: Source) -> Iterator[Any]:
    """Yield all rows in record batches of about 8 MB; rows of small blocks are combined."""
    parts: list[Any] = []
    for block in range(len(source.list_blocks())):
        for batch in _decode_in_steps(source.encode_block(block)):
            parts.append(batch)
            if sum(part.nbytes for part in parts) >= BLOCK_BYTES:
                yield pa.concat_batches(parts)
                parts = []
        pa.default_memory_pool().release_unused()
    if parts:
        yield pa.concat_batches(parts)


def _decode_in_steps(batch: Any) -> Iterator[Any]:
    """Yield the rows of a block without dictionaries, which an IPC file can't replace."""
    is_decoded = not any(pa.types.is_dictionary(kind) for kind in batch.schema.types)
    start, step = 0, batch.num_rows if is_decoded else _DECODE_ROWS
    while start < batch.num_rows:
        part = decode_dictionaries(batch.slice(start, step))
        yield part
        start += step
        step = max(1, BLOCK_BYTES * part.num_rows // max(1, part.nbytes))


# -- locks -----------------------------------------------------------------------------------------


def _wait_for_lock(lock: IO[str], operation: int) -> None:
    """Wait for a lock while its holder builds the copy. Log the holder after 5 s."""
    path = Path(lock.name)
    begin, seen = time.monotonic(), -1
    is_logged = False
    while True:
        try:
            return fcntl.flock(lock, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        written = 0
        for temporary in path.parent.glob(f"{path.stem}.*.tmp"):
            with contextlib.suppress(FileNotFoundError):
                written += temporary.stat().st_blocks
        if written != seen:
            report_preparation()
            seen = written
        if not is_logged and time.monotonic() - begin > _WAIT_LOG_S:
            pid = path.read_text() or "unknown"
            _print(f"Waiting for process {pid}, which builds {path.with_suffix('.arrow')}")
            is_logged = True
        time.sleep(_POLL_S)


@contextlib.contextmanager
def _try_lock(path: Path) -> Iterator[bool]:
    """Yield whether no process uses a copy. It is locked in the meantime."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(lock_file(path.with_suffix(".lock"), wait=False))
        except BlockingIOError:
            yield False
        else:
            yield True


def _delete_unused(path: Path) -> bool:
    """Delete a copy unless a process uses it. Return whether it was deleted."""
    with _try_lock(path) as is_free:
        if is_free:
            path.unlink(missing_ok=True)
    return is_free


def _print(text: str) -> None:
    if sys.stderr is not None:
        print(f"row cache: {text}", file=sys.stderr, flush=True)
