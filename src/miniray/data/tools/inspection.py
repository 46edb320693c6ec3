"""Describe Parquet files and what it costs to read them in each order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow.parquet as pq

from miniray.data.locations import Blocks
from miniray.data.plan.order import SEQUENTIAL_BYTES, WINDOW_BYTES
from miniray.data.plan.shard import split_evenly
from miniray.data.sources.base import BLOCK_BYTES
from miniray.data.sources.chunks import find_leaves
from miniray.data.sources.files import Spec
from miniray.data.sources.parquet import ParquetSource
from miniray.data.sources.row_cache import RowCache, compute_key
from miniray.data.sources.validation import open_file

#: Memory of a process that has imported pyarrow, and of pages while they are decoded.
_PROCESS_BYTES = 27_000_000
#: Rows of batches that are decoded ahead, which the page estimate of other orders covers.
_BATCH_BYTES = 20_000_000
_SMALL_FILES = 200


@dataclass(frozen=True)
class FileReport:
    """Metadata of a file."""

    path: str
    writer: str
    compression: str
    rows: int
    row_groups: int
    encoded_bytes: int
    decoded_bytes: int  # estimated
    largest_row_group_bytes: int  # decoded


@dataclass(frozen=True)
class OrderReport:
    """Expected costs of an order, per rank."""

    order: str
    memory_bytes: int
    read_bytes: int  # decoded bytes that each rank reads
    cache_bytes: int  # on disk, once per machine


@dataclass(frozen=True)
class Inspection:
    """Report about the files of a dataset."""

    files: Sequence[FileReport]
    orders: Sequence[OrderReport]
    advice: Sequence[str]
    is_cached: bool


def inspect_files(
    files: Spec,
    columns: Sequence[str] | None = None,
    world_size: int = 1,
    cache: RowCache | None = None,
) -> Inspection:
    """Describe Parquet files. Only footers are read."""
    source = ParquetSource(files, columns)
    blocks = source.list_blocks()
    reports = [
        _describe_file(path, number, blocks, columns) for number, path in enumerate(source.files)
    ]
    cache = RowCache() if cache is None else cache
    is_cached = (cache.directory / f"{compute_key(source)}.arrow").exists()
    total, largest = int(blocks.nbytes.sum()), int(blocks.nbytes.max(initial=0))
    share = total // world_size
    window = max(largest, min(WINDOW_BYTES, total))
    sequential = max(largest, min(SEQUENTIAL_BYTES, total))
    page = 3 * _estimate_page_bytes(reports)
    orders = [
        OrderReport("False", _PROCESS_BYTES + 2 * sequential + page, share, 0),
        OrderReport(
            '"window"', _PROCESS_BYTES + 2 * window + page, min(total, share + 2 * window), 0
        ),
        OrderReport('"global"', _PROCESS_BYTES + _BATCH_BYTES, share, total),
    ]
    return Inspection(reports, orders, _give_advice(reports, world_size), is_cached)


def _describe_file(
    path: str, number: int, blocks: Blocks, columns: Sequence[str] | None
) -> FileReport:
    chosen = blocks.file == number
    runs, nbytes = blocks.run[chosen], blocks.nbytes[chosen]
    sizes = [int(nbytes[runs == run].sum()) for run in set(runs.tolist())]
    file = pq.ParquetFile(open_file(path))
    metadata = file.metadata
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    # Only of columns that the source has checked: asking for others could end the process.
    leaves = find_leaves(file.schema_arrow, columns, metadata.num_columns)
    codecs = {group.column(i).compression.lower() for group in groups[:1] for i in leaves}
    return FileReport(
        path,
        metadata.created_by or "unknown",
        ", ".join(sorted(codecs)).replace("uncompressed", "none") or "none",
        metadata.num_rows,
        metadata.num_row_groups,
        sum(group.total_byte_size for group in groups),
        int(nbytes.sum()),
        max(sizes, default=0),
    )


def _estimate_page_bytes(reports: Sequence[FileReport]) -> int:
    """Return the size of a page as pyarrow writes it: at most 1024 rows."""
    rows = sum(report.rows for report in reports)
    per_row = sum(report.decoded_bytes for report in reports) / max(1, rows)
    largest = max((report.largest_row_group_bytes for report in reports), default=0)
    return int(min(1024 * per_row, largest))


def _give_advice(reports: Sequence[FileReport], world_size: int) -> list[str]:
    advice = []
    single = [r for r in reports if r.row_groups == 1 and r.decoded_bytes > 4 * BLOCK_BYTES]
    if single:
        advice.append(
            f"{len(single)} of {len(reports)} files have one row group of more than"
            f" {4 * BLOCK_BYTES // 10**6} MB: ranks decode rows that they skip. Repack the files,"
            " or use shuffle='global'."
        )
    if len(reports) > _SMALL_FILES:
        average = sum(report.decoded_bytes for report in reports) // len(reports)
        if average < BLOCK_BYTES:
            advice.append(
                f"{len(reports)} files of {average / 1e6:.2g} MB each: opening them costs more"
                " than reading them. Repack the files, or use shuffle='global'."
            )
    rows = sum(report.rows for report in reports)
    low, high = split_evenly(rows, world_size - 1, world_size)
    if low == high:
        advice.append(f"{world_size} ranks are more than {rows} rows: some ranks get none.")
    return advice
