"""The recorder: what a rank does, written into its black box as it happens.

One recorder a process: ``start`` makes it, ``current`` gives it, ``stop`` ends it. It needs no
torch. miniray's trainers start one in each worker; ``attach`` starts one in a script of any
launcher and has torch report to it.

A forked child has no recorder: it shares the memory, and two writers would make nonsense of it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from miniray.doctor import heartbeat, in_flight, model, processes, runfile, sites, stacks
from miniray.doctor.box import Box
from miniray.doctor.layout import Cell
from miniray.doctor.model import Steps
from miniray.doctor.tally import Tally
from miniray.errors import MinirayError
from miniray.runs.run_info import get_mtime

_LONGEST_TRACEBACK = 5000
_LONGEST_MESSAGE = 1000


class Recorder(Tally):
    """Writes one rank's box. Made by ``start``.

    Everything may be called from any thread; the times of a step are meant for one (the trainer's).
    """

    def __init__(self, box: Box, info: dict[str, Any]) -> None:
        super().__init__(box)
        self.rank: int = info["rank"]
        self.world_size: int = info["world_size"]
        self.run_dir = box.path.parent.parent
        self.pid = os.getpid()
        self.info = info
        self.loaders: list[dict[str, Any]] = []
        self.models: list[dict[str, Any]] = []
        self.barriers = 0  # named ones entered so far
        self._info_lock = threading.RLock()  # seldom taken: what is frequent is in cells and rings
        self._dirty = False
        self._compiled = False
        self.exit_kind = ""
        self._heartbeat: heartbeat.Heartbeat | None = None
        self._stack_file: IO[bytes] | None = None
        #: Functions that are called with each heartbeat. Their results are notes of these names.
        self.gauges: dict[str, Callable[[], Any]] = {}
        self.set_phase("start", "")
        self.write_info()

    # -- what changes seldom ----------------------------------------------------------------------

    def update(self, **fields: Any) -> None:
        """Change fields of the box's JSON, at once."""
        with self._info_lock:
            self.info.update(fields)
            self.write_info()

    def note(self, **notes: Any) -> None:
        """Add to ``RankRecord.notes``."""
        with self._info_lock:
            self.info.setdefault("notes", {}).update(notes)
            self.write_info()

    def note_later(self, **notes: Any) -> None:
        """The same, written with the next heartbeat."""
        with self._info_lock:
            self.info.setdefault("notes", {}).update(notes)
            self._dirty = True

    def measure_gauges(self) -> None:
        """Note what the gauges show if it has changed."""
        notes = self.info.get("notes", {})
        found = {name: measure() for name, measure in [*self.gauges.items()]}
        changed = {name: value for name, value in found.items() if notes.get(name) != value}
        if changed:
            self.note_later(**changed)

    def set_global_step(self, step: int) -> None:
        """Note how many steps the run had completed before those of this attempt."""
        offsets = dict(self.info.get("notes", {}).get("step_offsets", ()))
        offsets[self.box.ints[Cell.ATTEMPT]] = step - self.step_number
        self.note(step_offsets=list(offsets.items()))

    def mark_dirty(self) -> None:
        """Have the JSON written with the next heartbeat: for what may be a second late."""
        self._dirty = True

    def flush(self) -> None:
        """Bring the box up to date with what may be a moment late."""
        self.flush_tally()
        if not self._compiled:
            self._look_for_compiler()
        if self._dirty:
            self.write_info()

    def _look_for_compiler(self) -> None:
        """Whether torch has compiled anything: a compiled DDP model runs past the recorder."""
        dynamo = sys.modules.get("torch._dynamo.utils")
        frames = getattr(dynamo, "counters", {}).get("frames")
        self._compiled = bool(frames)
        if frames:
            self.note_later(compiled=True)

    def write_info(self) -> None:
        with self._info_lock:
            self._dirty = False
            notes = self.info.get("notes", {})
            plain = {key: value for key, value in self.info.items() if key != "notes"}
            # What matters least comes last: that is what goes when there is no room.
            whole = {**plain, "models": self.models, "loaders": self.loaders[:32], "notes": notes}
            self.box.write_info(whole)

    # -- the end ----------------------------------------------------------------------------------

    def record_exception(self, error: BaseException) -> None:
        """The process is ending by this error. The first one counts; later ones follow from it."""
        error = in_flight.root(error)
        site = sites.error_site(error)
        told = traceback.TracebackException.from_exception(error)  # whatever its __str__ may do
        self.record_exit(
            "exception",
            type=type(error).__qualname__,
            message=str(told)[:_LONGEST_MESSAGE],
            site=list(site),
            traceback="".join(told.format())[-_LONGEST_TRACEBACK:],
        )

    def record_exit(self, kind: str, **fields: Any) -> None:
        if self.exit_kind or os.getpid() != self.pid:
            return
        self.exit_kind = kind
        self.event(model.EXIT, kind, fields.get("type", ""))
        self.box.write_exit({"kind": kind, "at": time.time(), **fields})
        self.set_phase("exit", "")
        self.flush()

    def __enter__(self) -> Recorder:
        """``with doctor.attach(): ...``: where an error does not end the process (in Ray, say)."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self.record_exception(error)
        if _current is self:
            stop()

    def start_threads(self, interval: float) -> None:
        self.info["heartbeat_interval"] = interval
        self._stack_file = stacks.listen(self.box.path)
        self._heartbeat = heartbeat.Heartbeat(self, interval)
        self._heartbeat.start()

    def close(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.stop()
        if self._stack_file is not None:
            stacks.stop_listening(self._stack_file)
        self.flush()
        self.box.close()


#: The process's recorder. Instrumented code reads it at every call.
_current: Recorder | None = None


def current() -> Recorder | None:
    """This process's recorder; None where none was started, and in a forked child."""
    return _current


def start(
    run_dir: str | os.PathLike[str],
    rank: int,
    world_size: int,
    *,
    local_rank: int | None = None,
    local_world_size: int | None = None,
    launcher: str = "miniray",
    attempt: int = 0,
    heartbeat_interval: float = 1.0,
) -> Recorder:
    """Make this process rank ``rank`` of the run and record it in ``run_dir/ranks/<rank>.box``.

    A box that a process no longer living left there is moved to ``ranks/attempt-<n>/``. Where the
    rank is taken by a living process, this one's box is ``<rank>.<pid>.box``, which the doctor
    reports. Raises ``MinirayError`` where this process already records another rank or run, and
    ``OSError`` where the directory cannot be written.
    """
    global _current
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be at least 0 and less than world_size {world_size}: {rank}")
    ranks = Path(run_dir) / "ranks"
    if _current is not None:
        if _current.rank == rank and _current.box.path.parent == ranks.absolute():
            return _current
        raise MinirayError(
            f"this process already records rank {_current.rank} in {_current.run_dir}"
        )
    ranks = ranks.absolute()
    runfile.make_private(ranks.parent)
    ranks.mkdir(exist_ok=True)
    with _alone(ranks):
        path, earlier, offsets = _free_path(ranks, rank)
        recorder = Recorder(
            Box.create(path),
            {
                "rank": rank,
                "local_rank": rank if local_rank is None else local_rank,
                "world_size": world_size,
                "local_world_size": world_size if local_world_size is None else local_world_size,
                "pid": os.getpid(),
                "started": processes.start_ticks(os.getpid()),
                "host": socket.gethostname(),
                "launcher": launcher,
                "command": " ".join(runfile.mask_arguments(sys.orig_argv))[:500],
                "attempt": attempt,
                "box": str(path),
                "heartbeat_interval": heartbeat_interval,
                "notes": {
                    "python": sys.version.split()[0],
                    "threads": os.environ.get("OMP_NUM_THREADS"),
                    **({"step_offsets": offsets} if offsets else {}),
                },
            },
        )
    recorder.history.begin_attempt(earlier)
    recorder.start_threads(heartbeat_interval)
    _install_hooks()
    _current = recorder
    return recorder


def stop() -> None:
    """End recording, as finished unless something else was recorded. Harmless where none runs."""
    global _current
    recorder, _current = _current, None
    if recorder is not None:
        recorder.record_exit("finished")
        recorder.close()


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process at a time: two that claim one rank at the same moment must see each other.

    For a second at most, and not at all where a file system has no locks: nobody waits for a
    process that was stopped right here.
    """
    import fcntl

    deadline = time.monotonic() + 1.0
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.005)
            except OSError:
                break
        yield
    finally:
        os.close(descriptor)


def _free_path(ranks: Path, rank: int) -> tuple[Path, Sequence[Steps], Sequence[Any]]:
    """Return where to record the rank, and the history and step offsets of earlier attempts."""
    from miniray.doctor.reader import read_box
    from miniray.errors import BoxError

    path = ranks / f"{rank}.box"
    try:
        before = read_box(path)
    except BoxError:  # there is none, it was archived, or it can't be kept
        archived = max(ranks.glob(f"attempt-*/{path.name}"), key=get_mtime, default=None)
        if archived is not None:
            with contextlib.suppress(BoxError):
                earlier = read_box(archived)
                return path, earlier.history, earlier.notes.get("step_offsets", ())
        return path, (), ()
    if before.process.alive and before.pid != os.getpid():
        return ranks / f"{rank}.{os.getpid()}.box", (), ()
    archive(path, before.attempt)
    return path, before.history, before.notes.get("step_offsets", ())


def archive(box: Path, attempt: int) -> None:
    """Keep what an earlier attempt left of a rank: its box, stacks and exit go aside together."""
    aside = box.parent / f"attempt-{attempt}"
    aside.mkdir(exist_ok=True)
    for path in (box, stacks.stack_file(box), box.with_suffix(".exit")):
        try:
            os.replace(path, aside / path.name)
        except FileNotFoundError:
            continue


# -- the process's end, and its forks -------------------------------------------------------------

_hooked = False


def _install_hooks() -> None:
    """Once a process: its exception hook, its exit, its forks."""
    global _hooked
    if _hooked:
        return
    _hooked = True
    before = sys.excepthook

    def excepthook(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if _current is not None:
            _current.record_exception(error)
        before(kind, error, trace)

    sys.excepthook = excepthook
    atexit.register(_at_exit)
    os.register_at_fork(after_in_child=_forget)


def _at_exit() -> None:
    if _current is not None and _current.pid == os.getpid():
        _current.record_exit("finished")


def _forget() -> None:
    """In a forked child: the box is the parent's."""
    global _current
    _current = None
