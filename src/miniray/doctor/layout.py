"""Where everything lies in a rank's box. The writer (``box``) and the reader share this file.

A box has a fixed size and five kinds of content, each safe against a crash between any two bytes
and against being read in the middle of a write:

- *cells*: single numbers of 8 bytes at addresses divisible by 8. The processor writes one whole.
  What belongs together and must not be mixed is packed into one cell (phase and its time, say).
- *rings* of records (events), and slots (steps, see ``history``). A record begins and ends with a
  number; while it is written the two differ and a reader skips it. A reader copies from the front
  to the back, so the number in front is written last, when everything after it is complete.
- *texts*: an append-only table; other places refer to a text by its index. The count is raised
  after the text is there.
- *blobs* (JSON) in two places that take turns, each with version and checksum. A half-written one
  fails its checksum and the other is still whole.
- *passes*: which samples were seen, see ``Pass``.

Two cells may be one update apart from each other, a record never is from itself.
"""

from __future__ import annotations

import enum
import struct

MAGIC = b"miniray\x00box\x00\x00\x00\x00\x05"  # its last byte is the version of the layout
HEADER_SIZE = 64


class Cell(enum.IntEnum):
    """Cells of signed integers. Times are ``time.monotonic_ns``."""

    # Events are numbered from 1 here, 0 is none. Each is in one of the two, and a call that blocks
    # is over when its record says so: an event costs no more stores than it must.
    EVENTS = 0  # the last event that is no blocking call
    OPEN = 1  # the last blocking call
    PHASE = 2  # a moment and the text "name\0file\0line\0function"; see MOMENT
    SECTION = 3  # likewise; 0 for none
    STEP = 4
    EPOCH = 5
    BATCH_SIZE = 6
    BATCHES = 7
    BATCHES_IN_EPOCH = 8
    BACKWARDS = 9
    SAMPLES = 10
    LOSS_STEP = 11
    NONFINITE = 12
    TEXTS = 13
    TEXT_BYTES = 14
    PASSES = 15  # passes ever begun
    RSS = 16
    PEAK_RSS = 17
    HEARTBEAT = 18
    BARRIER = 19  # number << 16 | text "name\0file\0line\0function"
    BARRIER_SINCE = 20
    BARRIER_PASSED = 21  # number of the last one passed
    BARRIER_FAILED = 22  # number of the last one given up
    GPU_MEMORY = 23
    GPU_PROCESS_MEMORY = 24
    GPU_UTILISATION = 25
    EXITED = 26
    STEPS = 27  # steps in the history, of this attempt
    ATTEMPT = 28  # number of this attempt in the history


class Real(enum.IntEnum):
    """Cells of floats, after those of integers."""

    LOSS = 64
    CLOCK = 65  # wall time minus monotonic time, renewed with each heartbeat
    CPU_SECONDS = 66
    GPU_POWER = 67
    TOTAL_SECONDS = 68
    TOTAL_DATA = 69
    TOTAL_BACKWARD = 70
    TOTAL_COLLECTIVE = 71
    BARRIER_LIMIT = 72
    ATTACHED = 73  # wall time


CELLS_AT = HEADER_SIZE
CELLS = 128

#: begin, at, ended (0: it is open), sequence, step, what (see WHAT), end; times as in cells
EVENT = struct.Struct("<Qqqqq64sQ")
#: kind, name, op, group, dtype, site, flags, number of dimensions, sizes: what is the same whenever
#: one line calls the same thing, so that it is packed once
WHAT = struct.Struct("<8H6q")
WORDS_OF_WHAT = struct.Struct("<8q")
EVENT_WORDS = EVENT.size // 8
EVENT_ENDED = 2  # the word of a record that has the time of its end
EVENT_DIMENSIONS = 6  # of more, the last one holds the product of the rest
EVENTS_AT = CELLS_AT + CELLS * 8
FIRST_EVENT = CELLS  # in words of 8 bytes, counted from the cells
EVENT_SLOTS = 512  # record number n of a ring of m is in slot n % m
BLOCKING, FUNCTIONAL = 1, 2  # flags of an event

#: begin, step, count, epoch, ended, all, data, backward, collective (times in nanoseconds), loss,
#: batch size, attempt, end
STEP = struct.Struct("<QqqqqqqqqdqqQ")
NO_LOSS = -1.7976931348623157e308  # no loss was seen in this step; a real one may well be NaN
HISTORY_SLOTS = 1024
STEPS_AT = EVENTS_AT + EVENT_SLOTS * EVENT.size


class Pass(enum.IntEnum):
    """Cells at the head of a pass. The ids follow in order, then the key once more."""

    KEY = 0  # number of the pass + 1; the two differ while the pass is being set up
    LOADER = 1
    EPOCH = 2
    COUNT = 3
    IDS = 4


PASS_SLOTS = 6
PASS_IDS = 4096
PASS_HEAD = len(Pass) * 8
PASS_SIZE = PASS_HEAD + PASS_IDS * 8 + 8
PASSES_AT = STEPS_AT + HISTORY_SLOTS * STEP.size

#: version, length, checksum; then the bytes
BLOB_HEAD = struct.Struct("<QII")
INFO_AT = PASSES_AT + PASS_SLOTS * PASS_SIZE
INFO_SIZE = 32768  # of each of the two places
EXIT_AT = INFO_AT + 2 * INFO_SIZE
EXIT_SIZE = 8192

#: offset in the heap, length
TEXT = struct.Struct("<II")
TEXT_SLOTS = 4096
TEXTS_AT = EXIT_AT + 2 * EXIT_SIZE
HEAP_AT = TEXTS_AT + TEXT_SLOTS * TEXT.size
HEAP_SIZE = 160 * 1024
BOX_SIZE = HEAP_AT + HEAP_SIZE

#: Texts that every box begins with: nothing, and what stands for texts that found no room.
NO_TEXT, FULL_TEXT = 0, 1
FIRST_TEXTS = ("", "(no room)")


#: Phase in which a filter runs or a cache is built.
PREPARING = "preparing data"

#: A time (to 65 microseconds) and a text's index as one cell: ``monotonic_ns() & MOMENT | text``.
MOMENT = 0x7FFF_FFFF_FFFF_0000


def unpack_moment(cell: int) -> tuple[float, int]:
    """(seconds of the monotonic clock, index of the text)"""
    return (cell & MOMENT) / 1e9, cell & 0xFFFF
