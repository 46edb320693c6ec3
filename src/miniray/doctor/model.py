"""What is known of a rank and of a run: plain data, read from the run directory.

``reader.read_run(run_dir)`` makes these from the files; nothing here needs the run's processes.
Times are Unix times in seconds (``time.time()``), durations are seconds. What a rank never recorded
is ``None``, an empty tuple, or 0 where the word is a count.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from miniray.doctor.model_training import NOWHERE as NOWHERE
from miniray.doctor.model_training import Gpu as Gpu
from miniray.doctor.model_training import Loader as Loader
from miniray.doctor.model_training import Model as Model
from miniray.doctor.model_training import NonFinite as NonFinite
from miniray.doctor.model_training import SamplePass as SamplePass
from miniray.doctor.model_training import Site as Site
from miniray.doctor.model_training import Steps as Steps
from miniray.doctor.model_training import site_from as site_from

#: Name of the event of that call; its kind is ``GROUP``.
DESTROY = "destroy_process_group"

#: What an event can be about (``Event.kind``).
COLLECTIVE = "collective"  #: an operation all ranks of a group must join, in the same order
POINT_TO_POINT = "p2p"  #: send or recv; these carry a sequence number of their own
BARRIER = "barrier"  #: a named ``doctor.barrier``
GROUP = "group"  #: init_process_group, new_group, destroy_process_group
MODEL = "model"  #: a model was wrapped in DDP, or parameters stayed unused
LOADER = "loader"  #: a pass over a DataLoader began or ended
EPOCH = "epoch"  #: the user or a trainer said which epoch begins
PHASE = "phase"  #: ``doctor.phase`` began or ended
LOSS = "loss"  #: a loss that is not finite
BAR = "bar"  #: a progress bar (tqdm) was made
NOTE = "note"  #: anything else worth a line
EXIT = "exit"  #: the process is ending


@dataclasses.dataclass(frozen=True)
class Event:
    """One entry of the rank's ring of the last 512 events.

    A collective's event is written when it is called and gets ``ended`` when it has returned (for
    ``async_op=True``: when its ``wait()`` has). So the open ones are those with ``ended`` None.
    """

    number: int  #: 0, 1, 2, … over the rank's life; gaps do not occur, old ones are gone
    kind: str  #: one of the constants above
    name: str  #: "all_reduce", a barrier's name, a phase's name, ...
    op: str  #: "SUM", "AVG", ...; for broadcasts and the like "src=0"; text of other kinds
    group: str  #: name of the process group, equal on all its ranks; "" where there is none
    #: Of a collective: how many this rank had called in this group before. Of an epoch: its number.
    #: Of the end of a pass over a loader: its batches. Of a non-finite loss: the step. Else -1.
    sequence: int
    shape: tuple[int, ...]
    dtype: str
    site: Site
    step: int  #: the rank's step at that time
    at: float
    ended: float | None
    blocking: bool  #: False for ``async_op=True``
    functional: bool = False  #: called as an operator: by DTensor, or by compiled code

    @property
    def is_open(self) -> bool:
        return self.ended is None

    def describe(self) -> str:
        """``all_reduce SUM (4, 8) float32 at train.py:80``"""
        shape = str(self.shape) if self.shape else ""
        parts = (self.name, self.op, shape, self.dtype)
        text = " ".join(part for part in parts if part)
        return f"{text} at {self.site}" if self.site.file else text


@dataclasses.dataclass(frozen=True)
class Phase:
    """What the rank is doing, where, since when.

    Recorded without the user's help: ``start`` (nothing seen yet), ``init`` (init_process_group),
    ``data`` (waiting for the DataLoader), ``compute`` (the user's code, with a batch in hand),
    ``forward`` (of DDP), ``backward``, ``optimizer``, ``epoch end`` (after a pass over a loader),
    ``exit``. ``doctor.phase`` sets the *section*, which may have any name.
    """

    name: str
    site: Site
    since: float


@dataclasses.dataclass(frozen=True)
class Barrier:
    """The last ``doctor.barrier`` the rank entered."""

    number: int  #: 1 for the rank's first
    name: str
    site: Site
    since: float
    limit: float
    passed: bool
    failed: bool


@dataclasses.dataclass(frozen=True)
class ThreadStack:
    """One thread's stack as faulthandler showed it, innermost frame first."""

    thread: str  #: its id, as in "0x00007f..."
    name: str  #: where Python tells it
    current: bool  #: the thread that ran when the dump was made; usually the main thread
    frames: tuple[Site, ...]


@dataclasses.dataclass(frozen=True)
class Exit:
    """How the process ended, from what it wrote itself and from what its launcher saw.

    ``kind`` is ``finished``, ``exception``, ``exit`` (sys.exit with a code other than 0),
    ``signal``, ``code`` (it ended with a code and said nothing: ``os._exit``, a crash in C), or
    ``gone``: the process is no more and nobody saw it end.
    """

    kind: str
    code: int | None
    signal: str  #: "SIGKILL", ...
    type: str  #: the exception's
    message: str
    site: Site  #: the innermost line of the user's own code
    traceback: str
    at: float | None
    #: SIGTERM or SIGKILL sent by the launcher, because another rank had failed.
    by_launcher: bool = False

    @property
    def failed(self) -> bool:
        return self.kind != "finished"


@dataclasses.dataclass(frozen=True)
class Process:
    """The rank's process as the kernel shows it at the time of reading.

    ``alive`` is None where it cannot be known: the rank runs on another machine.
    """

    alive: bool | None
    state: str  #: R, S, D, T (stopped), Z, ...; "" where not known
    cpu_seconds: float | None
    io_bytes: int | None  #: bytes passed to read and write calls; of network traffic only a part
    threads: int | None
    children: int | None
    below: tuple[float, int] = (0.0, 0)  #: CPU seconds and bytes of all its living descendants
    sleeps_in: str = ""  #: the kernel's function that its main thread waits in, where it is told

    @property
    def stopped(self) -> bool:
        return self.state in ("T", "t")


@dataclasses.dataclass(frozen=True)
class RankRecord:
    """Everything one rank's box says, with what the kernel says of its process."""

    path: Path
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    pid: int
    host: str
    launcher: str  #: "miniray run", "torchrun", "lightning", "accelerate", "ray", "slurm", ...
    command: str
    attached: float
    attempt: int  #: 0, and one more for every restart of the group

    #: torch.distributed: None before torch.distributed was imported.
    distributed_available: bool | None
    initialised: bool
    backend: str
    group_rank: int  #: what torch says, -1 before init_process_group
    group_size: int

    phase: Phase
    section: Phase | None  #: the innermost ``doctor.phase`` that is open
    waiting: Event | None  #: the blocking collective or barrier it is inside of now
    events: tuple[Event, ...]  #: oldest first, the last 512
    event_count: int  #: of its whole life

    step: int  #: optimizer steps done
    epoch: int  #: -1 before the first
    batch_size: int
    batches: int  #: batches taken from DataLoaders, all together
    batches_in_epoch: int  #: of the current pass
    backwards: int
    history: tuple[Steps, ...]  #: the steps of all attempts, oldest first; see ``history``
    total: Steps  #: all steps of this attempt together
    loss: float | None
    loss_step: int
    nonfinite: int  #: losses that were NaN or infinite
    first_nonfinite: NonFinite | None

    samples: int  #: samples seen, all passes and loaders
    passes: tuple[SamplePass, ...]  #: the last six
    loaders: tuple[Loader, ...]
    models: tuple[Model, ...]
    barrier: Barrier | None

    rss: int
    peak_rss: int
    gpu: Gpu | None
    cpu_seconds: float  #: at the last heartbeat
    heartbeat: float
    heartbeat_interval: float

    exit: Exit | None
    process: Process
    notes: Mapping[str, Any]  #: versions, thread counts and whatever else was noted, as JSON has it
    copied: bool = False  #: a copy of the box of another machine's rank, made by the launcher

    @cached_property
    def steps(self) -> tuple[Steps, ...]:
        """The part of the history that belongs to this attempt."""
        return tuple(steps for steps in self.history if steps.attempt == self.total.attempt)

    @cached_property
    def _offsets(self) -> dict[int, int]:
        """Steps of the run before each attempt; {} if the script doesn't report them."""
        return dict(self.notes.get("step_offsets", ()))

    @property
    def has_global_steps(self) -> bool:
        """Whether the steps of the run before this attempt are known, as in a trainer's run."""
        return bool(self._offsets)

    @property
    def global_step(self) -> int:
        """Completed steps of the run, or of this attempt if those before aren't known."""
        return self.step + self._offsets.get(self.total.attempt, 0)

    def to_global_step(self, steps: Steps) -> int:
        """Return the number of the last of these steps in the run."""
        return steps.step + self._offsets.get(steps.attempt, 0)

    @cached_property
    def global_history(self) -> tuple[Steps, ...]:
        """The history with global steps, without those that a later attempt trained again."""
        found = []
        for steps in self.history:
            step = self.to_global_step(steps)
            later = (n for attempt, n in self._offsets.items() if attempt > steps.attempt)
            if step <= min(later, default=step):
                found.append(dataclasses.replace(steps, step=step))
        return tuple(found)

    @property
    def label(self) -> str:
        return f"[Rank {self.rank}/{self.world_size}]"

    @property
    def alive(self) -> bool:
        """Not known to have ended. A rank of another machine lives until its box says otherwise."""
        return self.process.alive is not False and self.exit is None

    @property
    def in_epochs(self) -> bool:
        """A worker whose steps nobody sees, as one without torch: its trainer's epoch is known."""
        return self.epoch >= 0 and not (self.step or self.batch_size or self.batches)

    @property
    def open_events(self) -> tuple[Event, ...]:
        """Collectives and barriers that were called and have not completed, oldest first."""
        kinds = (COLLECTIVE, POINT_TO_POINT, BARRIER, GROUP)
        return tuple(event for event in self.events if event.is_open and event.kind in kinds)

    @property
    def last_event(self) -> Event | None:
        return self.events[-1] if self.events else None

    def collectives(self, group: str | None = None) -> tuple[Event, ...]:
        """The ring's collectives (of one group), in the order they were called."""
        return tuple(
            event
            for event in self.events
            if event.kind == COLLECTIVE and (group is None or event.group == group)
        )

    def heartbeat_age(self, now: float) -> float:
        return max(0.0, now - self.heartbeat)


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """A run directory, read once."""

    path: Path
    read_at: float
    run: Mapping[str, Any]  #: run.json; empty where there is none
    ranks: Mapping[int, RankRecord]
    #: Boxes of further processes that claim a rank somebody living already had.
    duplicates: tuple[RankRecord, ...]
    damaged: Mapping[str, str]  #: file name → why it could not be read

    @property
    def world_size(self) -> int:
        """As the launcher said or a rank claims: Lightning's first process begins alone."""
        said = self.run.get("world_size")
        claimed = [record.world_size for record in self]
        return max([said if isinstance(said, int) else 0, *claimed])

    @property
    def epochs(self) -> int | None:
        """Number of epochs at the end of the run of a trainer, if it is known."""
        config = self.run.get("config")
        found = config.get("epochs") if isinstance(config, Mapping) else None
        return found if type(found) is int else None

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks that never wrote a box."""
        return tuple(rank for rank in range(self.world_size) if rank not in self.ranks)

    def __iter__(self) -> Iterator[RankRecord]:
        return iter([self.ranks[rank] for rank in sorted(self.ranks)])

    def __len__(self) -> int:
        return len(self.ranks)
