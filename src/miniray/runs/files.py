"""Read files that any process may have written, truncated or replaced.

Only regular files are read, up to a limit of bytes. Links are followed.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

#: Largest size of a file that is read whole, such as ``run.json``.
MAX_FILE_BYTES = 16 << 20
#: Largest size of a line in a ``.jsonl`` file, and of the whole file.
MAX_LINE_BYTES = 4 << 20
MAX_LINES_BYTES = 1 << 30
#: Levels of nested JSON.
MAX_DEPTH = 64

#: Numbers that JSON lacks are written as strings.
NUMBER_WORDS = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}
_ESCAPED_WORD = re.compile(r"\\+(NaN|-?Infinity)")
_SURROGATE = re.compile("[\ud800-\udfff]")


def open_file(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file for reading. Raise ``OSError`` for anything else, without blocking."""
    # A FIFO without a writer would block open() without O_NONBLOCK.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    descriptor = os.open(path, flags)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def is_file(path: Path) -> bool:
    """Return whether ``path`` is a regular file in a directory that may be searched."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def read_bytes(path: str | os.PathLike[str], limit_bytes: int = MAX_FILE_BYTES) -> bytes:
    """Return the content of a regular file. Raise ``OSError`` if it's larger than the limit."""
    with open_file(path) as file:
        data = file.read(limit_bytes + 1)
    if len(data) > limit_bytes:
        raise OSError(errno.EFBIG, f"larger than {limit_bytes:,} bytes", os.fspath(path))
    return data


def read_text(path: str | os.PathLike[str], limit_bytes: int = MAX_FILE_BYTES) -> str:
    """Return the content of a regular file as text. Bytes that aren't UTF-8 are replaced."""
    return read_bytes(path, limit_bytes).decode("utf-8", "replace")


def read_last_lines(path: Path, limit_bytes: int) -> list[bytes]:
    """Return the whole lines in the last ``limit_bytes`` of a file; [] if it can't be read."""
    try:
        with open_file(path) as file:
            start = os.fstat(file.fileno()).st_size - limit_bytes
            file.seek(max(0, start))
            lines = file.read(limit_bytes).split(b"\n")
    except OSError:
        return []
    return lines[1:] if start > 0 else lines


def parse_json(data: bytes | str) -> Any:
    """Parse JSON from a file. Raise ``ValueError`` if it's malformed or nested too deeply."""
    try:
        value = json.loads(data)
    except RecursionError:
        raise ValueError(f"nested more than {MAX_DEPTH} levels deep") from None
    # Readers walk values recursively, so the depth is limited here once for all of them.
    level, depth = [value], 0
    while level := [item for value in level for item in _children(value)]:
        depth += 1
        if depth >= MAX_DEPTH:
            raise ValueError(f"nested more than {MAX_DEPTH} levels deep")
    return value


def _children(value: Any) -> Iterator[Any]:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (item for item in items if isinstance(item, (dict, list)))


def from_json(value: Any) -> Any:
    """Convert a parsed value back to what was written: ``"NaN"`` becomes a number, for example."""
    if isinstance(value, str):
        if value in NUMBER_WORDS:
            return NUMBER_WORDS[value]
        if _ESCAPED_WORD.fullmatch(value):
            return value[1:]  # a string that only looks like a number
        # Half of a surrogate pair is valid in JSON, but can't be printed.
        return _SURROGATE.sub("\N{REPLACEMENT CHARACTER}", value)
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if isinstance(value, dict):
        return {from_key(key): from_json(item) for key, item in value.items()}
    return value


def from_key(key: str) -> str:
    return _SURROGATE.sub("\N{REPLACEMENT CHARACTER}", key)


def read_json(path: str | os.PathLike[str]) -> tuple[dict[str, Any], str]:
    """Return the JSON object in a file, and why it can't be read.

    Both are empty if there is no file.
    """
    try:
        found = from_json(parse_json(read_bytes(path)))
    except FileNotFoundError:
        return {}, ""
    except OSError as error:
        return {}, error.strerror or str(error)
    except ValueError as error:
        return {}, str(error)
    return (found, "") if isinstance(found, dict) else ({}, "not a JSON object")


def parse_record(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object on a line of a ``.jsonl`` file; None if it holds something else."""
    try:
        record = from_json(parse_json(line))
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def read_records(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """Return the JSON objects of a ``.jsonl`` file, and the numbers of its damaged lines.

    A last line that isn't complete is skipped: a process may be writing it. Raises ``OSError`` if
    the file can't be read or is larger than ``MAX_LINES_BYTES``.
    """
    found: list[dict[str, Any]] = []
    damaged: list[int] = []
    with open_file(path) as file:
        if os.fstat(file.fileno()).st_size > MAX_LINES_BYTES:
            raise OSError(errno.EFBIG, f"larger than {MAX_LINES_BYTES:,} bytes", os.fspath(path))
        number, skipping = 0, False
        while line := file.readline(MAX_LINE_BYTES):
            number += not skipping
            ended = line.endswith(b"\n")
            if skipping or (not ended and len(line) == MAX_LINE_BYTES):
                if not skipping:
                    damaged.append(number)
                skipping = not ended
                continue
            if not line.strip():
                continue
            record = parse_record(line)
            if record is not None:
                found.append(record)
            elif ended:
                damaged.append(number)
    return found, damaged
