"""Datasets of one source, one class per format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from miniray.checks import suggest_options
from miniray.data.dataset import Dataset, SplitName, resolve_rank
from miniray.data.plan.shard import Even
from miniray.data.rows import RowOptions, SourceRows
from miniray.data.sources.base import Source
from miniray.data.sources.files import Spec

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["ArrowDataset", "IndexedDataset", "JsonlDataset", "ParquetDataset", "SourceDataset"]


class Options(RowOptions, total=False):
    """Options of every dataset, for type checkers. ``SourceDataset`` has the defaults."""

    rank: int | None
    world_size: int | None
    even: Even
    split: SplitName
    memory_budget: int | str


@suggest_options(extends=SourceRows)
class SourceDataset(Dataset):
    """Rows of ``source``. See ``ParquetDataset`` for the options."""

    def __init__(
        self,
        source: Source,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        even: Even = "exact",
        split: SplitName = "contiguous",
        memory_budget: int | str = "256MB",
        **options: Unpack[RowOptions],
    ) -> None:
        super().__init__(
            SourceRows(source, world_size=resolve_rank(rank, world_size)[1], **options),
            rank=rank,
            world_size=world_size,
            even=even,
            split=split,
            memory_budget=memory_budget,
        )


@suggest_options({"memory_map": "memory_map was removed; Parquet files are read through a buffer."})
class ParquetDataset(SourceDataset):
    """Rows of Parquet files. Each rank reads only its row groups, in blocks of about 8 MB.

    Args:
        files: A file, directory, glob or fsspec URL (``s3://...``), or a list of them.
        columns: Columns to read; defaults to all. A filter can read different ones.
        rank: Rank of this process. By default, miniray's trainers set it for ``self.train_loader``
            and ``self.val_loader`` of a worker. Otherwise, all rows are read.
        world_size: Number of ranks: 2099 rows on 2 ranks are ``[0:1050]`` and ``[1050:2099]``.
        max_samples: Size of a subset that is drawn once for the run and then sharded.
        seed: Seed of ``max_samples`` and ``shuffle``. ``None`` uses the run's seed
            (``MINIRAY_RUN_SEED``) or, with one rank, a random one (``ds.seed``).
        shuffle: Use a different order in each epoch. ``True`` or ``"window"``: row groups in random
            order, rows mixed within windows of ``window_bytes``; each byte is read about once.
            ``"global"``: one random order of all rows, which are copied to a local cache once.
        filter: ``filter(row) -> bool`` for a dict of ``filter_columns`` (defaults to ``columns``).
            Runs once for the run, divided among its ranks, and its answers are kept.
        filter_id: Name of the filter, used instead of its code. Change it when the answers change.
            Answers about data in memory are kept and shared only under such a name.
        filter_workers: Threads per rank that filter, for filters that release the GIL.
        group_by: Column whose equal values, which must be adjacent, stay on one rank and come one
            after the other. Every rank reads the column once.
        even: ``"pad"`` or ``"drop"`` for the same number of rows on every rank; see ``padded`` and
            ``dropped``.
        split: ``"contiguous"``, or ``"interleaved"`` so that the rows of a step don't depend on the
            number of ranks if ``world_size × batch_size`` is constant. Requires random access.
        memory_budget: Bytes that this rank may hold. Doesn't change the order of rows.
        window_bytes: Bytes of the blocks among which rows are mixed, 32 MB by default.
        cache: ``RowCache`` for ``shuffle="global"``.
        cache_dir: Directory of the cache; defaults to ``rows`` under ``MINIRAY_CACHE``.

    Raises:
        DataError: Mixed schemas, a truncated or empty file, or a missing column when the dataset is
            created. A file that was deleted or changed, or a damaged row group when it is read.
    """

    def __init__(
        self,
        files: Spec,
        *,
        columns: Sequence[str] | None = None,
        **options: Unpack[Options],
    ) -> None:
        from miniray.data.sources.parquet import ParquetSource

        super().__init__(ParquetSource(files, columns), **options)


@suggest_options()
class JsonlDataset(SourceDataset):
    """Rows of files with one JSON document per line. Takes the arguments of ``ParquetDataset``.

    The files are read once when the dataset is created, to find the lines. A line that isn't JSON
    raises ``RowError`` with file and row when it is reached.
    """

    def __init__(
        self, files: Spec, *, columns: Sequence[str] | None = None, **options: Unpack[Options]
    ) -> None:
        from miniray.data.sources.jsonl import JsonlSource

        super().__init__(JsonlSource(files, columns), **options)


@suggest_options()
class ArrowDataset(SourceDataset):
    """Rows of Arrow IPC files or of a table in memory. Takes the arguments of ``ParquetDataset``.

    The cache files of Hugging Face datasets are such files. A table is a table of Arrow, pandas or
    polars, or a dict of columns. It has random access.
    """

    def __init__(
        self, data: Any, *, columns: Sequence[str] | None = None, **options: Unpack[Options]
    ) -> None:
        from miniray.data.sources.arrow import ArrowSource

        super().__init__(ArrowSource(data, columns), **options)


@suggest_options()
class IndexedDataset(SourceDataset):
    """Rows of any object with ``len`` and ``[]``. Takes the arguments of ``ParquetDataset``.

    Rows are what ``[]`` returns in the loader's threads. ``name`` stands for the file in row ids.
    The data has random access, so ``shuffle=True`` is a global shuffle.
    """

    def __init__(self, data: Any, *, name: str | None = None, **options: Unpack[Options]) -> None:
        from miniray.data.sources.indexed import IndexedSource

        super().__init__(IndexedSource(data, name), **options)
