"""Stacks of a rank's threads, made on request from outside and read from ``ranks/<r>.stack``.

faulthandler writes them in the signal's handler, so a rank stuck in C code, or that holds Python's
lock for ever, shows its stack too. The signal is a real-time one (SIGRTMIN + 7; SIGUSR2 where there
are none): programs, launchers and schedulers that use signals of their own do not use that. It is
never sent to a process that has no handler for it, for that would end the process.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO

from miniray.doctor import processes
from miniray.doctor.model import RankRecord, Site, ThreadStack
from miniray.doctor.reader import read_run
from miniray.doctor.sites import without_boot
from miniray.runs import files

#: Real-time signals are not used by anybody's launcher or scheduler, which SIGUSR1 and 2 are.
STACK_SIGNAL = int(signal.SIGRTMIN) + 7 if hasattr(signal, "SIGRTMIN") else int(signal.SIGUSR2)

_RECENT = 60.0  # seconds
_STACK_BYTES = 4 << 20  #: bytes of a stack file that are read
_nowhere: IO[bytes] | None = None

_THREAD = re.compile(
    r"(Current thread|Thread) (0x[0-9a-f]+)(?: \[(.*?)\])?.*\(most recent call first\):"
)
_FRAME = re.compile(r'  File "(.*)", line ([0-9]{1,9}|\?\?\?) in (.*)')


def stack_file(box: Path) -> Path:
    return box.with_suffix(".stack")


def listen(box: Path) -> IO[bytes]:
    """Answer requests from now on, into the file beside the box. Keep the file open."""
    file = open(stack_file(box), "ab", buffering=0)
    faulthandler.register(STACK_SIGNAL, file=file, all_threads=True, chain=False)
    return file


def stop_listening(file: IO[bytes]) -> None:
    """Answer into nothing: without a handler, a request sent a moment ago would end the process."""
    global _nowhere
    if _nowhere is None:
        _nowhere = open(os.devnull, "wb", buffering=0)
    faulthandler.register(STACK_SIGNAL, file=_nowhere, all_threads=True, chain=False)
    file.close()


def request_stacks(
    run_dir: str | os.PathLike[str], ranks: Iterable[int] | None = None, timeout: float = 3.0
) -> dict[int, tuple[ThreadStack, ...]]:
    """Ask ranks of this machine (default: all) for their stacks, and give what came in time.

    A rank that is stopped, gone, on another machine or without a handler is left out. Whoever asks
    at the same time gets the same answers.
    """
    run = read_run(run_dir)
    wanted = run.ranks if ranks is None else {r: run.ranks[r] for r in ranks if r in run.ranks}
    return ask(wanted, timeout)


def ask(
    records: Mapping[int, RankRecord], timeout: float = 3.0
) -> dict[int, tuple[ThreadStack, ...]]:
    """``request_stacks`` for ranks that were already read."""
    before: dict[int, int] = {}
    found: dict[int, tuple[ThreadStack, ...]] = {}
    for rank, record in records.items():
        if record.copied:  # its launcher has asked it, and sent us the answer
            if time.time() - _changed(stack_file(record.path)) < _RECENT:
                found[rank] = read_stacks(record.path)
            continue
        process = processes.look(record.pid, record.host, None)
        able = record.process.alive and process.alive and not process.stopped
        if not able or not processes.catches(record.pid, STACK_SIGNAL):
            continue
        size = _size(stack_file(record.path))
        try:
            os.kill(record.pid, STACK_SIGNAL)
        except OSError:  # it ended just now, or is another user's
            continue
        before[rank] = size
    deadline = time.monotonic() + timeout
    while before:
        time.sleep(0.02)
        late = time.monotonic() > deadline  # many may ask at once; what is there by now will do
        for rank, size in list(before.items()):
            path = stack_file(records[rank].path)
            now = _size(path)
            if now > size and (late or _settled(path, now)):
                found[rank] = parse(_read_from(path, size))
            if late or rank in found:
                del before[rank]
    return found


def read_stacks(box: Path) -> tuple[ThreadStack, ...]:
    """The newest stacks a rank has ever shown; empty where it was never asked."""
    lines = files.read_last_lines(stack_file(box), _STACK_BYTES)
    return parse(b"\n".join(lines).decode(errors="replace"))


def parse(text: str) -> tuple[ThreadStack, ...]:
    """faulthandler's dumps as data. Of several in one text, each thread's last stack counts."""
    found: dict[str, ThreadStack] = {}
    frames: list[Site] = []
    for line in text.splitlines():
        if head := _THREAD.match(line):
            frames = []
            thread = head[2]
            found.pop(thread, None)
            found[thread] = ThreadStack(thread, head[3] or "", head[1] != "Thread", ())
        elif (frame := _FRAME.match(line)) and found:
            number = int(frame[2]) if frame[2].isdigit() else 0
            frames.append(Site(frame[1], number, frame[3]))
            thread = next(reversed(found))
            last = found[thread]
            found[thread] = ThreadStack(last.thread, last.name, last.current, tuple(frames))
    return tuple(sorted(found.values(), key=lambda stack: not stack.current))


def main_stack(threads: Iterable[ThreadStack]) -> tuple[Site, ...]:
    """The main thread's frames: its outermost one is no thread's start."""
    every = tuple(threads)
    for thread in every:
        if thread.frames and not thread.frames[-1].function.startswith("_bootstrap"):
            return without_boot(thread.frames)
    return every[0].frames if every else ()


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _settled(path: Path, size: int) -> bool:
    """faulthandler writes a dump in many small pieces: it is over when nothing more comes."""
    time.sleep(0.03)
    return _size(path) == size


def _read_from(path: Path, offset: int) -> str:
    try:
        with files.open_file(path) as file:
            file.seek(offset)
            return file.read(_STACK_BYTES).decode(errors="replace")
    except OSError:  # it was replaced by something that isn't a file
        return ""
