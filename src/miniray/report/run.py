"""Read a run directory for reports and for lists of runs.

Missing files are treated as empty files. ``Run.damaged`` lists the files that can't be read. If the
last line of a file is incomplete, the line is skipped.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import socket
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from miniray.doctor import runfile
from miniray.doctor.layout import MAGIC
from miniray.doctor.model import RankRecord, RunRecord
from miniray.doctor.reader import read_run
from miniray.report.series import Curve, extract_curves, find_axis, find_unit, merge_records
from miniray.runs import files
from miniray.runs.listing import RunEntry, find_records, is_run, list_runs, read_entry
from miniray.runs.run_info import parse_time

_NO_KIND = ("", "given")  #: ``attach`` records "given" if the script passes the rank itself
_TAIL_BYTES = 65536  #: number of bytes to read at the end of metrics.jsonl for its last lines


@dataclasses.dataclass(frozen=True)
class Run(RunEntry):
    """A run directory. Metrics, events and rank records are read when they are first accessed."""

    @cached_property
    def damaged(self) -> dict[str, str]:
        """The files that couldn't be read. Maps the name of each file to the reason."""
        return {"run.json": self.problem} if self.problem else {}

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        return self._lines("metrics.jsonl")

    @cached_property
    def steps(self) -> list[dict[str, Any]]:
        """The lines of ``steps.jsonl``: means over a few steps, and scores at a step."""
        return self._lines("steps.jsonl")

    @cached_property
    def epochs(self) -> list[dict[str, Any]]:
        """The lines of ``metrics.jsonl`` with epochs numbered as people count them, from 1.

        Only trainers are known to count epochs from 0. The numbers of other scripts are unchanged.
        """
        return [self.number_epoch(record) for record in self.metrics]

    def number_epoch(self, record: dict[str, Any]) -> dict[str, Any]:
        """Return a line of a file in which a trainer's epoch 0 is epoch 1."""
        epoch = record.get("epoch")
        if "trainer" not in self.config or not isinstance(epoch, int) or isinstance(epoch, bool):
            return record
        return {**record, "epoch": epoch + 1}

    @cached_property
    def records(self) -> list[Mapping[str, Any]]:
        """All lines that charts show, of epochs and of steps."""
        return merge_records(self.epochs, [self.number_epoch(record) for record in self.steps])

    @cached_property
    def curves(self) -> list[Curve]:
        return extract_curves(self.records)

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        return self._lines("events.jsonl")

    @cached_property
    def record(self) -> RunRecord:
        """The records of all ranks.

        A trainer kills its workers after every run, whether the run succeeded or failed. Therefore,
        a missing exit record doesn't mean that the rank has failed.
        """
        found = read_run(self.path)
        over = self.info.get("state") in ("failed", "interrupted", "preempted")
        over = over and "trainer" in self.config
        if not over:
            return found
        ranks = {number: _ended_by_trainer(rank) for number, rank in found.ranks.items()}
        return dataclasses.replace(found, ranks=ranks)

    @cached_property
    def state(self) -> str:
        """The state that ``run.json`` contains.

        If ``run.json`` contains no state, it is derived from the rank records.
        """
        if self.info.get("state"):
            return super().state
        ends = [rank.exit for rank in self.record]
        if any(rank.alive for rank in self.record):
            return "running"
        if not ends:
            return "unknown"
        return "failed" if any(end is not None and end.failed for end in ends) else "finished"

    @property
    def started(self) -> float | None:
        """Unix time of the start of the run.

        If ``run.json`` is missing, this is the start time of the first rank record.
        """
        found = super().started
        if found is not None or self.info:
            return found
        return min((rank.attached for rank in self.record), default=None)

    @property
    def ended(self) -> float | None:
        """Unix time of the end of the run, or None if the run is in progress or was killed."""
        return parse_time(self.info.get("ended"))

    @property
    def seconds(self) -> float | None:
        """Duration of the run in seconds.

        If the run is in progress, the duration is the time since its start. If the run died, the
        duration ends with the last heartbeat or the last change of a file.
        """
        started = self.started
        if started is None:
            return None
        ended = self.ended
        if ended is None and self.state == "running":
            ended = datetime.datetime.now().timestamp()
        if ended is None:  # heartbeats don't change the mtime of a record
            ended = max([self.changed, *(rank.heartbeat for rank in self.record)])
        return max(0.0, ended - started)

    @property
    def config(self) -> Mapping[str, Any]:
        config: Mapping[str, Any] = runfile.mask_secrets(self.info.get("config") or {})
        return config

    @cached_property
    def unit(self) -> str:
        """The unit that each line of metrics describes, such as "epoch" or "step".

        A trainer may define a different name for its epochs.
        """
        found, unit = find_unit(self.metrics), self.config.get("unit")
        return unit if found == "epoch" and isinstance(unit, str) else found

    @property
    def has_steps_as_epochs(self) -> bool:
        """Whether each epoch of the trainer is a step of the run, as in reinforcement learning."""
        return self.config.get("unit") == "step"

    @cached_property
    def axis(self) -> str:
        """The title of the x axis of the curves: the global step if the run has one."""
        found = find_axis(self.records)
        return self.unit if found == "epoch" else found

    @property
    def world_size(self) -> int:
        return self.info.get("world_size") or self.record.world_size

    @property
    def kind(self) -> str:
        """The trainer, launcher or command that started the run."""
        for name in (*map(self.config.get, ("trainer", "launcher")), self.info.get("kind")):
            if isinstance(name, str) and name not in _NO_KIND:
                return name
        launchers = (rank.launcher for rank in self.record)
        return next((name for name in launchers if name not in _NO_KIND), "")

    def last_metrics(self) -> dict[str, Any]:
        """Return the last line of ``metrics.jsonl`` without reading the entire file."""
        lines = files.read_last_lines(self.path / "metrics.jsonl", _TAIL_BYTES)
        return next((found for line in reversed(lines) if (found := files.parse_record(line))), {})

    @property
    def living(self) -> str:
        """A description of the processes that are still running, or "" if none are known."""
        pids = [rank.pid for rank in self.record if rank.process.alive]
        here = self.info.get("host") == socket.gethostname()
        if self.state == "running" and here and "pid" in self.info:
            pids.insert(0, self.info["pid"])
        if pids:
            shown = ", ".join(map(str, pids[:4])) + ", …" * (len(pids) > 4)
            return f"process{'es' * (len(pids) > 1)} {shown}"
        elsewhere = [r for r in self.record if r.process.alive is None and r.alive]
        fresh = datetime.datetime.now().timestamp() - self.changed < 300
        if fresh and (elsewhere or self.state == "running"):
            return f"on {self.info.get('host') or elsewhere[0].host}, according to its files"
        return ""

    def _lines(self, name: str) -> list[dict[str, Any]]:
        try:
            found, bad = files.read_records(self.path / name)
        except FileNotFoundError:
            return []
        except OSError as error:
            self.damaged[name] = error.strerror or str(error)
            return []
        if bad:
            shown = ", ".join(map(str, bad[:5])) + ", …" * (len(bad) > 5)
            self.damaged[name] = f"can't read line{'s' * (len(bad) > 1)} {shown}"
        return found


def read(run_dir: str | os.PathLike[str]) -> Run:
    """Return the run in the directory ``run_dir``.

    Raise ``FileNotFoundError`` if the directory doesn't exist or doesn't contain a run.
    """
    path = Path(run_dir)
    if not path.is_dir():
        raise FileNotFoundError(f"Run directory {path} doesn't exist.")
    if not is_run(path):
        raise FileNotFoundError(
            f"{path} isn't a run directory: it contains no run.json, metrics.jsonl or ranks/*.box."
        )
    return _from_entry(read_entry(path))


def find_runs(root: str | os.PathLike[str] = "runs") -> list[Run]:
    """Return all runs in the directory ``root``, starting with the newest.

    Return [] if the directory doesn't exist.
    """
    return [_from_entry(entry) for entry in list_runs(root)]


def _from_entry(entry: RunEntry) -> Run:
    return Run(entry.path, entry.info, entry.problem)


def is_created_by_miniray(path: Path) -> bool:
    """Return True if miniray wrote the run directory. Only such directories may be deleted."""
    for record in find_records(path):
        try:
            with files.open_file(record) as file:
                if file.read(len(MAGIC)) == MAGIC:
                    return True
        except OSError:
            continue
    return "miniray" in (read_entry(path).info.get("versions") or {})


def _ended_by_trainer(rank: RankRecord) -> RankRecord:
    if rank.exit is None or rank.exit.kind != "gone":
        return rank
    return dataclasses.replace(rank, exit=dataclasses.replace(rank.exit, by_launcher=True))
