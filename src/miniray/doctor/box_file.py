"""A rank's box, mapped for reading while it is written or years after.

Nothing is asked of the rank. What was being written at that moment, or when the rank was killed, is
recognised and passed over, never taken for something else.
"""

from __future__ import annotations

import json
import mmap
import os
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miniray.doctor import layout
from miniray.doctor.layout import Cell, Real
from miniray.errors import BoxError

if TYPE_CHECKING:
    from typing_extensions import Self


class BoxFile:
    """One box, mapped for reading: its cells, texts, JSON and rings. ``close`` it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            with open(self.path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size != layout.BOX_SIZE:
                    raise BoxError(f"{self.path} is no box of this version: it has {size} bytes")
                self._memory = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ)
        except OSError as error:
            raise BoxError(f"{self.path} cannot be read: {error}") from error
        if self._memory[: len(layout.MAGIC)] != layout.MAGIC:
            self._memory.close()
            raise BoxError(f"{self.path} is no box, or one of another version")
        self.view = memoryview(self._memory)
        cells = self.view[layout.CELLS_AT : layout.CELLS_AT + layout.CELLS * 8]
        self.ints = cells.cast("q")
        self.floats = cells.cast("d")
        self._words = self.view[: layout.BOX_SIZE // 8 * 8].cast("Q")
        self._texts: list[str] = []

    def close(self) -> None:
        for view in (self.ints, self.floats, self._words, self.view):
            view.release()
        self._memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    # -- parts ------------------------------------------------------------------------------------

    def text(self, index: int) -> str:
        while len(self._texts) <= index:
            number = len(self._texts)
            if number >= min(self.ints[Cell.TEXTS], layout.TEXT_SLOTS):
                return "?"
            at = layout.TEXTS_AT + number * layout.TEXT.size
            offset, length = layout.TEXT.unpack_from(self._memory, at)
            start = layout.HEAP_AT + offset
            self._texts.append(bytes(self.view[start : start + length]).decode(errors="replace"))
        return self._texts[index]

    def info(self) -> dict[str, Any]:
        """The box's JSON: what changes seldom."""
        return self.blob(layout.INFO_AT, layout.INFO_SIZE)

    def wall(self, monotonic: float) -> float:
        return monotonic + self.floats[Real.CLOCK]

    @property
    def waits(self) -> bool:
        """Whether the rank is in a call that blocks."""
        number = self.ints[Cell.OPEN]
        if not number:
            return False
        slot = number % layout.EVENT_SLOTS
        word = (layout.EVENTS_AT + slot * layout.EVENT.size) >> 3
        return self._words[word] == number and not self._words[word + layout.EVENT_ENDED]

    def blob(self, at: int, size: int) -> dict[str, Any]:
        found: dict[int, bytes] = {}
        for start in (at, at + size):
            version, length, checksum = layout.BLOB_HEAD.unpack_from(self._memory, start)
            body = start + layout.BLOB_HEAD.size
            if version and length <= size - layout.BLOB_HEAD.size:
                data = bytes(self.view[body : body + length])
                if zlib.crc32(data, version) == checksum:
                    found[version] = data
        return dict(json.loads(found[max(found)])) if found else {}

    def ring(self, at: int, size: int, slots: int) -> list[bytes]:
        """Whole records of a ring in the order they were written."""
        found: dict[int, bytes] = {}
        for slot in range(slots):
            start = at + slot * size
            number = self._words[start >> 3]
            if not number or number % slots != slot:
                continue
            data = bytes(self.view[start : start + size])
            end = int.from_bytes(data[-8:], "little")
            begin = int.from_bytes(data[:8], "little")
            if begin == end == number == self._words[start >> 3]:
                found[number] = data
        return [found[number] for number in sorted(found)]
