"""Large values of parquet files taken from where they lie, one copy a value.

Where a column is neither compressed nor dictionary encoded, values are stored one after the other,
each behind its length. Once it is known where they begin, a row costs one copy out of the page
cache, and no row group has to be held to take rows from it in random order.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from miniray.errors import DataError


class Stamp(NamedTuple):
    """While this is the same, nobody has written to a file; where it is not, maybe nobody has."""

    size: int
    inode: int
    written: int
    changed: int


class ValueFile:
    """A local file of which pieces are read.

    Not through a map: pages that were touched there count as this process's memory, and one that is
    not there any more ends the process. Here that is a ``DataError``.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.handle = -1
        self.handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if self.handle >= 0:
            os.close(self.handle)

    def read(self, start: int, size: int) -> bytes:
        found = os.pread(self.handle, size, start)
        if len(found) != size:
            raise has_changed(self.path)
        return found

    def stamp(self) -> Stamp:
        found = os.fstat(self.handle)
        return Stamp(found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns)

    def will_need(self, start: int, size: int) -> None:
        """Let the system fetch this from the disk while we go on."""
        if hasattr(os, "posix_fadvise"):  # macOS has none
            os.posix_fadvise(self.handle, start, size, os.POSIX_FADV_WILLNEED)


def has_changed(where: str) -> DataError:
    return DataError(
        f"{where}: the file has changed its size or content since the dataset was made; files"
        " of a run must not be written to"
    )


class StoredValues:
    """The values of one column chunk: where each of them lies in the file."""

    def __init__(self, file: ValueFile, bounds: Sequence[tuple[int, int]]) -> None:
        self._file, self._handle = file, file.handle
        self._begins, self._sizes = array("q"), array("q")
        for start, stop in bounds:
            self._walk(start, stop)

    def _walk(self, start: int, stop: int) -> None:
        """Find the values between two places of the file."""
        begins, sizes, handle, read = self._begins, self._sizes, self._handle, os.pread
        while start < stop:
            size = int.from_bytes(read(handle, 4, start), "little")
            start += 4
            begins.append(start)
            sizes.append(size)
            start += size
        if start != stop:
            raise DataError(
                f"{self._file.path}: a value ends at byte {start}, after its page ({stop}); the"
                " file is damaged"
            )

    def __len__(self) -> int:
        return len(self._begins)

    @property
    def nbytes(self) -> int:
        return 16 * len(self)

    def __call__(self, i: int) -> bytes:
        size = self._sizes[i]
        found = os.pread(self._handle, size, self._begins[i])
        if len(found) != size:
            raise has_changed(self._file.path)
        return found
