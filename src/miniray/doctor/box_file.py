"""Read parts of a rank's record while the rank writes it, or years later.

The file is read, never mapped: a mapped file that is truncated kills its reader with SIGBUS. A part
that was being written, or whose writer was killed, is recognized and skipped. An index, length or
number that can't be right raises ``BoxError``.
"""

from __future__ import annotations

import math
import os
import zlib
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miniray.doctor import layout, processes
from miniray.doctor.layout import Cell, Real
from miniray.doctor.model import Process
from miniray.errors import BoxError
from miniray.runs import files
from miniray.runs.typed import convert

if TYPE_CHECKING:
    from typing_extensions import Self

_MAX_REAL = 1e15


class BoxParts(ABC):
    """Cells, texts, JSON and rings of one record."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._texts: dict[int, str] = {}

    @abstractmethod
    def read(self, at: int, size: int) -> bytes:
        """Return ``size`` bytes of the record. Raise ``BoxError`` if it doesn't have them."""

    @property
    def ints(self) -> memoryview[int]:
        """The integer cells, all read at the same time."""
        return memoryview(self.read(layout.CELLS_AT, layout.CELLS * 8)).cast("q")

    def real(self, cell: Real) -> float:
        """Return a cell that must be a finite number."""
        data = self.read(layout.CELLS_AT + cell * 8, 8)
        value = memoryview(data).cast("d")[0]
        if not math.isfinite(value) or abs(value) > _MAX_REAL:
            raise BoxError(f"{self.path} is damaged: {cell.name} is {value}")
        return value

    @property
    def loss(self) -> float:
        """The last loss, which may be NaN or infinite."""
        return memoryview(self.read(layout.CELLS_AT + Real.LOSS * 8, 8)).cast("d")[0]

    def text(self, index: int) -> str:
        """Return a text of the table; "?" if it has none at this index."""
        if index not in self._texts:
            if not 0 <= index < min(self.ints[Cell.TEXTS], layout.TEXT_SLOTS):
                return "?"
            at = layout.TEXTS_AT + index * layout.TEXT.size
            offset, length = layout.TEXT.unpack(self.read(at, layout.TEXT.size))
            if offset + length > layout.HEAP_SIZE:
                raise BoxError(f"{self.path} is damaged: text {index} is outside of its table")
            data = self.read(layout.HEAP_AT + offset, length)
            self._texts[index] = data.decode(errors="replace")
        return self._texts[index]

    def info(self) -> dict[str, Any]:
        """Return the record's JSON, which rarely changes."""
        return self.blob(layout.INFO_AT, layout.INFO_SIZE)

    def wall(self, monotonic: float) -> float:
        """Convert the rank's monotonic time to Unix time."""
        return monotonic + self.real(Real.CLOCK)

    def process(self) -> Process:
        """Look at the rank's process. Raise ``BoxError`` if the record doesn't identify it."""
        info = self.info()
        try:
            pid = convert(info.get("pid", 0), int, "pid")
            host = convert(info.get("host", ""), str, "host")
            started = convert(info.get("started"), int | None, "started")
        except ValueError as error:
            raise BoxError(f"{self.path} is damaged: {error}") from error
        return processes.look(pid, host, started)

    @property
    def waits(self) -> bool:
        """Whether the rank is in a call that blocks."""
        number = self.ints[Cell.OPEN]
        if number <= 0:
            return False
        at = layout.EVENTS_AT + number % layout.EVENT_SLOTS * layout.EVENT.size
        words = memoryview(self.read(at, layout.EVENT.size)).cast("Q")
        return words[0] == number and not words[layout.EVENT_ENDED]

    def blob(self, at: int, size: int) -> dict[str, Any]:
        """Return the newest intact version of a JSON object; {} if there is none."""
        found: dict[int, bytes] = {}
        data = self.read(at, 2 * size)
        for start in (0, size):
            version, length, checksum = layout.BLOB_HEAD.unpack_from(data, start)
            body = start + layout.BLOB_HEAD.size
            if version and length <= size - layout.BLOB_HEAD.size:
                text = data[body : body + length]
                if zlib.crc32(text, version & 0xFFFF_FFFF) == checksum:
                    found[version] = text
        if not found:
            return {}
        try:
            value = files.parse_json(found[max(found)])
        except ValueError as error:
            raise BoxError(f"{self.path} is damaged: {error}") from error
        if not isinstance(value, dict):
            raise BoxError(f"{self.path} is damaged: it doesn't contain a JSON object")
        return value

    def ring(self, at: int, size: int, slots: int) -> list[bytes]:
        """Return the intact entries of a ring, in the order in which they were written."""
        data = self.read(at, size * slots)
        found: dict[int, bytes] = {}
        for start in range(0, size * slots, size):
            entry = data[start : start + size]
            number = int.from_bytes(entry[:8], "little")
            if number and number % slots == start // size and entry[:8] == entry[-8:]:
                found[number] = entry
        return [found[number] for number in sorted(found)]


class BoxFile(BoxParts):
    """A record that is read part by part, each as it is at that moment. Call ``close``."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(Path(path))
        try:
            self._file = files.open_file(self.path)
        except OSError as error:
            raise BoxError(f"{self.path} cannot be read: {error}") from error
        try:
            size = os.fstat(self._file.fileno()).st_size
            if size != layout.BOX_SIZE:
                raise BoxError(f"{self.path} isn't a record of this version: it has {size} bytes")
            if self.read(0, len(layout.MAGIC)) != layout.MAGIC:
                raise BoxError(f"{self.path} isn't a record, or was written by a different version")
        except BaseException:
            self.close()
            raise

    def read(self, at: int, size: int) -> bytes:
        try:
            data = os.pread(self._file.fileno(), size, at)
        except OSError as error:
            raise BoxError(f"{self.path} cannot be read: {error}") from error
        if len(data) != size:
            raise BoxError(f"{self.path} was truncated while it was read")
        return data

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()
