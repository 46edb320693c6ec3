"""The datasets a user makes, one for each kind of source."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from miniray.checks import suggest_options
from miniray.data.dataset import Dataset
from miniray.data.plan.order import Shuffle
from miniray.data.plan.shard import Even
from miniray.data.sources.files import Spec

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["ArrowDataset", "IndexedDataset", "JsonlDataset", "ParquetDataset"]


class Options(TypedDict, total=False):
    """What every dataset takes, for type checkers; ``Dataset`` has the defaults."""

    rank: int | None
    world_size: int | None
    max_samples: int
    seed: int | None
    shuffle: Shuffle
    filter: Callable[[Any], bool] | None
    filter_columns: Sequence[str] | None
    filter_id: str | None
    filter_workers: int
    group_by: str | None
    even: Even
    memory_budget: int | str


@suggest_options()
class ParquetDataset(Dataset):
    """Rows of parquet files, read in place: each rank its own row groups, never a whole file.

    Args:
        files: a file, a folder, a glob, an fsspec address (``s3://...``), or a list of these.
        columns: those to read; all by default. A filter may use others.
        rank, world_size: Part to read: ``[0:1050]`` or ``[1050:2099]`` of 2099 rows on 2 ranks.
            By default, miniray's trainers set them for ``self.train_loader`` and
            ``self.val_loader`` of a worker. Otherwise, all rows are read.
        max_samples: a subset of this size, drawn once for the whole run and then sharded.
        seed: for ``max_samples`` and ``shuffle``. ``None`` is the run's seed
            (``MINIRAY_RUN_SEED``) or, for one rank alone, a fresh one (``ds.seed``).
        shuffle: another order each epoch. ``True`` or ``"window"``: row groups in random order,
            rows mixed within as many row groups as fit into 1/8 of the memory budget (1/4 if those
            are fewer than four); each byte is read about once. ``"global"``: all rows in one random
            order; a row costs the reading of its row group unless that is still in memory.
        filter: ``filter(row) -> bool`` on a dict of ``filter_columns`` (by default ``columns``).
            Runs once for the whole run, split over its ranks, and its answer is kept.
        filter_id: names the filter instead of its code: change it when its answers change. Of data
            in memory answers are only kept and shared under such a name: each rank filters else.
        filter_workers: threads in this rank that filter, for filters that release the GIL.
        group_by: a column; rows with the same value, which must lie next to each other, stay on one
            rank and come one after the other. The column is read once by every rank.
        even: ``"pad"`` or ``"drop"`` for equally many rows on every rank; see ``padded`` and
            ``dropped``.
        memory_budget: bytes this rank may hold. Row groups larger than fits are read in slices.

    Raises ``DataError`` naming file and row group, when it is made, for mixed schemas, a truncated
    file, a missing column, an empty file; and later for a file that has gone or changed.
    """

    def __init__(
        self, files: Spec, *, columns: Sequence[str] | None = None, **options: Unpack[Options]
    ) -> None:
        from miniray.data.sources.parquet import ParquetSource

        super().__init__(ParquetSource(files, columns), **options)


@suggest_options()
class JsonlDataset(Dataset):
    """Rows of files with a JSON document a line; arguments as those of ``ParquetDataset``.

    The files are read through once when the dataset is made, to find the lines. A line that is not
    JSON is a ``RowError`` with file and row when it is reached.
    """

    def __init__(
        self, files: Spec, *, columns: Sequence[str] | None = None, **options: Unpack[Options]
    ) -> None:
        from miniray.data.sources.jsonl import JsonlSource

        super().__init__(JsonlSource(files, columns), **options)


@suggest_options()
class ArrowDataset(Dataset):
    """Rows of Arrow IPC files or of a table in memory; arguments as those of ``ParquetDataset``.

    The cache files of Hugging Face datasets are such files. They are read through once and checked
    when the dataset is created. A table is one of Arrow, pandas or polars, or a dict of columns.
    """

    def __init__(
        self, data: Any, *, columns: Sequence[str] | None = None, **options: Unpack[Options]
    ) -> None:
        from miniray.data.sources.arrow import ArrowSource

        super().__init__(ArrowSource(data, columns), **options)


@suggest_options()
class IndexedDataset(Dataset):
    """Rows of anything with ``len`` and ``[]``; arguments as those of ``ParquetDataset``.

    Rows are what ``[]`` gives, asked for in the loader's threads. ``name`` stands for the file in
    row ids. ``shuffle=True`` is a global shuffle here: any row costs the same.
    """

    def __init__(self, data: Any, *, name: str | None = None, **options: Unpack[Options]) -> None:
        from miniray.data.sources.indexed import IndexedSource

        super().__init__(IndexedSource(data, name), **options)
