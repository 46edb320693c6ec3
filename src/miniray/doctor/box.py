"""A rank's black box, the writing side: a memory-mapped file only this process writes to.

Nothing here makes a system call once the file is mapped, and updates take no lock. What was written
is in the file's pages when the call returns, whatever kills the process afterwards, and may be read
at any time by ``reader``. Any thread may write: an update is one store or one ``pack_into``, which
Python does not interrupt. A forked child must not write; ``recorder`` sees to that.
"""

from __future__ import annotations

import errno
import itertools
import json
import mmap
import os
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from miniray.doctor import layout
from miniray.doctor.layout import Cell, Real

# Looked up once: these are in the way of every event and every step.
_pack_event = layout.EVENT.pack_into
_EVENTS_AT, _EVENT_SLOTS, _EVENT_SIZE = layout.EVENTS_AT, layout.EVENT_SLOTS, layout.EVENT.size
_EVENT_WORDS, _CELLS_AT = layout.EVENT_WORDS, layout.CELLS_AT
_monotonic_ns = time.monotonic_ns

#: An event that was added: its number, from 1, and where it is.
Added = tuple[int, int]
#: A call that blocks or may, as one line makes it: what it is, as the two words of ``layout.WHAT``
#: that are texts and those that are sizes; what gives its sequence number; and the cell that has
#: the number of the last one (OPEN or EVENTS).
Call = tuple[int, int, tuple[int, ...], Callable[[], int], int]


class Box:
    """The box of one rank. ``Box.create`` makes the file; there is no way to reopen one.

    ``ints`` and ``floats`` are the cells: ``box.ints[Cell.STEP] = 7``. They go on behind them, so
    that who writes an event needs no other view: see ``begin``.
    """

    def __init__(self, path: Path, memory: mmap.mmap) -> None:
        self.path = path
        self.pid = os.getpid()
        self.mapped = memory
        self.memory = view = memoryview(memory)
        cells = view[layout.CELLS_AT : layout.BOX_SIZE // 8 * 8]
        self.ints = cells.cast("q")
        self.floats = cells.cast("d")
        self._texts: dict[str, int] = {}
        # Counting this way is one step for Python: two threads never get the same number.
        self.next_event = itertools.count(1).__next__
        self._text_lock = threading.Lock()  # for new texts only, which are few
        self._versions = {layout.INFO_AT: 0, layout.EXIT_AT: 0}

    @classmethod
    def create(cls, path: str | os.PathLike[str]) -> Box:
        """Make the box at ``path``, in one piece: a reader finds a whole one or none.

        Its pages are reserved, so a full disk is an ``OSError`` here and not a SIGBUS later.
        """
        path = Path(path)
        partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            _reserve(descriptor, layout.BOX_SIZE)
            box = cls(path, mmap.mmap(descriptor, layout.BOX_SIZE))
            for text in layout.FIRST_TEXTS:
                box.intern(text)
            box.floats[Real.CLOCK] = time.time() - time.monotonic()
            box.floats[Real.ATTACHED] = time.time()
            box.ints[Cell.EPOCH] = -1
            box.ints[Cell.HEARTBEAT] = time.monotonic_ns()
            box.floats[Real.LOSS] = float("nan")
            box.ints[Cell.LOSS_STEP] = -1
            box.memory[: len(layout.MAGIC)] = layout.MAGIC
            os.rename(partial, path)
        except BaseException:
            os.unlink(partial)
            raise
        finally:
            os.close(descriptor)
        return box

    # -- texts ------------------------------------------------------------------------------------

    def intern(self, text: str) -> int:
        """The index of ``text`` in the box. When the table is full: that of "(no room)"."""
        index = self._texts.get(text)
        if index is None:
            with self._text_lock:
                index = self._texts.get(text)
                return self._add_text(text) if index is None else index
        return index

    def _add_text(self, text: str) -> int:
        data = text.encode("utf-8", "replace")[:4096]
        index, used = self.ints[Cell.TEXTS], self.ints[Cell.TEXT_BYTES]
        if index >= layout.TEXT_SLOTS or used + len(data) > layout.HEAP_SIZE:
            return layout.FULL_TEXT
        start = layout.HEAP_AT + used
        self.memory[start : start + len(data)] = data
        layout.TEXT.pack_into(
            self.mapped, layout.TEXTS_AT + index * layout.TEXT.size, used, len(data)
        )
        self.ints[Cell.TEXT_BYTES] = used + len(data)
        self.ints[Cell.TEXTS] = index + 1  # only now does a reader see it
        self._texts[text] = index
        return index

    # -- events -----------------------------------------------------------------------------------

    def what(
        self,
        kind: str,
        name: str,
        op: str = "",
        group: str = "",
        dtype: str = "",
        site: str = "",
        sizes: tuple[int, ...] = (),
        blocking: bool = False,
        functional: bool = False,
    ) -> bytes:
        """The part of an event that is the same each time; to be kept and given to ``event``."""
        intern = self.intern
        if len(sizes) > layout.EVENT_DIMENSIONS:
            sizes = _squeezed(sizes)
        padding = (0,) * (layout.EVENT_DIMENSIONS - len(sizes))
        texts = intern(kind), intern(name), intern(op), intern(group), intern(dtype), intern(site)
        flags = layout.BLOCKING * blocking | layout.FUNCTIONAL * functional
        return layout.WHAT.pack(*texts, flags, len(sizes), *sizes, *padding)

    def event(
        self, what: bytes, sequence: int = -1, is_open: bool = False, blocking: bool = False
    ) -> Added:
        """Add an event; an open one has no end yet.

        A blocking open one is what the rank waits in, until ``end_event``.
        """
        count = self.next_event()
        at = _EVENTS_AT + count % _EVENT_SLOTS * _EVENT_SIZE
        now = _monotonic_ns()
        ints = self.ints
        # Plain numbers for cells here and below: Cell.STEP and the like would double the time.
        ended = 0 if is_open else now
        _pack_event(self.mapped, at, 0, now, ended, sequence, ints[4], what, count)
        ints[at - _CELLS_AT >> 3] = count  # last, see layout
        ints[1 if blocking and is_open else 0] = count
        return count, at

    def begin(self, call: Call, now: int) -> Added:
        """Add this call, open, at ``now``.

        Word by word: nothing that was not used a moment ago is needed for it, and where code runs
        cold that is half the time of ``pack_into``. The last store makes the record a whole one.
        """
        first, second, sizes, next_one, cell = call
        count = self.next_event()
        ints = self.ints
        at = layout.FIRST_EVENT + count % _EVENT_SLOTS * _EVENT_WORDS
        ints[at + 13] = count
        ints[at + 1] = now
        ints[at + 2] = 0
        ints[at + 3] = next_one()
        ints[at + 4] = ints[4]
        ints[at + 5] = first
        ints[at + 6] = second
        for index, size in enumerate(sizes, at + 7):
            ints[index] = size
        ints[at] = count
        ints[cell] = count
        return count, layout.CELLS_AT + at * 8

    def end_event(self, added: Added, now: int) -> None:
        """Say that the open event ended at ``now``. One that the ring has lost is passed over."""
        count, at = added
        word = at - layout.CELLS_AT >> 3
        if self.ints[word] == count:
            self.ints[word + 2] = now  # EVENT_ENDED

    def wait_for(self, added: Added) -> None:
        """The rank waits now for an open event that did not block when it was called."""
        ints = self.ints
        ints[0] = max(ints[0], ints[1])
        ints[1] = added[0]

    # -- blobs ------------------------------------------------------------------------------------

    def write_info(self, info: Mapping[str, Any]) -> None:
        """Replace the box's JSON. Entries that find no room are dropped, the last ones first."""
        self._write_blob(layout.INFO_AT, layout.INFO_SIZE, _fitting(info, layout.INFO_SIZE))

    def write_exit(self, exit_reason: Mapping[str, Any]) -> None:
        self._write_blob(layout.EXIT_AT, layout.EXIT_SIZE, _fitting(exit_reason, layout.EXIT_SIZE))
        self.ints[Cell.EXITED] = 1

    def _write_blob(self, at: int, size: int, data: bytes) -> None:
        self._versions[at] = version = self._versions[at] + 1
        start = at + version % 2 * size
        body = start + layout.BLOB_HEAD.size
        self.memory[body : body + len(data)] = data
        checksum = zlib.crc32(data, version)
        layout.BLOB_HEAD.pack_into(self.mapped, start, version, len(data), checksum)

    def close(self) -> None:
        """Unmap the file. It stays readable."""
        for view in (self.ints, self.floats, self.memory):
            view.release()
        try:
            self.mapped.close()
        except BufferError:  # a numpy view of samples is still held somewhere; it ends with it
            return


def _squeezed(sizes: tuple[int, ...]) -> tuple[int, ...]:
    rest = 1
    for size in sizes[layout.EVENT_DIMENSIONS - 1 :]:
        rest *= size
    return (*sizes[: layout.EVENT_DIMENSIONS - 1], rest)


def _fitting(value: Mapping[str, Any], size: int) -> bytes:
    room = size - layout.BLOB_HEAD.size
    kept = dict(value)
    dropped: list[str] = []
    while True:
        data = json.dumps(kept, separators=(",", ":"), default=str).encode()
        if len(data) <= room or not kept:
            return data
        kept.pop("dropped", None)
        dropped.append(kept.popitem()[0])
        kept = {"dropped": dropped, **kept}


def _reserve(descriptor: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(descriptor, 0, size)
            return
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # a file system that cannot
                raise
    os.ftruncate(descriptor, size)
