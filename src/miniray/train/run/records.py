"""Write the files of a run so that they stay readable if the process is killed.

Records are lines of JSON, each written with one system call. A killed process leaves at most one
incomplete line. Readers skip it, and the next writer starts a new line. Written lines survive
SIGKILL of the writer, but the last seconds may be lost in a power failure.

Values that JSON doesn't support are written by these rules, which ``from_json`` reverts:

- NaN and infinities are the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, so that any JSON
  parser can read the line. Strings that look like one of them get a leading backslash.
- NumPy and torch scalars, including zero-dimensional arrays, become numbers.

Other values are simplified: tuples and small arrays (up to 1000 numbers) become lists, larger
arrays and other objects become short strings, and keys become strings. Writing a record never
raises an error because of its values, since an unusual metric must not stop a run.
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
    """Return ``value`` as a Python number, or None if it isn't a number. Booleans are 0 and 1.

    Numbers of Python, NumPy and torch and zero-dimensional arrays are numbers. Complex numbers,
    strings and arrays with one element aren't.
    """
    if isinstance(value, numbers.Integral):  # including bool and NumPy integers
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
    """Return a number as a float. Integers that are out of range become an infinity."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def finite(value: Any) -> float | None:
    """Return ``value`` as a float if it is a finite number, else None."""
    plain = number(value)
    return as_float(plain) if plain is not None and math.isfinite(as_float(plain)) else None


def _array_shape(value: Any) -> tuple[int, ...] | None:
    """Return the shape of a NumPy array, NumPy scalar or torch tensor, or None for other values."""
    for module, name in (("numpy", "ndarray"), ("numpy", "generic"), ("torch", "Tensor")):
        # If a library isn't loaded, ``value`` can't be one of its objects.
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None and isinstance(value, kind):
            return tuple(value.shape)
    return None


def to_json(value: Any, depth: int = 0) -> Any:
    """Convert ``value`` to values that JSON supports; see the module for the rules. Never raise."""
    if value is None or isinstance(value, bool):
        return value
    plain = number(value)
    if isinstance(plain, float) and not math.isfinite(plain):
        return "NaN" if math.isnan(plain) else "Infinity" if plain > 0 else "-Infinity"
    if isinstance(plain, int) and plain.bit_length() > _LONGEST_INT:
        return hex(plain)  # Python doesn't convert integers of this size to decimal
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
        except Exception:  # for example a sparse or quantized tensor: only describe it
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
    """Return ``value`` as it would be read from a record, with plain values only."""
    return from_json(to_json(value))


def dump_line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(to_json(record), allow_nan=False).encode() + b"\n"


def append_record(path: Path, record: Mapping[str, Any]) -> None:
    """Append a line. Raise ``OSError`` with ``path`` if writing fails, as on a full disk."""
    line = dump_line(record)
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = b"\n" + line  # an earlier writer was killed while it wrote a line
        written = os.write(descriptor, line)
        if written < len(line):  # writing the rest raises the error
            os.write(descriptor, line[written:])
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(descriptor)


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return all complete records, or [] if the file doesn't exist. Warn about damaged lines.

    A different process may write at the same time.
    """
    try:
        found, damaged = files.read_records(path)
    except FileNotFoundError:
        return []
    if damaged:
        warnings.warn(f"{path}: skipped damaged lines {damaged}", stacklevel=2)
    return found


# -- atomic writes: write a temporary file, flush it to disk and rename it -------------------------


def replace_path(path: Path, write: Callable[[Path], object]) -> None:
    """Replace ``path`` with the file that ``write(temporary_path)`` creates.

    The replacement is atomic: if writing fails or the machine crashes, ``path`` is unchanged. A
    killed process may leave a file ``.<name>.<pid>.partial``, which is never read.
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
    """Flush the contents of a file to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
