"""The ranks of one machine as processes: started, their output shown and kept, ended without rest.

Each rank leads a session of its own, so that whatever it starts can be ended with it. It dies with
the launcher, whatever ends that.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, BinaryIO

from miniray.doctor import runfile
from miniray.doctor.reader import read_box
from miniray.doctor.waiting import is_consequence
from miniray.errors import BoxError

_MAX_LINE = 65536
#: A rank has labeled the line itself, or a trainer has that runs in this process.
_LABEL = re.compile(r"\[Rank \d+/\d+\] ")


class Rank:
    """One rank's process."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes], exit_file: Path) -> None:
        self.rank = rank
        self.process = process
        self.pid = process.pid
        self.exit_file = exit_file
        self.code: int | None = None  # as ``subprocess`` has it: negative for a signal
        self.ended: float | None = None
        self.told_to_end = False

    @property
    def running(self) -> bool:
        return self.code is None

    @property
    def failed(self) -> bool:
        return bool(self.code) and not self.told_to_end

    def check(self) -> bool:
        """Whether it has ended just now. What it left in its process group is ended, too."""
        if self.code is not None:
            return False
        # Looked at without taking it away first: as long as it is a zombie, its group is its own.
        done = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if done is None:
            return False
        self.signal_group(signal.SIGKILL)
        self.code = self.process.wait()
        self.ended = time.time()
        name = _signal_name(-self.code) if self.code < 0 else ""
        seen = {
            "pid": self.pid,
            "code": self.code if self.code >= 0 else None,
            "signal": name,
            "at": self.ended,
            "by_launcher": self.told_to_end,
        }
        runfile.replace_text(self.exit_file, json.dumps(seen) + "\n")
        return True

    def signal_group(self, number: int) -> None:
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):  # nobody is left in it
            return

    def describe_end(self) -> str:
        if self.code is None:
            return "is still running"
        if self.code < 0:
            return f"was killed by {_signal_name(-self.code)}"
        return f"exited with code {self.code}"


class Ranks:
    """All ranks of this machine, of one attempt."""

    def __init__(self, folder: Path, world_size: int, output: Output) -> None:
        self.folder = folder
        self.world_size = world_size
        self.output = output
        self.ranks: list[Rank] = []

    def start(self, command: Sequence[str], rank: int, env: Mapping[str, str]) -> None:
        process = subprocess.Popen(
            command,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.ranks.append(Rank(rank, process, self.folder / f"{rank}.exit"))
        assert process.stdout is not None
        assert process.stderr is not None
        label = f"[Rank {rank}/{self.world_size}]"
        self.output.add(process.stdout, label, self.folder / f"{rank}.log", sys.stdout)
        self.output.add(process.stderr, label, self.folder / f"{rank}.log", sys.stderr)

    def check(self) -> list[Rank]:
        """Those that have ended since the last look."""
        return [rank for rank in self.ranks if rank.check()]

    @property
    def running(self) -> list[Rank]:
        return [rank for rank in self.ranks if rank.running]

    @property
    def failed(self) -> list[Rank]:
        """Those that failed by themselves, the first one first."""
        found = [rank for rank in self.ranks if rank.failed]
        return sorted(found, key=self._failed_at) if len(found) > 1 else found

    def _failed_at(self, rank: Rank) -> tuple[bool, float]:
        """(whether it only says that another one had gone, when its exception was raised)

        Processes do not end in that order. One that others waited for fails or is killed, they hear
        of it and fail too, and may be gone, or seen to be, before it.
        """
        try:
            record = read_box(self.folder / f"{rank.rank}.box")
        except BoxError:  # it failed before it had one
            return False, rank.ended or 0.0
        at = record.exit.at if record.exit is not None and record.pid == rank.pid else None
        return record.pid == rank.pid and is_consequence(record), at or rank.ended or 0.0

    def end(self, first: int = signal.SIGTERM, patience: float = 3.0) -> None:
        """End every rank: ``first``, then SIGKILL after ``patience`` seconds. Nothing is left.

        May be called again while it is at work (a second Ctrl-C): SIGKILL at once.
        """
        for rank in self.running:
            rank.told_to_end = True
            rank.signal_group(first)
            rank.signal_group(signal.SIGCONT)  # a stopped process takes no other signal
        deadline = time.monotonic() + patience
        try:
            while self.running and time.monotonic() < deadline:
                self.check()
                time.sleep(0.02)
        finally:
            self.kill()

    def kill(self) -> None:
        for rank in self.running:
            rank.told_to_end = True
            rank.signal_group(signal.SIGKILL)
        while self.running:
            self.check()
            time.sleep(0.005)


class _Stream:
    def __init__(self, pipe: IO[bytes], label: str, log: BinaryIO, target: IO[str]) -> None:
        self.pipe = pipe
        self.label = label
        self.log = log
        self.target = target
        self.partial = b""


class Output:
    """Every rank's output: whole lines, ``[Rank r/N]`` before each, shown and kept in its log.

    One thread reads all pipes, so that a slow terminal holds up nothing but printing. A terminal
    that goes away, or a full disk under the logs, is no reason to end a training run.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._logs: dict[Path, BinaryIO] = {}
        self._lock = threading.Lock()
        self._new: list[_Stream] = []
        self._open = 0
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="miniray-output", daemon=True)
        self._thread.start()

    def add(self, pipe: IO[bytes], label: str, path: Path, target: IO[str]) -> None:
        if path not in self._logs:
            self._logs[path] = open(path, "ab", buffering=0)
        os.set_blocking(pipe.fileno(), False)
        with self._lock:
            self._new.append(_Stream(pipe, label, self._logs[path], target))
        os.write(self._wake_write, b"x")

    def close(self) -> None:
        """Show what is left and stop. The ranks must have ended."""
        self._closing = True
        os.write(self._wake_write, b"x")
        self._thread.join()
        self._selector.close()
        for descriptor in (self._wake_read, self._wake_write):
            os.close(descriptor)
        for log in self._logs.values():
            log.close()

    def _run(self) -> None:
        while not (self._closing and not self._new):
            for key, _ in self._selector.select():
                if key.data is None:
                    os.read(self._wake_read, 4096)
                    self._take_new()
                else:
                    self._read(key.data)
        for key in list(self._selector.get_map().values()):
            # Held open by a process that is not ours to end: what is there by now is all.
            if key.data is not None and self._read(key.data):
                self._finish(key.data)

    def _take_new(self) -> None:
        with self._lock:
            new, self._new = self._new, []
        for stream in new:
            self._selector.register(stream.pipe, selectors.EVENT_READ, stream)

    def _read(self, stream: _Stream) -> bool:
        """Read what is there; False at the end of the stream."""
        while True:
            try:
                data = os.read(stream.pipe.fileno(), 65536)
            except BlockingIOError:
                return True
            if not data:
                self._finish(stream)
                return False
            *lines, stream.partial = (stream.partial + data).split(b"\n")
            self._show(stream, lines)
            if len(stream.partial) > _MAX_LINE:
                self._show(stream, [stream.partial])
                stream.partial = b""

    def _finish(self, stream: _Stream) -> None:
        if stream.partial:
            self._show(stream, [stream.partial])
        self._selector.unregister(stream.pipe)
        stream.pipe.close()

    def _show(self, stream: _Stream, lines: Iterable[bytes]) -> None:
        text = "".join(_labelled(stream.label, line) for line in lines)
        if not text:
            return
        try:
            stream.log.write(text.encode(errors="replace"))
        except OSError:  # the disk is full; the training goes on
            pass
        try:
            stream.target.write(text)
            stream.target.flush()
        except (OSError, ValueError):  # the terminal is gone
            pass
        except UnicodeEncodeError:
            stream.target.write(text.encode("ascii", "backslashreplace").decode())


def _labelled(label: str, line: bytes) -> str:
    """A line with its label; of the states of a progress bar, the last."""
    text = line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
    return f"{text}\n" if _LABEL.match(text) else f"{label} {text}\n"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have no name
        return f"signal {number}"


def end_orphans() -> None:
    """End what ranks left behind in sessions of its own; it came to us when its parent ended."""
    import psutil

    me: Any = psutil.Process()
    for process in me.children(recursive=True):
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
