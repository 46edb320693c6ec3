"""Find runs in a folder. ``latest`` is the first run of the list in every command."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miniray.runs.run_info import get_mtime, get_state, parse_time, read_run_info


@dataclasses.dataclass(frozen=True)
class RunEntry:
    """A run directory and its ``run.json``."""

    path: Path
    info: Mapping[str, Any]  #: valid fields of run.json; empty if there is none
    problem: str  #: what is wrong with run.json; "" if nothing is

    @property
    def name(self) -> str:
        return self.path.absolute().name

    @property
    def state(self) -> str:
        """One of ``STATES``."""
        return get_state(self.info)

    @property
    def started(self) -> float | None:
        return parse_time(self.info.get("started"))

    @property
    def changed(self) -> float:
        """Time of the last change of any file that belongs to the record of the run."""
        names = ("run.json", "metrics.jsonl", "events.jsonl", "ranks")
        times = [get_mtime(self.path / name) for name in names]
        times += [get_mtime(record) for record in find_records(self.path)]
        return max(times) or get_mtime(self.path)

    @property
    def order(self) -> tuple[float, str]:
        """Key that sorts runs by age."""
        return self.started or self.changed, self.name


def is_run(path: Path) -> bool:
    """Return whether ``path`` contains a run, intact or damaged."""
    named = any(os.path.lexists(path / name) for name in ("run.json", "metrics.jsonl"))
    return named or bool(find_records(path))


def find_records(run_dir: Path) -> list[Path]:
    """Return the paths of all rank records of a run; [] if they can't be listed."""
    folder = run_dir / "ranks"
    try:
        return sorted(folder / name for name in os.listdir(folder) if name.endswith(".box"))
    except OSError:
        return []


def read_entry(path: Path) -> RunEntry:
    return RunEntry(path, *read_run_info(path))


def list_runs(root: str | os.PathLike[str] = "runs") -> list[RunEntry]:
    """Return all runs in ``root``, newest first; [] if there is no such folder."""
    root = Path(root)
    folders = [path for path in root.iterdir() if path.is_dir()] if root.is_dir() else []
    found = [read_entry(path) for path in folders if not path.name.startswith(".") and is_run(path)]
    return sorted(found, key=lambda entry: entry.order, reverse=True)
