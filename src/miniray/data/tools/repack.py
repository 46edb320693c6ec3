"""Rewrite Parquet files into row groups of about 8 MB."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from miniray.data.sources.base import BLOCK_BYTES, parse_bytes
from miniray.data.sources.files import Spec
from miniray.data.sources.parquet import ParquetSource
from miniray.errors import DataError

#: Rows per page, so that decoding a page takes little memory.
_PAGE_ROWS = 64


def repack_files(
    files: Spec, output: str | os.PathLike[str], file_bytes: int | str = "512MB"
) -> list[Path]:
    """Rewrite files into row groups of about 8 MB, preserving row order and schema.

    Small files are merged, and a new file is started after ``file_bytes`` of decoded rows. Each
    file is written to a temporary file and renamed.

    Args:
        files: Parquet files; see ``ParquetDataset``.
        output: Directory to write to, which must not exist or be empty.
        file_bytes: Decoded bytes per file.

    Returns:
        The files that were written.
    """
    limit = parse_bytes(file_bytes, "file_bytes")
    source = ParquetSource(files)
    directory = Path(output)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise DataError(f"{directory} isn't an empty directory.", str(directory))
    directory.mkdir(parents=True, exist_ok=True)
    schema = pq.read_schema(source.files[0])
    written: list[Path] = []
    writer: _FileWriter | None = None
    try:
        for batches in _iter_row_groups(source):
            if writer is None:
                path = directory / f"part-{len(written):05}.parquet"
                writer = _FileWriter(path, schema)
            writer.write(batches)
            pa.default_memory_pool().release_unused()
            if writer.nbytes >= limit:
                written.append(writer.close())
                writer = None
        if writer is None and not written:
            writer = _FileWriter(directory / "part-00000.parquet", schema)
        if writer is not None:
            written.append(writer.close())
            writer = None
    finally:
        if writer is not None:
            writer.discard()
    return written


def _iter_row_groups(source: ParquetSource) -> Iterator[list[Any]]:
    """Yield blocks in groups of at most 8 MB. Blocks aren't cut, even if they are larger."""
    batches: list[Any] = []
    nbytes = 0
    for block in range(len(source.list_blocks())):
        batch = source.normalize(source.read_block(block))
        if batches and nbytes + batch.nbytes > BLOCK_BYTES:
            yield batches
            batches, nbytes = [], 0
        batches.append(batch)
        nbytes += batch.nbytes
    if batches:
        yield batches


class _FileWriter:
    """A Parquet file that appears under its name once it is complete."""

    def __init__(self, path: Path, schema: Any) -> None:
        self._path, self._schema = path, schema
        self._temporary = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
        self._writer = pq.ParquetWriter(self._temporary, schema, write_batch_size=_PAGE_ROWS)
        self.nbytes = 0

    def write(self, batches: list[Any]) -> None:
        """Write one row group."""
        table = pa.Table.from_batches(batches).cast(self._schema)
        self._writer.write_table(table, row_group_size=max(1, table.num_rows))
        self.nbytes += table.nbytes

    def close(self) -> Path:
        """Finish the file and return its path."""
        self._writer.close()
        with open(self._temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(self._temporary, self._path)
        return self._path

    def discard(self) -> None:
        """Delete the unfinished file."""
        self._writer.close()
        self._temporary.unlink(missing_ok=True)
