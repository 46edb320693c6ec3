"""Files that are whole or not there: written aside, flushed to disk, renamed into place."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, TypeVar

T = TypeVar("T")


def replace_file(path: Path, write: Callable[[BinaryIO], T]) -> T:
    """Give ``path`` the content that ``write(file)`` writes; returns what ``write`` returns.

    If anything raises, or the machine stops, ``path`` is as it was: a reader sees the old content
    or all of the new one. A killed process may leave ``.<name>.<pid>.partial`` behind, which
    nobody reads.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as file:
            result = write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)
    return result


def replace_text(path: Path, text: str) -> Path:
    """``replace_file`` with a text, as UTF-8."""
    replace_file(path, lambda file: file.write(text.encode()))
    return path


def sync_directory(path: Path) -> None:
    """Make renames in ``path`` survive a power cut; a file system that cannot is let off."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:  # some network file systems refuse this on directories
        pass
    finally:
        os.close(descriptor)
