"""The actor that is a rank: its process made ready, and what the driver calls on it.

What it prints is flushed and marked ``[Rank r/N]``, line by line, and goes into a file of its own,
too. From before the user's object is made: what its ``__init__`` prints is the rank's, and a
logging handler made there keeps the stream that it finds.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from miniray.doctor import actors

#: Lines that Ray prints for whoever shows a worker's output, and knows by how they begin.
_FOR_RAY = (":actor_name:", ":task_name:", ":job_id:")


class RankStream:
    """A text stream that marks each line and passes it on at once; everything else is the stream's.

    ``log`` gets the same lines; a full disk ends the log and not the training.
    """

    def __init__(self, stream: TextIO, mark: str, log: TextIO | None) -> None:
        self._stream = stream
        self._mark = mark
        self._log = log
        self._fresh = True  # at the beginning of a line
        self._lock = threading.Lock()

    def write(self, text: str) -> int:
        if text.startswith(_FOR_RAY):
            return self._stream.write(text)
        with self._lock:
            shown = ""
            for line in text.splitlines(keepends=True):
                shown += f"{self._mark} {line}" if self._fresh else line
                self._fresh = line.endswith("\n")
            self._stream.write(shown)
            if self._log is not None:
                try:
                    self._log.write(shown)
                except OSError:
                    self._log = None
            if "\n" in text:
                self._stream.flush()
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def set_up() -> Callable[[Any], None] | None:
    """Prepare the process of a rank, which is nobody else's: its output, its bars, its recorder.

    Called before the worker is made in it. Where the run directory is not there, on another machine
    than the driver's, the output is marked and not copied.
    """
    run_dir, rank, world_size = (
        os.environ[name] for name in (actors.RUN_DIR, actors.RANK, actors.WORLD_SIZE)
    )
    mark, log = f"[Rank {rank}/{world_size}]", None
    if os.access(run_dir, os.W_OK):
        folder = Path(run_dir) / "ranks"
        folder.mkdir(exist_ok=True)
        log = open(folder / f"{rank}.log", "a", buffering=1, encoding="utf-8")
    sys.stdout = RankStream(sys.stdout, mark, log)
    sys.stderr = RankStream(sys.stderr, mark, log)
    tame_tqdm(int(rank))
    return actors.set_up()


def tame_tqdm(rank: int) -> None:
    """Bars that the worker's own code makes: on rank 0 only, and without what can hang.

    tqdm's lock is shared with forked processes: a loader's worker that is killed while it holds it
    stops this process for ever. Its monitor is a thread more at every fork.
    """
    from tqdm import std  # not in the driver, which knows this module, too

    std.tqdm.set_lock(threading.RLock())
    std.tqdm.monitor_interval = 0
    if rank != 0:
        make = std.tqdm.__init__

        def silent(self: Any, *args: Any, **options: Any) -> None:
            make(self, *args, **{**options, "disable": True})

        std.tqdm.__init__ = silent  # type: ignore[method-assign]


class MemberMethods:
    """For worker classes: passes the driver's calls on to ``_member``, the rank it is.

    The rank is made when the driver prepares it, before the ranks meet.
    """

    _member: Any = None

    def _rank_join(self, spec: Any, agreed: Any, one_machine: bool) -> Any:
        return self._mine().join(spec, agreed, one_machine)

    def _rank_epoch(self, epoch: int) -> Any:
        return self._mine().epoch(epoch)

    def _rank_shared_state(self) -> Any:
        return self._mine().shared_state()

    def _rank_load_shared(self, state: Any) -> None:
        self._mine().load_shared(state)

    def _rank_leave(self) -> None:
        if self._member is not None:
            self._member.leave()

    def _mine(self) -> Any:
        assert self._member is not None, "the worker is no rank yet"
        return self._member
