"""What a run writes, so that whoever is killed leaves it readable: lines of JSON, and whole files.

A line is a record, written at once: a killed process leaves at most the last one torn. Readers pass
over it, and the next writer begins on a line of its own. Written lines survive SIGKILL of the
writer; those of the last seconds may be lost in a power cut.

What JSON lacks is written by these rules, which ``from_json`` turns round:

- NaN and the infinities are the strings ``"NaN"``, ``"Infinity"``, ``"-Infinity"``, so that any
  JSON reader can take the line. A text that looks like one of them gets a backslash in front.
- numpy and torch scalars, also as arrays of no dimension, become numbers.

These come back as something simpler: tuples and small arrays (up to 1000 numbers) as lists, larger
ones and other objects as a short text, keys as text. A record is never refused: an odd metric must
not end a run.
"""

from __future__ import annotations

import json
import math
import numbers
import os
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from miniray.files import replace_atomically, sync_directory
from miniray.runs import files
from miniray.runs.files import from_json

_LOOKS_LIKE_A_WORD = re.compile(r"\\*(NaN|-?Infinity)")
_LARGEST_ARRAY = 1000
_LONGEST_TEXT = 200
_LONGEST_INT = 10_000
_DEEPEST = 50


def number(value: Any) -> int | float | None:
    """``value`` as a Python number if it is one, else None. Booleans count as 0 and 1.

    Python's, numpy's and torch's numbers are, and their arrays of no dimension; complex ones,
    texts and arrays of one element are not.
    """
    if isinstance(value, numbers.Integral):  # also bool, and numpy's
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, numbers.Real):
        return as_float(value)
    if _array_shape(value) == ():
        value = value.item()
        return number(value) if isinstance(value, (int, float)) else None
    return None


def as_float(value: Any) -> float:
    """A number as a float: an infinity where it is beyond their range, as integers may be."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def finite(value: Any) -> float | None:
    """``value`` as a float if it is a finite number, else None."""
    plain = number(value)
    return as_float(plain) if plain is not None and math.isfinite(as_float(plain)) else None


def _array_shape(value: Any) -> tuple[int, ...] | None:
    """The shape of a numpy array, numpy scalar or torch tensor; None for anything else."""
    for module, name in (("numpy", "ndarray"), ("numpy", "generic"), ("torch", "Tensor")):
        # No object of a library that is not loaded can have come here.
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None and isinstance(value, kind):
            return tuple(value.shape)
    return None


def to_json(value: Any, depth: int = 0) -> Any:
    """``value`` as JSON can hold it; see the module for the rules. Never raises."""
    if value is None or isinstance(value, bool):
        return value
    plain = number(value)
    if isinstance(plain, float) and not math.isfinite(plain):
        return "NaN" if math.isnan(plain) else "Infinity" if plain > 0 else "-Infinity"
    if isinstance(plain, int) and plain.bit_length() > _LONGEST_INT:
        return hex(plain)  # Python refuses to write these in decimal
    if plain is not None:
        return plain
    if isinstance(value, str):
        return "\\" + value if _LOOKS_LIKE_A_WORD.fullmatch(value) else str(value)
    if depth < _DEEPEST:
        if isinstance(value, Mapping):
            return {str(key): to_json(item, depth + 1) for key, item in value.items()}
        if isinstance(value, (list, tuple, set, frozenset)):
            return [to_json(item, depth + 1) for item in value]
    shape = _array_shape(value)
    if shape is not None:
        try:
            if math.prod(shape) <= _LARGEST_ARRAY:
                return to_json(value.tolist(), depth + 1)
        except Exception:  # sparse, quantised, on a device that is gone: it is named instead
            pass
        return f"<{type(value).__name__} {value.dtype} {list(shape)}>"
    return _short_text(value)


def _short_text(value: Any) -> str:
    if isinstance(value, os.PathLike):
        return str(value)
    try:
        text = repr(value)
    except Exception:  # a user's __repr__
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _LONGEST_TEXT else text[: _LONGEST_TEXT - 1] + "…"


def simplify(value: Any) -> Any:
    """``value`` as it would come back from a record: plain values only, fit for a checkpoint."""
    return from_json(to_json(value))


def dump_line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(to_json(record), allow_nan=False).encode() + b"\n"


def append_record(path: Path, record: Mapping[str, Any]) -> None:
    """Add a line. Raises ``OSError`` naming ``path`` where the disk is full."""
    line = dump_line(record)
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = b"\n" + line  # a writer before was killed in mid-line
        written = os.write(descriptor, line)
        if written < len(line):  # the rest of the reason comes with the rest of the line
            os.write(descriptor, line[written:])
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(descriptor)


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return all whole records; [] if there is no file. Warn about damaged lines.

    May be called while another process writes.
    """
    try:
        found, damaged = files.read_records(path)
    except FileNotFoundError:
        return []
    if damaged:
        warnings.warn(f"{path}: passed over damaged lines {damaged}", stacklevel=2)
    return found


# -- files that are whole or not there: written aside, flushed to disk, renamed into place ---------


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
    """Replace a file with ``text``, encoded as UTF-8. Return the path."""
    replace_atomically(path, text.encode())
    return path


def flush(path: Path) -> None:
    """Have the file's content on the disk itself."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
