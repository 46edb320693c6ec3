"""Open files for pyarrow, and check what it reads before values are used.

Arrow trusts the offsets, dictionary indices and text of a file. Using damaged ones returns memory
of other values, raises exceptions of any type, or ends the process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from miniray.data.sources.files import is_remote
from miniray.errors import DataError


def open_file(path: str) -> Any:
    """Open a file for pyarrow. Raise ``DataError`` if it is empty.

    Files aren't mapped: a map would end the process with SIGBUS if the file is truncated.
    """
    if is_remote(path):
        import fsspec

        file = pa.PythonFile(fsspec.open(path, "rb").open(), mode="r")
    else:
        file = pa.OSFile(path)
    if not file.size():
        raise DataError(f"{path} is empty (0 bytes).", path)
    return file


@contextmanager
def convert_errors(path: str, format: str, place: str = "", row: int = -1) -> Iterator[None]:
    """Convert errors of reading ``path`` to ``DataError`` with the file and ``row``."""
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(f"File {path} no longer exists.", path, row) from error
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:  # names can be damaged
        raise DataError(
            f"{path}{place} can't be read as {format}: {_get_first_line(error)}. The file may be"
            " truncated, damaged or encrypted, or have a different format.",
            path,
            row,
        ) from error


def check_batch(batch: Any, file: str, first_row: int) -> None:
    """Raise ``DataError`` with file and row unless all values of the record batch are valid.

    Args:
        batch: Record batch that was read from ``file``.
        file: Path of the file.
        first_row: Index in the file of the first row of ``batch``.
    """
    if (error := _find_error(batch)) is not None:
        # 0 if only the whole batch is invalid.
        invalid = (i for i in range(batch.num_rows) if _find_error(batch.slice(i, 1)) is not None)
        row = first_row + next(invalid, 0)
        raise DataError(
            f"{file}, row {row}: the file is damaged: {_get_first_line(error)}.", file, row
        ) from error


def _find_error(batch: Any) -> Exception | None:
    try:
        batch.validate(full=True)
    except pa.ArrowException as error:
        found: Exception = error
        return found
    return None


def _get_first_line(error: BaseException) -> str:
    """Return the first line of the message without its period, or the type if it's empty."""
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
