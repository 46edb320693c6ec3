"""Rewrite Parquet files into row groups of about 8 MB."""

from __future__ import annotations

import contextlib
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
    groups = _iter_row_groups(source, schema)
    written: list[Path] = []
    table = next(groups, None)
    while table is not None or not written:
        path = directory / f"part-{len(written):05}.parquet"
        with _create_file(path, schema) as writer:
            nbytes = 0
            while table is not None and nbytes < limit:
                writer.write_table(table, row_group_size=max(1, table.num_rows))
                nbytes += table.nbytes
                pa.default_memory_pool().release_unused()
                table = next(groups, None)
        written.append(path)
    return written


def _iter_row_groups(source: ParquetSource, schema: Any) -> Iterator[Any]:
    """Yield tables of at most 8 MB. Blocks aren't cut, even if they are larger."""
    batches: list[Any] = []
    nbytes = 0
    for block in range(len(source.list_blocks())):
        batch = source.normalize(source.read_block(block))
        if batches and nbytes + batch.nbytes > BLOCK_BYTES:
            yield pa.Table.from_batches(batches).cast(schema)
            batches, nbytes = [], 0
        batches.append(batch)
        nbytes += batch.nbytes
    if batches:
        yield pa.Table.from_batches(batches).cast(schema)


@contextlib.contextmanager
def _create_file(path: Path, schema: Any) -> Iterator[Any]:
    """Create a Parquet file that appears under its name once it is complete."""
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    try:
        with pq.ParquetWriter(temporary, schema, write_batch_size=_PAGE_ROWS) as writer:
            yield writer
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
