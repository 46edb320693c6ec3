"""The fields of ``run.json``, validated, and the state of the run."""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from miniray.runs import files

#: More ranks than any training job has. Readers make lists of ranks, so the number is limited.
MAX_WORLD_SIZE = 1 << 17
STATES = ("running", "finished", "failed", "interrupted", "preempted", "died", "unknown")
_MAX_PID = 1 << 31


def is_world_size(value: Any) -> bool:
    """Return whether ``value`` can be the number of ranks of a run; 0 means it isn't known."""
    return type(value) is int and 0 <= value <= MAX_WORLD_SIZE


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_error(value: Any) -> bool:
    return isinstance(value, dict) and all(
        value.get(key) is None or isinstance(value[key], str)
        for key in ("type", "message", "traceback")
    )


def _is_state(value: Any) -> bool:
    return value in STATES


def _is_list_of_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _is_pid(value: Any) -> bool:
    return type(value) is int and 0 < value < _MAX_PID


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e15  # False for NaN


#: Fields that readers rely on. A field that is missing or None isn't known.
_FIELDS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(
        ("name", "host", "platform", "command", "kind", "stop_reason", "started", "ended"), _is_text
    ),
    "state": _is_state,
    "world_size": is_world_size,
    "pid": _is_pid,
    "process_started": _is_number,
    "error": _is_error,
    "attempts": _is_list_of_objects,
    **dict.fromkeys(("config", "versions", "sync"), lambda value: isinstance(value, dict)),
}


def read_run_info(run_dir: Path) -> tuple[dict[str, Any], str]:
    """Return the fields of ``run.json``, and what is wrong with the file.

    Both are empty if there is no file. Fields of a wrong type are left out and named.
    """
    info, problem = files.read_json(run_dir / "run.json")
    wrong = [
        key
        for key, is_valid in _FIELDS.items()
        if info.get(key) is not None and not is_valid(info[key])
    ]
    if wrong:
        shown = ", ".join(f"{key} is {_shorten(info.pop(key))}" for key in wrong)
        problem = f"invalid values: {shown}"
    return info, problem


def _shorten(value: Any, longest: int = 60) -> str:
    # repr() of an integer with thousands of digits raises.
    text = hex(value) if type(value) is int and value.bit_length() > 64 else repr(value)
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def get_state(info: Mapping[str, Any]) -> str:
    """Return the state in ``run.json``, or ``died`` if its process no longer runs.

    The processes of a run on a different machine can't be seen: such a run stays ``running``.
    """
    state = str(info.get("state") or "unknown")
    if state == "running" and info.get("host") == socket.gethostname() and not _is_alive(info):
        return "died"
    return state


def _is_alive(info: Mapping[str, Any]) -> bool:
    import psutil

    try:
        process = psutil.Process(info["pid"])
        # Process ids are reused. The time the process started tells two of them apart.
        same = abs(process.create_time() - info["process_started"]) < 1.0
        return same and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, KeyError, TypeError):
        return False


def parse_time(value: Any) -> float | None:
    """Return the Unix time of a moment in ``run.json``; None for anything else."""
    try:
        moment = datetime.datetime.fromisoformat(value).timestamp()
    except (TypeError, ValueError, OverflowError, OSError):
        return None
    return moment if 0 <= moment < 1e11 else None


def get_mtime(path: Path) -> float:
    """Return the time of the last modification; 0 if the file doesn't exist."""
    try:
        return os.stat(path).st_mtime
    except (OSError, ValueError):
        return 0.0
