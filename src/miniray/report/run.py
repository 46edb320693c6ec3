"""A run directory read for people: what ran, how it ended, its metrics and events.

Nothing here asks the run's processes for anything. A file that is missing is empty, one that cannot
be read is named in ``Run.damaged``, and a last line that is being written is passed over.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import socket
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from miniray.doctor import runfile
from miniray.doctor.layout import MAGIC
from miniray.doctor.model import RankRecord, RunRecord
from miniray.doctor.reader import read_run
from miniray.report.series import axis

#: How JSON says the numbers it lacks.
WORDS = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}
_NO_KIND = ("", "given")  #: ``attach`` calls it so where the script itself stated its place
_TAIL = 65536  # bytes from the end of metrics.jsonl that surely hold its last lines


@dataclasses.dataclass(frozen=True)
class Run:
    """One run directory. What takes long to read is read when it is first asked for."""

    path: Path
    info: Mapping[str, Any]  #: run.json; empty where there is none
    damaged: dict[str, str]  #: file → why it could not be read

    @property
    def name(self) -> str:
        return self.path.absolute().name

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        return self._lines("metrics.jsonl")

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        return self._lines("events.jsonl")

    @cached_property
    def record(self) -> RunRecord:
        """The ranks' black boxes.

        A trainer ends its workers when it is done or has failed: that nobody saw such a rank end
        says nothing against it.
        """
        found = read_run(self.path)
        over = self.info.get("state") in ("failed", "interrupted") and "trainer" in self.config
        if not over:
            return found
        ranks = {number: _ended_by_trainer(rank) for number, rank in found.ranks.items()}
        return dataclasses.replace(found, ranks=ranks)

    @cached_property
    def state(self) -> str:
        """``running``, ``finished``, ``failed``, ``interrupted``, ``died`` or ``unknown``.

        A run that says "running" and whose process is gone died. Of a run on another machine one
        only knows what it wrote.
        """
        if isinstance(self.info.get("state"), str):
            return runfile.state_of(self.info)
        ends = [rank.exit for rank in self.record]
        if any(rank.alive for rank in self.record):
            return "running"
        if not ends:
            return "unknown"
        return "failed" if any(end is not None and end.failed for end in ends) else "finished"

    @property
    def started(self) -> float | None:
        """Unix time; of a run without run.json, when its first rank began to be recorded."""
        said = unix_time(self.info.get("started"))
        if said is not None or self.info:
            return said
        return min((rank.attached for rank in self.record), default=None)

    @property
    def ended(self) -> float | None:
        """When it said that it had ended; None of one that runs, or was killed."""
        return unix_time(self.info.get("ended"))

    @property
    def changed(self) -> float:
        """When anything in it was last written."""
        names = ("run.json", "metrics.jsonl", "events.jsonl", "ranks")
        times = [_mtime(self.path / name) for name in names]
        times += [_mtime(box) for box in self.path.glob("ranks/*.box")]
        return max(times) or _mtime(self.path)

    @property
    def seconds(self) -> float | None:
        """How long it took, or has been taking; of one that died, up to its last sign of life."""
        started = self.started
        if started is None:
            return None
        ended = self.ended
        if ended is None and self.state == "running":
            ended = datetime.datetime.now().timestamp()
        if ended is None:  # what a rank writes into its box is no change of the file
            ended = max([self.changed, *(rank.heartbeat for rank in self.record)])
        return max(0.0, ended - started)

    @property
    def config(self) -> Mapping[str, Any]:
        found = self.info.get("config")
        return runfile.mask_secrets(found) if isinstance(found, Mapping) else {}

    @property
    def unit(self) -> str:
        """What a line of metrics is, in words: a trainer may call its epochs steps."""
        word, said = axis(self.metrics), self.config.get("unit")
        return said if word == "epoch" and isinstance(said, str) else word

    @property
    def world_size(self) -> int:
        said = self.info.get("world_size")
        return said if isinstance(said, int) and said > 0 else self.record.world_size

    @property
    def kind(self) -> str:
        """What started it: a trainer's name, a launcher's, or the command's."""
        for name in (*map(self.config.get, ("trainer", "launcher")), self.info.get("kind")):
            if isinstance(name, str) and name not in _NO_KIND:
                return name
        launchers = (rank.launcher for rank in self.record)
        return next((name for name in launchers if name not in _NO_KIND), "")

    def last_metrics(self) -> dict[str, Any]:
        """The newest line of ``metrics.jsonl``, without reading all of a long file."""
        lines = last_lines(self.path / "metrics.jsonl", _TAIL)
        return next((found for line in reversed(lines) if (found := _parsed(line))), {})

    @property
    def living(self) -> str:
        """Which of its processes live, in words; "" where none is known to."""
        pids = [rank.pid for rank in self.record if rank.process.alive]
        here = self.info.get("host") == socket.gethostname()
        if self.state == "running" and here:
            pids.insert(0, self.info["pid"])
        if pids:
            shown = ", ".join(map(str, pids[:4])) + ", …" * (len(pids) > 4)
            return f"process{'es' * (len(pids) > 1)} {shown}"
        elsewhere = [r for r in self.record if r.process.alive is None and r.alive]
        fresh = datetime.datetime.now().timestamp() - self.changed < 300
        if fresh and (elsewhere or self.state == "running"):
            return f"on {self.info.get('host') or elsewhere[0].host}, as far as its files tell"
        return ""

    def _lines(self, name: str) -> list[dict[str, Any]]:
        try:
            lines = (self.path / name).read_bytes().split(b"\n")
        except FileNotFoundError:
            return []
        except OSError as error:
            self.damaged[name] = str(error)
            return []
        found = [_parsed(line) for line in lines]
        bad = [i + 1 for i, line in enumerate(lines[:-1]) if line.strip() and found[i] is None]
        if bad:
            shown = ", ".join(map(str, bad[:5])) + ", …" * (len(bad) > 5)
            self.damaged[name] = f"line{'s' * (len(bad) > 1)} {shown} could not be read"
        return [record for record in found if record is not None]


def read(run_dir: str | os.PathLike[str]) -> Run:
    """The run at ``run_dir``. ``FileNotFoundError`` where there is none: see ``is_run``."""
    path = Path(run_dir)
    if not path.is_dir():
        raise FileNotFoundError(f"there is no run directory {path}")
    if not is_run(path):
        raise FileNotFoundError(
            f"{path} is not a run directory: it has no run.json, metrics.jsonl or ranks/*.box"
        )
    info, why = runfile.read_json(path / "run.json")
    return Run(path, from_json(info), {"run.json": why} if why else {})


def is_run(path: Path) -> bool:
    """Whether a run was recorded in ``path``."""
    return (
        (path / "run.json").is_file()
        or (path / "metrics.jsonl").is_file()
        or any(path.glob("ranks/*.box"))
    )


def is_ours(path: Path) -> bool:
    """Whether miniray itself wrote the run: what nobody else would call a run is never deleted."""
    for box in path.glob("ranks/*.box"):
        try:
            with open(box, "rb") as file:
                if file.read(len(MAGIC)) == MAGIC:
                    return True
        except OSError:
            continue
    versions = runfile.read_json(path / "run.json")[0].get("versions")
    return isinstance(versions, dict) and "miniray" in versions


def find_runs(root: str | os.PathLike[str] = "runs") -> list[Run]:
    """All runs in ``root`` that can be read, newest first; [] where there is none, or no folder."""
    found = list(_each(Path(root)))
    return sorted(found, key=lambda run: (run.started or run.changed, run.name), reverse=True)


def _each(root: Path) -> Iterator[Run]:
    if root.is_dir():
        for path in sorted(root.iterdir()):
            if not path.name.startswith(".") and path.is_dir():
                try:
                    if is_run(path):
                        yield read(path)
                except PermissionError:  # somebody else's, in a folder of many
                    continue


def from_json(value: Any) -> Any:
    """Undo what the writer does to numbers JSON lacks: ``"NaN"`` and the like are numbers again."""
    if isinstance(value, str):
        if value.startswith("\\") and value.lstrip("\\") in WORDS:
            return value[1:]  # a text that only looks like one
        return WORDS.get(value, value)
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if isinstance(value, dict):
        return {key: from_json(item) for key, item in value.items()}
    return value


def _ended_by_trainer(rank: RankRecord) -> RankRecord:
    if rank.exit is None or rank.exit.kind != "gone":
        return rank
    return dataclasses.replace(rank, exit=dataclasses.replace(rank.exit, by_launcher=True))


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        record = from_json(json.loads(line))
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def unix_time(value: Any) -> float | None:
    """Of a moment as ``run.json`` has it; None of anything else."""
    try:
        return datetime.datetime.fromisoformat(value).timestamp()
    except (TypeError, ValueError):
        return None


def last_lines(path: Path, most: int) -> list[bytes]:
    """The last whole lines of a file, of ``most`` bytes; none where it cannot be read."""
    try:
        with open(path, "rb") as file:
            cut = os.fstat(file.fileno()).st_size - most
            file.seek(max(0, cut))
            lines = file.read().split(b"\n")
    except OSError:
        return []
    return lines[1:] if cut > 0 else lines


def _mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
