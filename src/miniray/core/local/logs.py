"""What workers print: whole lines to the driver's terminal, and everything to a log file.

Each worker writes to two pipes. One thread of the driver reads them all, so a slow terminal holds
up nothing but printing, and what a killed worker had written is still there to read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import sys
import threading
from collections import deque
from typing import IO, BinaryIO

from miniray.core.local import system

_TAIL_LINES = 20
_MAX_LINE = 65536
_MAX_READS = 17  # a pipe holds 1 MB at most
_KEEP_SESSIONS = 10
_MAX_NAME = 50  # characters of up to 4 bytes; a file's name may have 255


@dataclasses.dataclass(eq=False)
class _Pipe:
    """One worker's stdout or stderr."""

    worker: _Worker
    fd: int
    is_error: bool
    events: int = 0  # what it is watched for
    partial: bytes = b""


class _Worker:
    def __init__(self, name: str, path: str, label: str) -> None:
        self.name = name
        self.label = label
        self.path = path
        self.pid = 0
        self.file: BinaryIO = open(path, "ab", buffering=0)
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)


class LogReader:
    """Reads all workers' pipes. ``close`` returns when everything written has been shown."""

    def __init__(self, directory: str, to_terminal: bool) -> None:
        os.makedirs(directory, mode=0o700, exist_ok=True)
        self.directory = directory
        self._to_terminal = to_terminal
        self._workers: dict[int, _Worker] = {}
        self._pipes: dict[int, _Pipe] = {}
        self._poller = system.Poller()
        self._waker = system.Waker()
        self._poller.set(self._waker.fd, 0, system.IN)
        self._lock = threading.RLock()
        self._closing = False
        self._output: deque[tuple[bool, str]] = deque()  # (is_error, lines) to show
        self._thread = threading.Thread(target=self._run, name="miniray-logs", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # too many threads: nothing of this reader stays open
            self._poller.close()
            self._waker.close()
            raise

    def add(self, proc: int, name: str, label: str = "") -> tuple[int, int]:
        """Return the write ends (stdout, stderr) for a new worker.

        ``label`` starts each line that is shown, unless the line has it. By default, that is the
        worker's name and process id.
        """
        with self._lock:
            safe = re.sub(r"[^\w.-]", "_", name)[:_MAX_NAME]
            worker = _Worker(name, os.path.join(self.directory, f"{safe}-{proc}.log"), label)
            self._workers[proc] = worker
            writers = []
            for is_error in (False, True):
                read_fd, write_fd = os.pipe()
                os.set_blocking(read_fd, False)
                self._pipes[read_fd] = _Pipe(worker, read_fd, is_error)
                writers.append(write_fd)
            return writers[0], writers[1]

    def set_pid(self, proc: int, pid: int) -> None:
        """From here on it is read: what it wrote before that waits for the name it is shown by."""
        with self._lock:
            worker = self._workers.get(proc)
            if worker is not None:
                worker.pid = pid
                self._watch(worker)

    def _watch(self, worker: _Worker) -> None:
        for pipe in self._pipes_of(worker):
            self._poller.set(pipe.fd, pipe.events, system.IN)
            pipe.events = system.IN

    def _pipes_of(self, worker: _Worker) -> list[_Pipe]:
        return [pipe for pipe in self._pipes.values() if pipe.worker is worker]

    def tail(self, proc: int) -> tuple[list[str], str]:
        """(last lines, log file) of a worker that ended, with all it wrote before."""
        with self._lock:
            worker = self._workers.get(proc)
            if worker is None:
                return [], ""
            for pipe in self._pipes_of(worker):
                self._drain(pipe)
            partial = [pipe.partial for pipe in self._pipes_of(worker) if pipe.partial]
            lines = [*worker.tail, *(p.decode(errors="replace") for p in partial)]
            self._waker.wake()  # what was read just now is still to be shown
            return lines[-_TAIL_LINES:], worker.path

    def forget(self, proc: int) -> None:
        """The worker ended: drop its record; its pipes close when they are read to the end."""
        with self._lock:
            worker = self._workers.pop(proc, None)
            if worker is not None:
                self._watch(worker)  # one whose pid never came

    def _run(self) -> None:
        while True:
            for fd, _ in self._poller.poll():
                if fd == self._waker.fd:
                    self._waker.clear()
                    continue
                with self._lock:
                    pipe = self._pipes.get(fd)
                    if pipe is not None:
                        self._drain(pipe)
            self._show()
            if self._closing:
                return

    def _show(self) -> None:
        """Write to the terminal, without the lock: the terminal may be slow or paused."""
        while self._output:
            is_error, text = self._output.popleft()
            target: IO[str] | None = sys.stderr if is_error else sys.stdout
            if target is None:
                continue
            # A closed terminal is no reason to stop training.
            with contextlib.suppress(OSError, ValueError):
                try:
                    target.write(text)
                except UnicodeEncodeError:  # a terminal that is not UTF-8: no line is lost for it
                    target.write(text.encode("ascii", "backslashreplace").decode())
                target.flush()

    def _drain(self, pipe: _Pipe) -> None:
        """Read what is there; at the end of the stream, close it.

        More than a pipe holds, but not without end: a worker may write faster than we read, and
        others have their turn in between.
        """
        for _ in range(_MAX_READS):
            try:
                data = os.read(pipe.fd, 65536)
            except BlockingIOError:
                return
            if not data:
                self._emit_partial(pipe)
                self._poller.set(pipe.fd, pipe.events, 0)
                del self._pipes[pipe.fd]
                os.close(pipe.fd)
                if not self._pipes_of(pipe.worker):
                    pipe.worker.file.close()
                return
            with contextlib.suppress(OSError):  # a full disk must not stop the training
                pipe.worker.file.write(data)
            *lines, pipe.partial = (pipe.partial + data).split(b"\n")
            if lines:
                self._emit(pipe, lines)
            if len(pipe.partial) > _MAX_LINE:
                self._emit_partial(pipe)

    def _emit_partial(self, pipe: _Pipe) -> None:
        partial, pipe.partial = pipe.partial, b""
        if partial:
            self._emit(pipe, [partial])

    def _emit(self, pipe: _Pipe, lines: list[bytes]) -> None:
        worker = pipe.worker
        texts = [line.decode(errors="replace").rstrip("\r") for line in lines]
        worker.tail.extend(texts)
        if not self._to_terminal:
            return
        target = sys.stderr if pipe.is_error else sys.stdout
        label = worker.label
        prefix = label or f"({worker.name} pid={worker.pid})"
        if _is_terminal(target) and not os.environ.get("NO_COLOR"):
            prefix = f"\033[36m{prefix}\033[0m"
        # Whole lines in one piece, so that those of several processes never mix.
        own = f"{label} " if label else ""
        text = "".join(f"{prefix} {text.removeprefix(own)}\n" for text in texts)
        self._output.append((pipe.is_error, text))

    def close(self) -> None:
        """Read all pipes to their end and stop. The workers must have ended."""
        self._closing = True
        self._waker.wake()
        self._thread.join()
        with self._lock:
            for pipe in list(self._pipes.values()):
                self._drain(pipe)
            for pipe in list(self._pipes.values()):  # held open by a process that is not ours
                self._emit_partial(pipe)
                os.close(pipe.fd)
            self._pipes.clear()
            self._show()
            for worker in self._workers.values():
                worker.file.close()
        self._poller.close()
        self._waker.close()


def _is_terminal(target: IO[str] | None) -> bool:
    try:
        return target is not None and target.isatty()
    except ValueError:  # closed
        return False


def remove_old_logs(parent: str) -> None:
    """Keep the logs of the last few sessions, and of all that still run."""
    import shutil

    with contextlib.suppress(OSError):
        kept = sorted(os.scandir(parent), key=lambda e: e.stat().st_mtime, reverse=True)
        for entry in kept[_KEEP_SESSIONS:]:
            if not os.path.exists(os.path.join(os.path.dirname(parent), entry.name)):
                shutil.rmtree(entry.path, ignore_errors=True)
