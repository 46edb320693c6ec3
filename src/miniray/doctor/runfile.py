"""Write ``run.json`` for a run without a trainer. ``miniray.runs`` reads it.

Trainers begin with the same fields (``train.rundir``). The file is always replaced as a whole. If
the process is killed, the state stays "running"; ``pid`` and ``process_started`` show whether the
process still exists.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import importlib.metadata
import json
import os
import platform
import re
import shlex
import socket
import sys
import time
import types
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from miniray import __version__
from miniray.files import replace_atomically
from miniray.runs import files

FORMAT = 1
#: Stands for a secret in ``run.json`` and in reports.
MASK = "***"
_SECRETS = ("password", "secret", "token", "key")
_DEEPEST = 20


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
        "config": mask_secrets(dict(config)),
        "versions": versions(),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "pid": os.getpid(),
        "process_started": psutil.Process().create_time(),
        "command": shlex.join(mask_arguments(sys.orig_argv)),
    }


def mask_secrets(value: Any, name: str = "", depth: int = 0) -> Any:
    """Return ``value`` with the strings replaced whose name ends in a word such as "token".

    Names are keys of mappings, and attributes of dataclasses and of what ``argparse`` returns.
    ``value`` is unchanged.
    """
    if isinstance(value, str):
        return MASK if value and _is_secret(name) else value
    if depth == _DEEPEST:  # a container may contain itself
        return value
    if isinstance(value, Mapping):
        return {key: mask_secrets(item, str(key), depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [mask_secrets(item, name, depth + 1) for item in value]
        return items if isinstance(value, list) else tuple(items)
    has_fields = is_dataclass(value) and not isinstance(value, type)
    if has_fields or isinstance(value, (argparse.Namespace, types.SimpleNamespace)):
        return _mask_attributes(value, depth)
    return value


def _mask_attributes(value: Any, depth: int) -> Any:
    """Return ``value``, or a copy if an attribute is a secret."""
    attributes = getattr(value, "__dict__", {})  # a class with slots has none
    masked = {n: mask_secrets(item, n, depth + 1) for n, item in attributes.items()}
    changed = {n: item for n, item in masked.items() if item is not attributes[n]}
    if not changed:
        return value
    value = copy.copy(value)
    value.__dict__.update(changed)  # also if the dataclass is frozen
    return value


def mask_command(command: str) -> str:
    """Return a command line with its secrets masked."""
    return " ".join(mask_arguments(command.split(" ")))


def mask_arguments(arguments: Sequence[str]) -> list[str]:
    """Mask the value of ``--name=value`` and ``--name value`` if the name is that of a secret."""
    masked: list[str] = []
    for before, argument in zip(["", *arguments], arguments, strict=False):
        name, equals, value = argument.partition("=")
        if equals and value and _is_secret(name):
            argument = f"{name}={MASK}"
        elif before.startswith("-") and not argument.startswith("-") and _is_secret(before):
            argument = MASK
        masked.append(argument)
    return masked


def _is_secret(name: str) -> bool:
    """Return True for ``hf_token``, ``secretKey`` and ``API_KEY``, but not for ``tokenizer``."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+", name)
    return bool(words) and words[-1].lower() in _SECRETS


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
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(mode=0o700)
        except FileExistsError:
            if not path.is_dir():
                raise
            attempt += 1  # mkdir is what decides between two processes in one second
        else:
            return path


def make_private(path: Path) -> None:
    """Create a run directory for this user only. Leave an existing directory as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)


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
    """Replace a file. Readers see the old content or all of the new one."""
    replace_atomically(path, text.encode(), sync=False)


def _as_json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n"
