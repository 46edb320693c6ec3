"""Check record batches from files before their values are used, and free their memory.

Arrow trusts the offsets, dictionary indices and text of a file. Using damaged ones returns memory
of other values, raises exceptions of any type, or ends the process.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from miniray.errors import DataError


def check_batch(batch: Any, file: str, first_row: int) -> None:
    """Raise ``DataError`` with file and row unless all values of the record batch are valid.

    Args:
        batch: Record batch that was read from ``file``.
        file: Path of the file.
        first_row: Index in the file of the first row of ``batch``.
    """
    if (error := _find_error(batch)) is not None:
        row = first_row + _find_row(batch)
        raise DataError(
            f"{file}, row {row}: the file is damaged: {get_first_line(error)}", file, row
        ) from error


def check_names(fields: Iterable[Any]) -> None:
    """Raise ``UnicodeDecodeError`` or ``ArrowInvalid`` if structs in ``fields`` can't become dicts.

    Args:
        fields: Fields of a schema or a type.
    """
    import pyarrow as pa

    for field in fields:
        kind = getattr(field.type, "storage_type", field.type)
        children = [kind.field(i) for i in range(kind.num_fields)]
        names = [child.name for child in children]
        if pa.types.is_struct(kind) and len(set(names)) < len(names):
            raise pa.ArrowInvalid(f"column {field.name!r} has several fields of the same name")
        check_names(children)


def _find_error(batch: Any) -> Exception | None:
    import pyarrow as pa

    try:
        batch.validate(full=True)
    except pa.ArrowException as error:
        found: Exception = error
        return found
    return None


def _find_row(batch: Any) -> int:
    """Return the index of the first invalid row, or 0 if only the whole batch is invalid."""
    rows = range(batch.num_rows)
    return next((row for row in rows if _find_error(batch.slice(row, 1)) is not None), 0)


def create_change_error(path: str) -> DataError:
    """Return the error for a file that was changed."""
    return DataError(
        f"{path} has changed its size or content since the dataset was created. Don't write to the"
        " files of a run.",
        path,
    )


def release_unused() -> None:
    """Return memory that Arrow has freed to the system. Its pool would keep it."""
    import pyarrow as pa

    pa.default_memory_pool().release_unused()


def get_first_line(error: BaseException) -> str:
    """Return the first line of the message without its period, or the type if it's empty."""
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
