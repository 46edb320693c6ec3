"""Read the rank records of a run, what the launcher saw of each rank's end, and ``run.json``.

A file that isn't an intact record raises ``BoxError``. For a whole run, it becomes an entry of
``RunRecord.damaged``.
"""

from __future__ import annotations

import dataclasses
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from miniray.doctor import layout, processes
from miniray.doctor.box_file import BoxFile, BoxParts
from miniray.doctor.history import without_merged
from miniray.doctor.layout import Cell, Pass, Real
from miniray.doctor.model import (
    Barrier,
    Event,
    Exit,
    Gpu,
    Loader,
    Model,
    NonFinite,
    Phase,
    RankRecord,
    RunRecord,
    SamplePass,
    Site,
    Steps,
    site_from,
)
from miniray.errors import BoxError
from miniray.runs.listing import find_records
from miniray.runs.run_info import MAX_WORLD_SIZE, is_world_size, read_run_info
from miniray.runs.typed import build, convert

#: "0.<pid>.box" is the record of a second process that claims rank 0.
_NAME = re.compile(r"([0-9]{1,6})(\.[0-9]+)?\.box")


_MAX_TIME = 9e9  #: Unix time in the year 2255
_MAX_NS = 10**16  #: longest time of an entry of the history
_MAX_STEP, _MAX_ATTEMPTS = 1 << 53, 1 << 31


@dataclasses.dataclass(frozen=True)
class _Info:
    """The fields of the record's JSON that become fields of ``RankRecord``."""

    rank: int = -1
    local_rank: int = -1
    group_rank: int = -1
    group_size: int = -1
    world_size: int = 0
    local_world_size: int = 0
    pid: int = 0
    attempt: int = 0
    host: str = ""
    launcher: str = ""
    command: str = ""
    backend: str = ""
    distributed_available: bool | None = None
    initialised: bool = False
    heartbeat_interval: float = 1.0
    notes: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class _Asked(NamedTuple):
    rank: int | None
    world_size: int | None
    place: str | None


class _InFlight(NamedTuple):
    step: int
    type: str
    message: str
    site: Site


class _MemoryPoint(NamedTuple):
    seconds: float
    step: float
    rss: float


class _GroupRanks(NamedTuple):
    name: str
    start: int
    stop: int
    step: int


class _StepOffset(NamedTuple):
    attempt: int
    steps: int


class _ObjectStore(NamedTuple):
    memory: int
    peak: int
    limit: int
    disk: int


class _RowCache(NamedTuple):
    path: str
    nbytes: int


#: Types of the notes that are more than text to show. Others are left as they are.
_NOTES: Mapping[str, Any] = {
    "asked": _Asked,
    "in_flight": _InFlight | None,
    "memory": tuple[_MemoryPoint, ...],
    "gpu_count": int,
    "groups": tuple[_GroupRanks, ...],
    "steps_before_epoch": int,
    "step_offsets": tuple[_StepOffset, ...],
    "object_store": _ObjectStore | None,
    "row_caches": tuple[_RowCache, ...],
}


def read_box(path: str | os.PathLike[str]) -> RankRecord:
    """One box, once."""
    with BoxReader(path) as box:
        return box.record(processes.exit_seen(Path(path)))


def read_run(
    run_dir: str | os.PathLike[str], read: Callable[[Path], RankRecord] = read_box
) -> RunRecord:
    """Read all records of a run. Raise ``FileNotFoundError`` if there is no such directory.

    ``read`` reads one record: a caller that reads repeatedly may cache records of ended ranks.
    """
    path = Path(run_dir)
    if not path.is_dir():
        raise FileNotFoundError(f"there is no run directory {path}")
    ranks: dict[int, RankRecord] = {}
    duplicates: list[RankRecord] = []
    run, problem = read_run_info(path)
    damaged = {"run.json": problem} if problem else {}
    for file in find_records(path):
        named = _NAME.fullmatch(file.name)
        if named is None:
            continue
        try:
            record = read(file)
        except BoxError as error:
            damaged[f"ranks/{file.name}"] = str(error)
            continue
        if int(named[1]) >= MAX_WORLD_SIZE:
            damaged[f"ranks/{file.name}"] = f"no run has {MAX_WORLD_SIZE:,} ranks"
        elif named[2]:
            duplicates.append(record)
        else:
            ranks[int(named[1])] = (
                processes.ended_well(record) if run.get("state") == "finished" else record
            )
    if not path.is_dir():  # deleted while it was read: the ranks may have been missed
        raise FileNotFoundError(f"there is no run directory {path}")
    return RunRecord(path, time.time(), run, ranks, tuple(duplicates), damaged)


class BoxReader(BoxFile):
    """A record that may be read repeatedly: ``record()`` for everything. Call ``close``."""

    def record(self, seen: Mapping[str, Any] | None = None) -> RankRecord:
        """Read the whole record at once.

        ``seen`` is what the launcher noted about the end of the process. Raises ``BoxError`` if
        anything in the record can't be right.
        """
        snapshot = _Snapshot(self.path, self.read(0, layout.BOX_SIZE))
        try:
            return snapshot.record(seen)
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise BoxError(f"{self.path} is damaged: {error}") from error


class _Snapshot(BoxParts):
    """The content of a record at one moment."""

    def __init__(self, path: Path, data: bytes) -> None:
        super().__init__(path)
        self._data = data
        self._clock = self.real(Real.CLOCK)

    def read(self, at: int, size: int) -> bytes:
        return self._data[at : at + size]

    def wall(self, monotonic: float) -> float:
        """Convert the rank's monotonic time to Unix time."""
        time = monotonic + self._clock
        if not 0 <= time < _MAX_TIME:
            raise ValueError(f"a time is {time}")
        return time

    def place(self, text: str, monotonic: float) -> Phase:
        name, _, rest = text.partition("\0")
        return Phase(name, site_from(rest), self.wall(monotonic))

    def events(self) -> tuple[Event, ...]:
        size, slots = layout.EVENT.size, layout.EVENT_SLOTS
        return tuple(self._event(data) for data in self.ring(layout.EVENTS_AT, size, slots))

    def _event(self, data: bytes) -> Event:
        count, at, ended, sequence, step, what, _ = layout.EVENT.unpack(data)
        (kind, name, op, group, dtype, site, flags, dimensions, *sizes) = layout.WHAT.unpack(what)
        return Event(
            number=count - 1,
            kind=self.text(kind),
            name=self.text(name),
            op=self.text(op),
            group=self.text(group),
            sequence=sequence,
            shape=tuple(sizes[:dimensions]),
            dtype=self.text(dtype),
            site=site_from(self.text(site)),
            step=step,
            at=self.wall(at / 1e9),
            ended=self.wall(ended / 1e9) if ended else None,
            blocking=bool(flags & layout.BLOCKING),
            functional=bool(flags & layout.FUNCTIONAL),
        )

    def _history(self) -> tuple[Steps, ...]:
        size = layout.STEP.size
        data = self.read(layout.STEPS_AT, layout.HISTORY_SLOTS * size)
        found = []
        for begin, *fields, end in layout.STEP.iter_unpack(data):
            if begin != end or not begin:  # unused, or being written
                continue
            (step, count, epoch, ended, seconds, waited, backward, collective, loss, batch_size,
             attempt) = fields  # fmt: skip
            times = (seconds, waited, backward, collective)
            valid = 0 < count <= step < _MAX_STEP and 0 <= attempt < _MAX_ATTEMPTS
            if not (valid and all(0 <= time < _MAX_NS for time in times)):
                raise ValueError(f"the history has an invalid entry: {fields}")
            found.append(
                Steps(
                    step=step,
                    count=count,
                    epoch=epoch,
                    ended=self.wall(ended / 1e9),
                    seconds=seconds / 1e9,
                    data=waited / 1e9,
                    backward=backward / 1e9,
                    collective=collective / 1e9,
                    loss=None if loss == layout.NO_LOSS else loss,
                    batch_size=batch_size,
                    attempt=attempt,
                )
            )
        return without_merged(found)

    def _passes(self) -> tuple[SamplePass, ...]:
        found: dict[int, SamplePass] = {}
        for slot in range(layout.PASS_SLOTS):
            start = layout.PASSES_AT + slot * layout.PASS_SIZE
            data = self.read(start, layout.PASS_SIZE)
            cells = memoryview(data).cast("q")
            key = cells[Pass.KEY]
            if key <= 0 or cells[-1] != key:  # unused, or about to be used for a different pass
                continue
            length = max(0, min(cells[Pass.IDS], layout.PASS_IDS))
            ids = tuple(cells[len(Pass) : len(Pass) + length])
            count = max(cells[Pass.COUNT], length)
            found[key] = SamplePass(cells[Pass.LOADER], cells[Pass.EPOCH], count, ids)
        return tuple(found[key] for key in sorted(found))

    def _barrier(self) -> Barrier | None:
        cell = self.ints[Cell.BARRIER]
        if not cell:
            return None
        number, text = cell >> 16, self.text(cell & 0xFFFF)
        place = self.place(text, self.ints[Cell.BARRIER_SINCE] / 1e9)
        return Barrier(
            number=number,
            name=place.name,
            site=place.site,
            since=place.since,
            limit=self.real(Real.BARRIER_LIMIT),
            passed=self.ints[Cell.BARRIER_PASSED] >= number,
            failed=self.ints[Cell.BARRIER_FAILED] >= number,
        )

    def exit(self) -> Exit | None:
        """What the process itself wrote when it ended."""
        if not self.ints[Cell.EXITED]:
            return None
        return processes.exit_said(self.blob(layout.EXIT_AT, layout.EXIT_SIZE))

    # -- the whole --------------------------------------------------------------------------------

    def record(self, seen: Mapping[str, Any] | None = None) -> RankRecord:
        ints = self.ints
        info = self.info()
        said = build(_Info, info)
        if not (is_world_size(said.world_size) and is_world_size(said.local_world_size)):
            raise ValueError(f"world_size is {said.world_size}")
        open_event = ints[Cell.OPEN]
        events = self.events()
        # The ring of events was read after the cell: a call that ended in between is not open.
        waiting = next((e for e in events if e.number == open_event - 1 and e.is_open), None)
        moment, text = layout.unpack_moment(ints[Cell.PHASE])
        section_moment, section = layout.unpack_moment(ints[Cell.SECTION])
        history = self._history()
        process = self.process()
        ended = processes.exit_of(self.exit(), seen, process)
        loss = self.loss if ints[Cell.LOSS_STEP] >= 0 else None
        return RankRecord(
            path=self.path,
            **{**vars(said), "notes": _valid_notes(said.notes)},
            attached=self.real(Real.ATTACHED),
            phase=self.place(self.text(text), moment),
            section=self.place(self.text(section), section_moment) if section else None,
            waiting=waiting,
            events=events,
            event_count=events[-1].number + 1 if events else 0,
            step=ints[Cell.STEP],
            epoch=ints[Cell.EPOCH],
            batch_size=ints[Cell.BATCH_SIZE],
            batches=ints[Cell.BATCHES],
            batches_in_epoch=ints[Cell.BATCHES_IN_EPOCH],
            backwards=ints[Cell.BACKWARDS],
            history=history,
            total=Steps(
                step=ints[Cell.STEP],
                count=ints[Cell.STEPS],
                epoch=ints[Cell.EPOCH],
                ended=history[-1].ended
                if ints[Cell.STEPS] and history
                else self.real(Real.ATTACHED),
                seconds=self.real(Real.TOTAL_SECONDS),
                data=self.real(Real.TOTAL_DATA),
                backward=self.real(Real.TOTAL_BACKWARD),
                collective=self.real(Real.TOTAL_COLLECTIVE),
                loss=loss,
                batch_size=ints[Cell.BATCH_SIZE],
                attempt=ints[Cell.ATTEMPT],
            ),
            loss=loss,
            loss_step=ints[Cell.LOSS_STEP],
            nonfinite=ints[Cell.NONFINITE],
            first_nonfinite=_nonfinite(info.get("first_nonfinite")),
            samples=ints[Cell.SAMPLES],
            passes=self._passes(),
            loaders=convert(info.get("loaders", []), tuple[Loader, ...], "loaders"),
            models=convert(info.get("models", []), tuple[Model, ...], "models"),
            barrier=self._barrier(),
            rss=ints[Cell.RSS],
            peak_rss=ints[Cell.PEAK_RSS],
            gpu=self._gpu(info.get("gpu")),
            cpu_seconds=self.real(Real.CPU_SECONDS),
            heartbeat=self.wall(ints[Cell.HEARTBEAT] / 1e9),
            exit=ended,
            process=process,
            copied=info.get("box", str(self.path.absolute())) != str(self.path.absolute()),
        )

    def _gpu(self, known: Any) -> Gpu | None:
        if not known:
            return None
        measured = {
            "memory_used": self.ints[Cell.GPU_MEMORY],
            "process_memory": self.ints[Cell.GPU_PROCESS_MEMORY],
            "utilisation": self.ints[Cell.GPU_UTILISATION],
            "power": self.real(Real.GPU_POWER),
        }
        return build(Gpu, {**known, **measured})


def _nonfinite(found: Any) -> NonFinite | None:
    if not found:
        return None
    value = float(found["value"])
    return dataclasses.replace(build(NonFinite, {**found, "value": 0.0}), value=value)


def _valid_notes(notes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the notes without those of a wrong type."""
    valid = dict(notes)
    for key, hint in _NOTES.items():
        try:
            if key in notes:
                convert(notes[key], hint, key)
        except ValueError:
            del valid[key]
    sums = valid.get("checksums")
    if sums is not None and not (isinstance(sums, dict) and all(map(_is_step, sums))):
        del valid["checksums"]
    return valid


def _is_step(key: str) -> bool:
    return key.isascii() and key.isdigit() and len(key) < 16
