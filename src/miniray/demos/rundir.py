"""The folder of one run: made once, files in it written whole or not at all."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any


def create(root: Path, name: str | None, prefix: str) -> Path:
    """Make ``root/name``; without a name, one from ``prefix`` and the time.

    Raises ``FileExistsError`` for a name that is taken, ``ValueError`` for one that is no folder
    name. Two runs in the same second get different folders.
    """
    if name is not None:
        if name in ("", ".", "..") or Path(name).name != name:
            raise ValueError(
                f"{name!r} cannot be the name of a run: it must be a plain folder name"
            )
        try:
            (root / name).mkdir(parents=True)
        except FileExistsError:
            message = f"{root / name} exists already: choose another name, or delete it"
            raise FileExistsError(message) from None
        return root / name
    base = f"{prefix}-{time.strftime('%Y%m%d-%H%M%S')}"
    attempt = 1
    while True:
        folder = root / (base if attempt == 1 else f"{base}-{attempt}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            if not folder.is_dir():
                raise
            attempt += 1
        else:
            return folder


def write_text(path: Path, text: str) -> Path:
    """Write a file so that a reader sees the old content or all of the new one."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
    return path


def write_json(path: Path, value: Any) -> Path:
    return write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")
