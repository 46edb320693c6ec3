"""Reading a run directory: every rank's box, what its launcher saw of its end, and ``run.json``.

A box that cannot be read is an entry of ``RunRecord.damaged``.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path

from miniray.doctor import processes, runfile
from miniray.doctor.box_reader import BoxReader
from miniray.doctor.model import RankRecord, RunRecord
from miniray.errors import BoxError

_NAME = re.compile(r"(\d+)(\.\d+)?\.box")  # of a second process that claims the rank: 0.<pid>.box


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
