"""One Arrow IPC file, in file or stream format: where its record batches are, and reading one.

Every read opens the file again. So threads share nothing, nothing stays open across a fork, and
the number of files isn't limited by descriptors. Files aren't mapped into memory: a map would end
the process with SIGBUS if the file is truncated while it is read.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import pyarrow as pa

from miniray.data.sources.files import is_remote
from miniray.data.sources.validation import (
    check_batch,
    check_names,
    create_change_error,
    get_first_line,
)
from miniray.errors import DataError

_ENDS = 1 << 16  # Bytes at each end of a file that identify its content.


class ArrowFile:
    """Read record batches of the file ``path``. All of them are checked when it is created.

    Args:
        path: Local path or fsspec URL.
        columns: Columns to read, or None for all. Columns that the file doesn't have are ignored.

    Attributes:
        schema: Schema of all columns.
        rows: Number of rows of each record batch.
        nbytes: Size in memory of each record batch.
        mark: Identifies the content; the same for a copy of the file.
    """

    def __init__(self, path: str, columns: Sequence[str] | None) -> None:
        self.path = path
        self.rows: list[int] = []
        self.nbytes: list[int] = []
        #: Where messages are in a stream: the schema and the dictionaries before each record
        #: batch, and the batch itself. Empty in the file format.
        self._messages: list[list[tuple[int, int]]] = []
        with self._open() as file:
            self._stamp = self._get_stamp()
            self.mark = _compute_mark(file)
            self._is_stream = file.read_at(6, 0) != b"ARROW1"
            file.seek(0)
            reader = pa.ipc.open_stream(file) if self._is_stream else pa.ipc.open_file(file)
            self.schema = reader.schema
            check_names(self.schema)
            names = [name for name in reader.schema.names if columns is None or name in columns]
            for batch in self._iter_batches(file, names):
                check_batch(batch, path, sum(self.rows))
                self.rows.append(batch.num_rows)
                self.nbytes.append(batch.nbytes)

    def read(self, number: int, names: Sequence[str]) -> Any:
        """Return columns of a record batch. Raise ``DataError`` if the file has changed."""
        first_row = list(accumulate(self.rows, initial=0))[number]
        with self._open(first_row) as file:
            stamp = self._get_stamp()
            if stamp != self._stamp:
                if _compute_mark(file) != self.mark:
                    raise create_change_error(self.path)
                self._stamp = stamp
            if self._is_stream:
                batch = self._read_message(file, number, names)
            else:
                batch = self._open_reader(file, names).get_batch(number)
            check_batch(batch, self.path, first_row)
        if batch.num_rows != self.rows[number]:
            raise create_change_error(self.path)
        return batch.select(list(names))

    @contextmanager
    def _open(self, row: int = -1) -> Iterator[Any]:
        """Open the file. Errors that occur while it is open become ``DataError``."""
        try:
            if is_remote(self.path):
                import fsspec

                opened = pa.PythonFile(fsspec.open(self.path, "rb").open(), mode="r")
            else:
                opened = pa.OSFile(self.path)
            with opened as file:
                if file.size() == 0:
                    raise DataError(
                        f"{self.path} is empty (0 bytes) and not an Arrow file.", self.path
                    )
                yield file
        except FileNotFoundError as error:
            raise DataError(f"{self.path} no longer exists", self.path, row) from error
        except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
            raise DataError(
                f"{self.path} can't be read as an Arrow file: {get_first_line(error)}. The file"
                " may be truncated or damaged, or not an Arrow file.",
                self.path,
                row,
            ) from error

    def _get_stamp(self) -> Any:
        if is_remote(self.path):
            return None
        found = os.stat(self.path)
        return found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns

    def _open_reader(self, file: Any, names: Sequence[str]) -> Any:
        fields = [n for n, name in enumerate(self.schema.names) if name in names]
        options = pa.ipc.IpcReadOptions(included_fields=fields)
        opened = pa.ipc.open_stream if self._is_stream else pa.ipc.open_file
        return opened(file, options=options)

    def _iter_batches(self, file: Any, names: Sequence[str]) -> Iterator[Any]:
        if not self._is_stream:
            reader = self._open_reader(file, names)
            yield from map(reader.get_batch, range(reader.num_record_batches))
            return
        file.seek(0)
        start = 0
        before: list[tuple[int, int]] = []
        for message in pa.ipc.MessageReader.open_stream(file):
            end = file.tell()
            if message.type == "record batch":
                self._messages.append([*before, (start, end)])
                yield self._read_message(file, len(self._messages) - 1, names)
                file.seek(end)
            else:
                before.append((start, end))
            start = end

    def _read_message(self, file: Any, number: int, names: Sequence[str]) -> Any:
        """Read a record batch of a stream as a separate stream, with all it depends on."""
        messages = self._messages[number]
        buffer = pa.allocate_buffer(sum(end - start for start, end in messages))
        view, at = memoryview(buffer), 0
        for start, end in messages:
            file.seek(start)
            if file.readinto(view[at : at + end - start]) != end - start:
                raise create_change_error(self.path)
            at += end - start
        return self._open_reader(buffer, names).read_next_batch()


def _compute_mark(file: Any) -> str:
    size = file.size()
    start = file.read_at(min(size, _ENDS), 0)
    end = file.read_at(min(size, _ENDS), max(0, size - _ENDS))
    return f"{size}-{zlib.crc32(end, zlib.crc32(start)):x}"
