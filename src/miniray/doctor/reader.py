"""Reading a run directory: ``read_run`` for a whole one, ``BoxReader`` for one rank's box.

Nothing is asked of the ranks: a box is read while it is written, or years after. What was being
written at that moment, or when the rank was killed, is recognised and passed over, never taken for
something else. A file that is no box, or a damaged one, is a ``BoxError`` that says why, and in
``read_run`` an entry of ``RunRecord.damaged``.
"""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import re
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from miniray.doctor import layout, processes
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
    Process,
    RankRecord,
    RunRecord,
    SamplePass,
    Site,
    Steps,
)
from miniray.errors import BoxError

NOWHERE = Site("", 0, "")
_NAME = re.compile(r"(\d+)(\.\d+)?\.box")  # of a second process that claims the rank: 0.<pid>.box


class BoxReader:
    """One box, mapped for reading. ``record()`` may be called again and again; ``close`` it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            with open(self.path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size != layout.BOX_SIZE:
                    raise BoxError(f"{self.path} is no box of this version: it has {size} bytes")
                self._memory = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ)
        except OSError as error:
            raise BoxError(f"{self.path} cannot be read: {error}") from error
        if self._memory[: len(layout.MAGIC)] != layout.MAGIC:
            self._memory.close()
            raise BoxError(f"{self.path} is no box, or one of another version")
        self._view = memoryview(self._memory)
        cells = self._view[layout.CELLS_AT : layout.CELLS_AT + layout.CELLS * 8]
        self.ints = cells.cast("q")
        self.floats = cells.cast("d")
        self._words = self._view[: layout.BOX_SIZE // 8 * 8].cast("Q")
        self._texts: list[str] = []

    def close(self) -> None:
        for view in (self.ints, self.floats, self._words, self._view):
            view.release()
        self._memory.close()

    def __enter__(self) -> BoxReader:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    # -- parts ------------------------------------------------------------------------------------

    def text(self, index: int) -> str:
        while len(self._texts) <= index:
            number = len(self._texts)
            if number >= min(self.ints[Cell.TEXTS], layout.TEXT_SLOTS):
                return "?"
            at = layout.TEXTS_AT + number * layout.TEXT.size
            offset, length = layout.TEXT.unpack_from(self._memory, at)
            start = layout.HEAP_AT + offset
            self._texts.append(bytes(self._view[start : start + length]).decode(errors="replace"))
        return self._texts[index]

    def info(self) -> dict[str, Any]:
        """The box's JSON: what changes seldom."""
        return self._blob(layout.INFO_AT, layout.INFO_SIZE)

    def wall(self, monotonic: float) -> float:
        return monotonic + self.floats[Real.CLOCK]

    def _blob(self, at: int, size: int) -> dict[str, Any]:
        found: dict[int, bytes] = {}
        for start in (at, at + size):
            version, length, checksum = layout.BLOB_HEAD.unpack_from(self._memory, start)
            body = start + layout.BLOB_HEAD.size
            if version and length <= size - layout.BLOB_HEAD.size:
                data = bytes(self._view[body : body + length])
                if zlib.crc32(data, version) == checksum:
                    found[version] = data
        return dict(json.loads(found[max(found)])) if found else {}

    def _records(self, at: int, size: int, slots: int) -> list[bytes]:
        """Whole records of a ring in the order they were written."""
        found: dict[int, bytes] = {}
        for slot in range(slots):
            start = at + slot * size
            number = self._words[start >> 3]
            if not number or (number - 1) % slots != slot:
                continue
            data = bytes(self._view[start : start + size])
            end = int.from_bytes(data[-8:], "little")
            begin = int.from_bytes(data[:8], "little")
            if begin == end == number == self._words[start >> 3]:
                found[number] = data
        return [found[number] for number in sorted(found)]

    def place(self, text: str, monotonic: float) -> Phase:
        name, _, rest = text.partition("\0")
        return Phase(name, site_from(rest), self.wall(monotonic))

    def events(self) -> tuple[Event, ...]:
        size, slots = layout.EVENT.size, layout.EVENT_SLOTS
        return tuple(self._event(data) for data in self._records(layout.EVENTS_AT, size, slots))

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
            at=self.wall(at),
            ended=self.wall(ended) if ended else None,
            blocking=bool(flags & layout.BLOCKING),
        )

    def _steps(self, level: int) -> list[Steps]:
        size, slots = layout.STEP.size, layout.STEP_SLOTS
        rings = self._records(layout.STEPS_AT + level * slots * size, size, slots)
        found = []
        for data in rings:
            (_, step, count, epoch, ended, seconds, waited, backward, collective, loss, batch_size,
             _) = layout.STEP.unpack(data)  # fmt: skip
            found.append(
                Steps(
                    step=step,
                    count=count,
                    epoch=epoch,
                    ended=self.wall(ended),
                    seconds=seconds,
                    data=waited,
                    backward=backward,
                    collective=collective,
                    loss=None if loss == layout.NO_LOSS else loss,
                    batch_size=batch_size,
                )
            )
        return found

    def _passes(self) -> tuple[SamplePass, ...]:
        found: dict[int, SamplePass] = {}
        for slot in range(layout.PASS_SLOTS):
            start = layout.PASSES_AT + slot * layout.PASS_SIZE
            cells = self._view[start : start + layout.PASS_HEAD].cast("q")
            key = cells[Pass.KEY]
            if key:
                record = self._pass(cells, start + layout.PASS_HEAD)
                if cells[Pass.KEY] == key:  # else the place was taken for another pass meanwhile
                    found[key] = record
            cells.release()
        return tuple(found[key] for key in sorted(found))

    def _pass(self, cells: memoryview[int], start: int) -> SamplePass:
        length = min(cells[Pass.IDS], layout.PASS_IDS)
        ids = self._view[start : start + length * 8].cast("q").tolist()
        version = cells[Pass.SKETCH]
        sketch: list[int] = []
        while version:
            # The writer fills the other place first and changes the version after that; should it
            # have come round twice while we copied, the version says so.
            size = min(cells[Pass.SKETCH_SIZE_0 + version % 2], layout.SKETCH_SIZE)
            at = start + layout.PASS_IDS * 8 + version % 2 * layout.SKETCH_SIZE * 8
            sketch = self._view[at : at + size * 8].cast("Q").tolist()
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
        said = self._blob(layout.EXIT_AT, layout.EXIT_SIZE)
        return Exit(
            kind=said.get("kind", "exit"),
            code=said.get("code"),
            signal=said.get("signal", ""),
            type=said.get("type", ""),
            message=said.get("message", ""),
            site=Site(*said["site"]) if said.get("site") else NOWHERE,
            traceback=said.get("traceback", ""),
            at=said.get("at"),
        )

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
        ended = _merged_exit(self.exit(), seen, process)
        loss = floats[Real.LOSS] if ints[Cell.LOSS_STEP] >= 0 else None
        return RankRecord(
            path=self.path,
            rank=info.get("rank", -1),
            local_rank=info.get("local_rank", -1),
            world_size=info.get("world_size", 0),
            local_world_size=info.get("local_world_size", 0),
            pid=info.get("pid", 0),
            host=info.get("host", ""),
            launcher=info.get("launcher", ""),
            command=info.get("command", ""),
            attached=floats[Real.ATTACHED],
            attempt=info.get("attempt", 0),
            distributed_available=info.get("distributed_available"),
            initialised=info.get("initialised", False),
            backend=info.get("backend", ""),
            group_rank=info.get("group_rank", -1),
            group_size=info.get("group_size", -1),
            phase=self.place(self.text(text), moment),
            section=self.place(self.text(section), section_moment) if section else None,
            waiting=waiting,
            events=events,
            event_count=ints[Cell.EVENTS],
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
            heartbeat_interval=info.get("heartbeat_interval", 1.0),
            exit=ended,
            process=process,
            notes=info.get("notes", {}),
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


def read_box(path: str | os.PathLike[str]) -> RankRecord:
    """One box, once."""
    with BoxReader(path) as box:
        return box.record(_read_exit(Path(path)))


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
    damaged: dict[str, str] = {}
    run: dict[str, Any] = {}
    try:
        run = json.loads((path / "run.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        damaged["run.json"] = str(error)
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
            ranks[int(named[1])] = _ended_well(record) if run.get("state") == "finished" else record
    return RunRecord(path, time.time(), run, ranks, tuple(duplicates), damaged)


def site_from(text: str) -> Site:
    """A site from the text the recorder keeps of it, "file\\0line\\0function"."""
    file, _, rest = text.partition("\0")
    line, _, function = rest.partition("\0")
    return Site(file, int(line) if line.isdigit() else 0, function) if file else NOWHERE


def _older(coarse: list[Steps], middle: list[Steps], fine: list[Steps]) -> tuple[Steps, ...]:
    """Spans that lie wholly before what a finer ring still has."""
    begin = fine[0].step - fine[0].count + 1 if fine else None
    middle = [s for s in middle if begin is None or s.step < begin]
    if middle:
        begin = middle[0].step - middle[0].count + 1
    return (*(s for s in coarse if begin is None or s.step < begin), *middle)


def _read_exit(box: Path) -> dict[str, Any] | None:
    try:
        return dict(json.loads(box.with_suffix(".exit").read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError):
        return None


def _merged_exit(
    said: Exit | None, seen: Mapping[str, Any] | None, process: Process
) -> Exit | None:
    """The process's own word for why, the launcher's for how."""
    if seen is not None:
        signal, code = seen.get("signal") or "", seen.get("code")
        by_launcher = bool(seen.get("by_launcher"))
        if said is None:
            kind = "signal" if signal else "finished" if code == 0 else "code"
            return Exit(kind, code, signal, "", "", NOWHERE, "", seen.get("at"), by_launcher)
        kind = said.kind
        if kind == "finished" and (signal or code):  # it died after its last word
            kind = "signal" if signal else "code"
        at = said.at or seen.get("at")
        return dataclasses.replace(
            said, kind=kind, code=code, signal=signal, at=at, by_launcher=by_launcher
        )
    if said is None and process.alive is False:
        return Exit("gone", None, "", "", "", NOWHERE, "", None)
    if said is not None and said.kind == "finished" and process.alive:
        return None  # it is in its last lines, but it has not ended
    return said


def _ended_well(record: RankRecord) -> RankRecord:
    """A rank that ended unseen, in a run that wrote a good end: its driver ended it."""
    if record.exit is None or record.exit.kind != "gone":
        return record
    ended = dataclasses.replace(record.exit, kind="finished", at=record.heartbeat)
    return dataclasses.replace(record, exit=ended)


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
