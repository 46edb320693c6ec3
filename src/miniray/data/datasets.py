"""Datasets of one source, one class per format."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar

import numpy as np

from miniray.checks import check_choice, check_int, suggest_options
from miniray.data.dataset import Dataset, RowId, SplitName
from miniray.data.locations import Int64s, Locations
from miniray.data.plan.order import (
    SEQUENTIAL_BYTES,
    WINDOW_BYTES,
    DataOrder,
    EpochOrder,
    GlobalOrder,
    SequentialOrder,
    Shuffle,
    WindowOrder,
)
from miniray.data.plan.selection import Selection
from miniray.data.plan.shard import Even, check_max_samples, resolve_seed
from miniray.data.plan.split import FindGroupStart
from miniray.data.sources.base import Source, check_column_list, parse_bytes, select_columns
from miniray.data.sources.files import Spec
from miniray.errors import DataError

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from miniray.data.plan.groups import GroupedOrder
    from miniray.data.sources.row_cache import RowCache

__all__ = ["ArrowDataset", "IndexedDataset", "JsonlDataset", "ParquetDataset", "SourceDataset"]

Self = TypeVar("Self", bound="SourceDataset")


class Options(TypedDict, total=False):
    """Options of every dataset, for type checkers. ``SourceDataset`` has the defaults."""

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
    split: SplitName
    memory_budget: int | str
    window_bytes: int | str | None
    cache: RowCache | None
    cache_dir: str | os.PathLike[str] | None


@suggest_options()
class SourceDataset(Dataset):
    """Rows of ``source``. See ``ParquetDataset`` for the options."""

    def __init__(
        self,
        source: Source,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        max_samples: int = -1,
        seed: int | None = None,
        shuffle: Shuffle = False,
        filter: Callable[[Any], bool] | None = None,
        filter_columns: Sequence[str] | None = None,
        filter_id: str | None = None,
        filter_workers: int = 1,
        group_by: str | None = None,
        even: Even = "exact",
        split: SplitName = "contiguous",
        memory_budget: int | str = "256MB",
        window_bytes: int | str | None = None,
        cache: RowCache | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        self._source = source
        self._max_samples = check_max_samples(max_samples)
        if group_by is not None and (even != "exact" or split != "contiguous"):
            raise ValueError(
                "group_by= keeps groups on one rank, so ranks can't get the same number of rows."
                f" Leave out {f'even={even!r}' if even != 'exact' else f'split={split!r}'}."
            )
        if group_by is not None and (names := source.list_columns()) is not None:
            select_columns(names, [group_by], "the data")
        self._group_by = group_by
        self._shuffle = _resolve_shuffle(shuffle, source)
        if filter is not None and not callable(filter):
            raise ValueError(f"filter must be a function of a row, not {filter!r}")
        self._filter, self._filter_id = filter, filter_id
        self._filter_columns = check_column_list("filter_columns", filter_columns)
        self._filter_workers = check_int("filter_workers", filter_workers, 1)
        #: None: the default, which a mixture lowers if it has many members.
        self._window_bytes = (
            None if window_bytes is None else parse_bytes(window_bytes, "window_bytes")
        )
        if cache is not None and cache_dir is not None:
            raise ValueError("Pass cache= or cache_dir=, not both.")
        self._cache, self._cache_dir = cache, cache_dir
        if split == "interleaved" and not source.random_access and self._shuffle != "global":
            raise ValueError(
                "split='interleaved' would make every rank read every block of the files. Pass"
                " shuffle='global', which copies the rows to a local cache, or leave out split=."
            )
        total = source.list_blocks().total_rows  # unusable files raise now
        is_drawn = -1 < self._max_samples < total
        is_seed_fixed = seed is not None
        seed = None if seed is None else check_int("seed", seed)
        if is_drawn or self._shuffle:
            purpose = "max_samples" if is_drawn else "shuffling"
            ranks = 1 if world_size is None else check_int("world_size", world_size, 1)
            seed = resolve_seed(seed, ranks, purpose)
        super().__init__(
            rank=rank,
            world_size=world_size,
            even=even,
            split=split,
            seed=seed,
            is_seed_fixed=is_seed_fixed,
            memory_budget=memory_budget,
        )
        self._check_budget()

    @property
    def max_window_bytes(self) -> int:
        """Estimated size of the largest window; 0 for random access, which holds no blocks."""
        if self._source.random_access or self._shuffle == "global":
            return 0
        blocks = self._source.list_blocks()
        size = self.window_bytes if self._shuffle == "window" else 0
        return max(int(blocks.nbytes.max(initial=0)), min(size, int(blocks.nbytes.sum())))

    def _check_budget(self) -> None:
        """Raise ``ValueError`` if half the budget can't hold one window."""
        needed = 2 * self.max_window_bytes
        if needed > self._budget:
            raise ValueError(
                f"memory_budget={self._budget} can't hold a window of {needed // 2} bytes in its"
                f" half for blocks. Pass memory_budget={needed} or more, or a smaller window_bytes="
                " (row groups are read in blocks of up to 8 MB)."
            )

    def _reset(self) -> None:
        super()._reset()
        self._selection: Selection | None = None
        self._reading: tuple[Source, Selection] | None = None
        self._group_starts: list[int] | None = None

    _transient = (*Dataset._transient, "_selection", "_reading", "_group_starts")

    # -- what is read ----------------------------------------------------------------------------

    @property
    def window_bytes(self) -> int:
        """Bytes of the blocks among which ``shuffle="window"`` mixes rows."""
        return WINDOW_BYTES if self._window_bytes is None else self._window_bytes

    def set_memory_budget(self, budget: int | str) -> None:
        super().set_memory_budget(budget)
        self._check_budget()

    def with_seed(self: Self, seed: int | None, window_bytes: int) -> Self:
        """Return the dataset as a member of a mixture: with its seed, unless one was passed."""
        other = self.shard(0, 1)
        if not self._is_seed_fixed and self._seed is not None and seed != self._seed:
            other._seed = seed
            other._reset()
        if self._window_bytes is None:
            other._window_bytes = window_bytes
        return other

    def prepare(self: Self) -> Self:
        self._open()
        return self

    def _select(self) -> Selection:
        """Return the selected rows of the original source."""
        if self._selection is None:
            selection = self._filter_rows()
            if self._max_samples >= 0:
                selection = self._take_samples(selection)
            self._selection = selection
        return self._selection

    def _take_samples(self, selection: Selection) -> Selection:
        """Return ``max_samples`` rows. Subclasses can choose different ones."""
        return selection.draw(self._max_samples, self._seed)

    def _filter_rows(self) -> Selection:
        blocks = self._source.list_blocks()
        if self._filter is None:
            return Selection.from_all_rows(blocks)
        from miniray.data.filter.fingerprint import fingerprint_callable
        from miniray.data.filter.run import FilterRun

        columns, name = self._filter_columns, None
        if self._source.is_persistent or self._filter_id is not None:
            digest = fingerprint_callable(self._filter, self._filter_id, self._source.kind, columns)
            name = f"filter-{digest}"
        bits = FilterRun(
            self._source,
            self._filter,
            columns,
            name,
            rank=self._rank,
            world_size=self._world_size,
            threads=self._filter_workers,
        ).compute_mask()
        selection = Selection.from_bits(blocks, bits)
        if blocks.total_rows and not selection.count:
            label = self._filter_id or getattr(self._filter, "__name__", repr(self._filter))
            raise DataError(
                f"Filter {label} dropped all {blocks.total_rows:,} rows. Check the condition and"
                " the columns that it reads."
            )
        return selection

    def _open(self) -> tuple[Source, Selection]:
        """Return the source to read from and the selected rows in its blocks."""
        if self._reading is None:
            source, selection = self._source, self._select()
            if self._shuffle == "global" and not source.random_access:
                from miniray.data.sources.row_cache import RowCache

                cache = self._cache if self._cache is not None else RowCache(self._cache_dir)
                source = cache.open(source)
                selection = selection.for_blocks(source.list_blocks())
            self._reading = source, selection
        return self._reading

    @property
    def sources(self) -> list[Source]:
        return [self._open()[0]]

    # -- description -----------------------------------------------------------------------------

    @property
    def kind(self) -> str:
        return self._source.kind

    @property
    def fingerprint(self) -> str:
        return self._source.compute_fingerprint()

    @property
    def column_names(self) -> list[str] | None:
        return self._source.list_columns()

    @property
    def total_rows(self) -> int:
        return self._select().count

    @property
    def distinct_rows(self) -> int:
        return self.total_rows

    @property
    def is_shuffled(self) -> bool:
        return self._shuffle is not None

    def _digest_selection(self) -> str:
        return self._select().digest

    def _describe_order(self) -> list[Any]:
        order: list[Any] = [self._shuffle or "sequential"]
        if self._shuffle == "window":
            order.append(self.window_bytes)
        if self._group_by is not None:
            order += ["group_by", self._group_by]
        return order

    # -- order -----------------------------------------------------------------------------------

    def _create_order(self, epoch: int) -> EpochOrder:
        if self._group_by is not None:
            return self._create_grouped_order(epoch)
        selection = self._select()
        if self._shuffle is None:
            if self._source.random_access:
                return DataOrder(selection.count)
            window_bytes = min(SEQUENTIAL_BYTES, self._budget // 4)
            return SequentialOrder(self._source.list_blocks(), selection, window_bytes)
        assert self._seed is not None
        if self._shuffle == "global":
            return GlobalOrder(selection.count, self._seed, epoch)
        blocks = self._source.list_blocks()
        return WindowOrder(blocks, selection, self._seed, epoch, self.window_bytes)

    def _create_grouped_order(self, epoch: int) -> GroupedOrder:
        from miniray.data.groups import find_group_starts
        from miniray.data.plan.groups import GroupedOrder

        assert self._group_by is not None
        selection = self._select()
        if self._group_starts is None:
            self._group_starts = find_group_starts(self._source, self._group_by, selection)
        blocks = self._source.list_blocks()
        return GroupedOrder(
            blocks,
            selection,
            self._group_starts,
            self._shuffle,
            self._seed,
            epoch,
            self.window_bytes,
        )

    @property
    def _find_group_start(self) -> FindGroupStart | None:
        if self._group_by is None:
            return None
        order: Any = self._current_order()
        find: FindGroupStart = order.find_group_start
        return find

    def find_ordinals(self, positions: Int64s) -> Int64s:
        return self._current_order().map_positions(positions)

    def locate(self, positions: Int64s) -> Locations:
        return self.locate_ordinals(self.find_ordinals(positions))

    def locate_ordinals(self, ordinals: Int64s, source: int = 0) -> Locations:
        return self._open()[1].locate(ordinals, source)

    def name_positions(self, positions: Int64s) -> list[RowId]:
        return self.name_ordinals(self.find_ordinals(positions))

    def name_ordinals(self, ordinals: Int64s) -> list[RowId]:
        """Return the ids of rows by their ordinal among the selected rows."""
        return self._name_numbers(self.number_ordinals(ordinals))

    def name_rows(self, locations: Locations) -> list[RowId]:
        return self._name_numbers(np.array(self.number_rows(locations), dtype=np.int64))

    def number_rows(self, locations: Locations) -> list[int]:
        edges = self.sources[0].list_blocks().edges
        numbers: list[int] = (edges[locations.array[:, 1]] + locations.array[:, 2]).tolist()
        return numbers

    def number_positions(self, positions: Int64s) -> list[int]:
        return self.number_ordinals(self.find_ordinals(positions)).tolist()  # type: ignore[no-any-return]

    def number_ordinals(self, ordinals: Int64s) -> Int64s:
        """Return the numbers in the source of rows by their ordinal among the selected rows."""
        return self._select().number_rows(ordinals)

    @property
    def source_rows(self) -> int:
        """Rows of the source, before the filter and ``max_samples``."""
        return self._source.list_blocks().total_rows

    @property
    def is_persistent(self) -> bool:
        return self._source.is_persistent

    def _name_numbers(self, numbers: Int64s) -> list[RowId]:
        """Return the ids of rows by their number in the source."""
        blocks, files = self._source.list_blocks(), self._source.files
        which = np.searchsorted(blocks.edges, numbers, side="right") - 1
        rows = blocks.first_row[which] + numbers - blocks.edges[which]
        return [
            (files[file], row)
            for file, row in zip(blocks.file[which].tolist(), rows.tolist(), strict=True)
        ]

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__}: rank {self._rank} of {self._world_size},"
            f" {len(self._source.files)} files, epoch {self._epoch}>"
        )


def _resolve_shuffle(shuffle: Shuffle, source: Source) -> Literal["window", "global"] | None:
    check_choice("shuffle", shuffle, (None, True, False, "window", "global"))
    if isinstance(shuffle, str) or not shuffle:
        return shuffle or None
    return "global" if source.random_access else "window"


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
