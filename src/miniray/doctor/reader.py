"""Reading a run directory: every rank's box, what its launcher saw of its end, and ``run.json``.

A file that is no box, or a damaged one, is a ``BoxError`` that says why; of a run it is an entry of
``RunRecord.damaged``.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from miniray.doctor import layout, processes, runfile
from miniray.doctor.box_file import BoxFile
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

_NAME = re.compile(r"(\d+)(\.\d+)?\.box")  # of a second process that claims the rank: 0.<pid>.box
#: What the box's JSON says in the words of ``RankRecord``, and what it is where it says nothing.
_SAID: dict[str, Any] = {
    **dict.fromkeys(("rank", "local_rank", "group_rank", "group_size"), -1),
    **dict.fromkeys(("world_size", "local_world_size", "pid", "attempt"), 0),
    **dict.fromkeys(("host", "launcher", "command", "backend"), ""),
    "distributed_available": None,
    "initialised": False,
    "heartbeat_interval": 1.0,
    "notes": {},
}


def read_box(path: str | os.PathLike[str]) -> RankRecord:
    """One box, once."""
    with BoxReader(path) as box:
        return box.record(processes.exit_seen(Path(path)))


def read_run(
    run_dir: str | os.PathLike[str], read: Callable[[Path], RankRecord] = read_box
) -> RunRecord:
    """Everything the run directory says. ``FileNotFoundError`` where there is no such directory.

    A directory without a single box gives a record without ranks. ``read`` reads one box; whoever
    looks again and again may keep what no longer changes.
    """
    path = Path(run_dir)
    if not path.is_dir():
        raise FileNotFoundError(f"there is no run directory {path}")
    ranks: dict[int, RankRecord] = {}
    duplicates: list[RankRecord] = []
    run, why = runfile.read_json(path / "run.json")
    damaged = {"run.json": why} if why else {}
    for file in sorted((path / "ranks").glob("*.box")):
        named = _NAME.fullmatch(file.name)
        if named is None:
            continue
        try:
            record = read(file)
        except (BoxError, ValueError, KeyError, TypeError) as error:
            damaged[f"ranks/{file.name}"] = str(error)
            continue
        if named[2]:
            duplicates.append(record)
        else:
            ranks[int(named[1])] = (
                processes.ended_well(record) if run.get("state") == "finished" else record
            )
    return RunRecord(path, time.time(), run, ranks, tuple(duplicates), damaged)


class BoxReader(BoxFile):
    """The parts of one box; ``record()``, again and again, for everything. ``close`` it."""

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

    def _steps(self, level: int) -> list[Steps]:
        size, slots = layout.STEP.size, layout.STEP_SLOTS
        rings = self.ring(layout.STEPS_AT + level * slots * size, size, slots)
        found = []
        for data in rings:
            (_, step, count, epoch, ended, seconds, waited, backward, collective, loss, batch_size,
             _) = layout.STEP.unpack(data)  # fmt: skip
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
                )
            )
        return found

    def _passes(self) -> tuple[SamplePass, ...]:
        found: dict[int, SamplePass] = {}
        for slot in range(layout.PASS_SLOTS):
            start = layout.PASSES_AT + slot * layout.PASS_SIZE
            cells = self.view[start : start + layout.PASS_HEAD].cast("q")
            key = cells[Pass.KEY]
            if key:
                record = self._pass(cells, start + layout.PASS_HEAD)
                if cells[Pass.KEY] == key:  # else the place was taken for another pass meanwhile
                    found[key] = record
            cells.release()
        return tuple(found[key] for key in sorted(found))

    def _pass(self, cells: memoryview[int], start: int) -> SamplePass:
        length = min(cells[Pass.IDS], layout.PASS_IDS)
        ids = self.view[start : start + length * 8].cast("q").tolist()
        version = cells[Pass.SKETCH]
        sketch: list[int] = []
        while version:
            # The writer fills the other place first and changes the version after that; should it
            # have come round twice while we copied, the version says so.
            size = min(cells[Pass.SKETCH_SIZE_0 + version % 2], layout.SKETCH_SIZE)
            at = start + layout.PASS_IDS * 8 + version % 2 * layout.SKETCH_SIZE * 8
            sketch = self.view[at : at + size * 8].cast("Q").tolist()
            if cells[Pass.SKETCH] - version < 2:
                break
            version = cells[Pass.SKETCH]
        count = max(cells[Pass.COUNT], length)
        return SamplePass(cells[Pass.LOADER], cells[Pass.EPOCH], count, tuple(ids), tuple(sketch))

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
            limit=self.floats[Real.BARRIER_LIMIT],
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
        """Everything; ``seen`` is what the launcher noted of the process's end."""
        ints, floats = self.ints, self.floats
        info = self.info()
        open_event = ints[Cell.OPEN]
        events = self.events()
        # The ring of events was read after the cell: a call that ended in between is not open.
        waiting = next((e for e in events if e.number == open_event - 1 and e.is_open), None)
        moment, text = layout.unpack_moment(ints[Cell.PHASE])
        section_moment, section = layout.unpack_moment(ints[Cell.SECTION])
        steps = self._steps(0)
        process = processes.look(info.get("pid", 0), info.get("host", ""), info.get("started"))
        ended = processes.exit_of(self.exit(), seen, process)
        loss = floats[Real.LOSS] if ints[Cell.LOSS_STEP] >= 0 else None
        return RankRecord(
            path=self.path,
            **{name: info.get(name, default) for name, default in _SAID.items()},
            attached=floats[Real.ATTACHED],
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
            steps=tuple(steps),
            spans=_older(self._steps(2), self._steps(1), steps),
            total=Steps(
                step=ints[Cell.STEP],
                count=ints[Cell.STEPS],
                epoch=ints[Cell.EPOCH],
                ended=steps[-1].ended if steps else floats[Real.ATTACHED],
                seconds=floats[Real.TOTAL_SECONDS],
                data=floats[Real.TOTAL_DATA],
                backward=floats[Real.TOTAL_BACKWARD],
                collective=floats[Real.TOTAL_COLLECTIVE],
                loss=loss,
                batch_size=ints[Cell.BATCH_SIZE],
            ),
            loss=loss,
            loss_step=ints[Cell.LOSS_STEP],
            nonfinite=ints[Cell.NONFINITE],
            first_nonfinite=_nonfinite(info.get("first_nonfinite")),
            samples=ints[Cell.SAMPLES],
            passes=self._passes(),
            loaders=tuple(_loader(found) for found in info.get("loaders", ())),
            models=tuple(_model(found) for found in info.get("models", ())),
            barrier=self._barrier(),
            rss=ints[Cell.RSS],
            peak_rss=ints[Cell.PEAK_RSS],
            gpu=self._gpu(info.get("gpu")),
            cpu_seconds=floats[Real.CPU_SECONDS],
            heartbeat=self.wall(ints[Cell.HEARTBEAT] / 1e9),
            exit=ended,
            process=process,
            copied=info.get("box", str(self.path.absolute())) != str(self.path.absolute()),
        )

    def _gpu(self, known: Mapping[str, Any] | None) -> Gpu | None:
        if not known:
            return None
        return Gpu(
            index=known["index"],
            name=known["name"],
            uuid=known["uuid"],
            memory_used=self.ints[Cell.GPU_MEMORY],
            memory_total=known["memory_total"],
            process_memory=self.ints[Cell.GPU_PROCESS_MEMORY],
            utilisation=self.ints[Cell.GPU_UTILISATION],
            power=self.floats[Real.GPU_POWER],
            power_limit=known["power_limit"],
        )


def _older(coarse: list[Steps], middle: list[Steps], fine: list[Steps]) -> tuple[Steps, ...]:
    """Spans that lie wholly before what a finer ring still has."""
    begin = fine[0].step - fine[0].count + 1 if fine else None
    middle = [s for s in middle if begin is None or s.step < begin]
    if middle:
        begin = middle[0].step - middle[0].count + 1
    return (*(s for s in coarse if begin is None or s.step < begin), *middle)


def _loader(found: Mapping[str, Any]) -> Loader:
    return Loader(
        **{
            **found,
            "first_batch": tuple(found["first_batch"]),
            "site": Site(*found["site"]),
        }
    )


def _model(found: Mapping[str, Any]) -> Model:
    return Model(
        **{
            **found,
            "names": tuple(found["names"]),
            "unused": tuple(found["unused"]),
            "site": Site(*found["site"]),
        }
    )


def _nonfinite(found: Mapping[str, Any] | None) -> NonFinite | None:
    if not found:
        return None
    return NonFinite(
        step=found["step"],
        epoch=found["epoch"],
        value=float(found["value"]),
        samples=tuple(found["samples"]),
        site=Site(*found["site"]),
        at=found["at"],
    )
