"""Write ``run.json`` for a run without a trainer. ``miniray.runs`` reads it.

Trainers begin with the same fields (``train.rundir``). The file is always replaced as a whole. If
the process is killed, the state stays "running"; ``pid`` and ``process_started`` show whether the
process still exists.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miniray import __version__
from miniray.runs import files

FORMAT = 1


def write_run(
    run_dir: Path, world_size: int, launcher: str, seed: int | None = None, **config: Any
) -> None:
    """Say that the run has begun, in this process."""
    config = {"launcher": launcher, **config}
    begun = beginning(run_dir.name, seed, world_size, config)
    replace_text(run_dir / "run.json", _as_json({**begun, "attempts": []}))


def beginning(
    name: str, seed: int | None, world_size: int | None, config: Mapping[str, Any]
) -> dict[str, Any]:
    """What is known of a run when it begins, in this process."""
    import psutil

    return {
        "format": FORMAT,
        "name": name,
        "state": "running",
        "started": now(),
        "ended": None,
        "error": None,
        "seed": seed,
        "world_size": world_size,
        "config": dict(config),
        "versions": versions(),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "pid": os.getpid(),
        "process_started": psutil.Process().create_time(),
        "command": shlex.join(sys.orig_argv),
    }


def change_run(run_dir: Path, **fields: Any) -> None:
    """Change fields of ``run.json``; do nothing if it's missing or damaged."""
    path = run_dir / "run.json"
    try:
        run = files.parse_json(files.read_bytes(path))
    except (FileNotFoundError, ValueError):
        return
    if not isinstance(run, dict):
        return
    replace_text(path, _as_json({**run, **fields}))


def finish_run(run_dir: Path, state: str, error: str | None = None, **fields: Any) -> None:
    """Say how it ended: ``finished``, ``failed`` or ``interrupted``, and why."""
    shown = None if error is None else {"type": None, "message": error, "traceback": None}
    change_run(run_dir, state=state, ended=now(), error=shown, **fields)


def new_directory(root: Path, prefix: str) -> Path:
    """Make ``root/<prefix>-<YYYYmmdd-HHMMSS>``, with ``-2`` and so on within one second."""
    base = f"{prefix}-{time.strftime('%Y%m%d-%H%M%S')}"
    attempt = 1
    while True:
        path = root / (base if attempt == 1 else f"{base}-{attempt}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            if not path.is_dir():
                raise
            attempt += 1  # mkdir is what decides between two processes in one second
        else:
            return path


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")


def versions() -> dict[str, str | None]:
    """Without importing anything: torch alone would cost seconds."""
    found: dict[str, str | None] = {"python": platform.python_version(), "miniray": __version__}
    for package in ("torch", "numpy"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def replace_text(path: Path, text: str) -> None:
    """A reader sees the old content or all of the new one."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _as_json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n"
