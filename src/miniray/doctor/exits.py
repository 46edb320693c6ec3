"""How a rank ended: by its own word, by its launcher's, and by the run's."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miniray.doctor.model import NOWHERE, Exit, Process, RankRecord, Site


def said(own: Mapping[str, Any]) -> Exit:
    """What the process itself wrote into its box."""
    return Exit(
        kind=own.get("kind", "exit"),
        code=own.get("code"),
        signal=own.get("signal", ""),
        type=own.get("type", ""),
        message=own.get("message", ""),
        site=Site(*own["site"]) if own.get("site") else NOWHERE,
        traceback=own.get("traceback", ""),
        at=own.get("at"),
    )


def seen_of(box: Path) -> dict[str, Any] | None:
    """What the launcher noted of the end of this box's process; None where it noted nothing."""
    try:
        return dict(json.loads(box.with_suffix(".exit").read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError):
        return None


def merged(said: Exit | None, seen: Mapping[str, Any] | None, process: Process) -> Exit | None:
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


def ended_well(record: RankRecord) -> RankRecord:
    """A worker that ended unseen, in a run that wrote a good end: its driver ended it.

    Where rank 0 itself is all that wrote it, nobody knows what became of the others.
    """
    driven = record.launcher in ("miniray", "ray")
    if record.exit is None or record.exit.kind != "gone" or not driven:
        return record
    ended = dataclasses.replace(record.exit, kind="finished", at=record.heartbeat)
    return dataclasses.replace(record, exit=ended)
