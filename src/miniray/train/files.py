"""Files that are whole or not there: written aside, flushed to disk, renamed into place."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def replace_path(path: Path, write: Callable[[Path], object]) -> None:
    """Give ``path`` the content of the file that ``write(where)`` makes.

    If anything raises, or the machine stops, ``path`` is as it was: a reader sees the old content
    or all of the new one. A killed process may leave ``.<name>.<pid>.partial`` behind, which
    nobody reads.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.unlink(missing_ok=True)
    try:
        write(partial)
        flush(partial)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def replace_text(path: Path, text: str) -> Path:
    """``replace_path`` with a text, as UTF-8."""
    replace_path(path, lambda aside: aside.write_text(text, "utf-8"))
    return path


def flush(path: Path) -> None:
    """Have the file's content on the disk itself."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(path: Path) -> None:
    """Make renames in ``path`` survive a power cut; a file system that cannot is let off."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:  # some network file systems refuse this on directories
        pass
    finally:
        os.close(descriptor)
