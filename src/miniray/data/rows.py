"""The rows of a dataset and their order in each epoch, which are the same on all ranks."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar

import numpy as np

from miniray.checks import check_choice, check_int
from miniray.data.groups import find_group_starts
from miniray.data.loader.columns import RowId
from miniray.data.locations import Int64s, Locations
from miniray.data.plan.groups import GroupedOrder
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
from miniray.data.plan.shard import check_max_samples, resolve_seed
from miniray.data.sources.base import Source, check_column_list, parse_bytes, select_columns
from miniray.errors import DataError

if TYPE_CHECKING:
    from miniray.data.sources.row_cache import RowCache

Self = TypeVar("Self", bound="RowSet")


class RowSet(ABC):
    """Rows in an order per epoch: those of one source, or a mixture of several.

    A row is known by its *position* in the order of the epoch, and by its *ordinal* among the
    selected rows in data order. The ordinals of a mixture number the rows of the first member, the
    second, and so on.

    Attributes:
        seed: Seed of subset and order.
        is_seed_fixed: Whether the user passed the seed.
        is_shuffled: Whether each epoch has a different order.
        is_grouped: Whether the order keeps groups of rows together.
    """

    seed: int | None
    is_seed_fixed: bool
    is_shuffled: bool
    is_grouped = False

    @property
    @abstractmethod
    def members(self) -> Sequence[SourceRows]:
        """The rows of each source."""

    @property
    @abstractmethod
    def total_rows(self) -> int:
        """Number of rows of an epoch."""

    @property
    @abstractmethod
    def max_window_bytes(self) -> int:
        """Estimated size of the largest window; 0 if no blocks are held."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Identifier of the data, before the selection."""

    @abstractmethod
    def digest_selection(self) -> str:
        """Return an identifier of the selected rows."""

    @abstractmethod
    def describe_order(self) -> list[Any]:
        """Return what the order depends on besides the data and the seed."""

    @abstractmethod
    def create_order(self, epoch: int, memory_budget: int) -> EpochOrder:
        """Return the order of an epoch. The budget has an effect on the size of windows only."""

    @abstractmethod
    def locate(self, ordinals: Int64s, source: int = 0) -> Locations:
        """Return the locations of rows. ``source`` is the number of the source in a mixture."""

    @abstractmethod
    def number_ordinals(self, ordinals: Int64s) -> Int64s:
        """Return the numbers of rows among all rows of the sources."""

    @abstractmethod
    def name_ordinals(self, ordinals: Int64s) -> list[RowId]:
        """Return the ids of rows. Nothing is read."""

    @abstractmethod
    def with_seed(self: Self, seed: int | None) -> Self:
        """Return the same data with a different seed."""

    @abstractmethod
    def for_rank(self: Self, rank: int, world_size: int) -> Self:
        """Return the same rows for a different rank, which evaluates its part of the filter."""

    def _replace(self: Self, **changes: Any) -> Self:
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, **changes)
        return other


class RowOptions(TypedDict, total=False):
    """Options of ``SourceRows``, for type checkers. See ``ParquetDataset``."""

    max_samples: int
    seed: int | None
    shuffle: Shuffle
    filter: Callable[[Any], bool] | None
    filter_columns: Sequence[str] | None
    filter_id: str | None
    filter_workers: int
    group_by: str | None
    window_bytes: int | str | None
    cache: RowCache | None
    cache_dir: str | os.PathLike[str] | None


#: Computed when it is first needed, and not pickled.
_NOTHING_COMPUTED: dict[str, Any] = {"_selection": None, "_opened": None, "_group_starts": None}


class SourceRows(RowSet):
    """Selected rows of ``source``. See ``ParquetDataset`` for the options."""

    def __init__(
        self,
        source: Source,
        *,
        world_size: int = 1,
        max_samples: int = -1,
        seed: int | None = None,
        shuffle: Shuffle = False,
        filter: Callable[[Any], bool] | None = None,
        filter_columns: Sequence[str] | None = None,
        filter_id: str | None = None,
        filter_workers: int = 1,
        group_by: str | None = None,
        window_bytes: int | str | None = None,
        cache: RowCache | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        self.source = source
        self._rank, self._world_size = 0, world_size
        self._max_samples = check_max_samples(max_samples)
        #: Whether a subset is the first rows instead of random ones.
        self._takes_first = False
        if group_by is not None and (names := source.list_columns()) is not None:
            select_columns(names, [group_by], "the data")
        self._group_by, self.is_grouped = group_by, group_by is not None
        self._shuffle = _resolve_shuffle(shuffle, source)
        self.is_shuffled = self._shuffle is not None
        if filter is not None and not callable(filter):
            raise ValueError(f"filter must be a function of a row, not {filter!r}")
        self._filter, self.filter_id = filter, filter_id
        self._filter_columns = check_column_list("filter_columns", filter_columns)
        self._filter_workers = check_int("filter_workers", filter_workers, 1)
        #: None: the default, which a mixture lowers if it has many members.
        self._window_bytes = (
            None if window_bytes is None else parse_bytes(window_bytes, "window_bytes")
        )
        if cache is not None and cache_dir is not None:
            raise ValueError("Pass cache= or cache_dir=, not both.")
        self._cache, self._cache_dir = cache, cache_dir
        total = self.source_rows  # unusable files raise now
        is_drawn = -1 < self._max_samples < total
        self.is_seed_fixed = seed is not None
        if is_drawn or self.is_shuffled:
            seed = resolve_seed(seed, world_size, "max_samples" if is_drawn else "shuffling")
        self.seed = None if seed is None else check_int("seed", seed)
        self._selection: Selection | None = None
        self._opened: tuple[Source, Selection] | None = None
        self._group_starts: list[int] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, **_NOTHING_COMPUTED}

    def with_seed(self, seed: int | None) -> SourceRows:
        return self if seed == self.seed else self._replace(seed=seed, **_NOTHING_COMPUTED)

    def for_rank(self, rank: int, world_size: int) -> SourceRows:
        return self._replace(_rank=rank, _world_size=world_size)

    def with_default_window(self, window_bytes: int) -> SourceRows:
        """Return the same rows with ``window_bytes``, unless the user has passed it."""
        return self if self._window_bytes is not None else self._replace(_window_bytes=window_bytes)

    def take_first(self) -> SourceRows:
        """Return the same data with the first ``max_samples`` rows instead of random ones."""
        return self._replace(_takes_first=True, **_NOTHING_COMPUTED)

    # -- what is read ----------------------------------------------------------------------------

    def select(self) -> Selection:
        """Return the selected rows of the source. Runs the filter."""
        if self._selection is None:
            selection = self._filter_rows()
            if self._max_samples >= 0 and self._takes_first:
                selection = selection.take_first(self._max_samples)
            elif self._max_samples >= 0:
                selection = selection.draw(self._max_samples, self.seed)
            self._selection = selection
        return self._selection

    def _filter_rows(self) -> Selection:
        blocks = self.source.list_blocks()
        if self._filter is None:
            return Selection(blocks)
        from miniray.data.filter.fingerprint import fingerprint_callable
        from miniray.data.filter.run import FilterRun

        columns, name = self._filter_columns, None
        if self.source.is_persistent or self.filter_id is not None:
            digest = fingerprint_callable(self._filter, self.filter_id, self.source.kind, columns)
            name = f"filter-{digest}"
        bits = FilterRun(
            self.source,
            self._filter,
            columns,
            name,
            rank=self._rank,
            world_size=self._world_size,
            threads=self._filter_workers,
        ).compute_mask()
        selection = Selection(blocks, bits)
        if blocks.total_rows and not selection.count:
            label = self.filter_id or getattr(self._filter, "__name__", repr(self._filter))
            raise DataError(
                f"Filter {label} dropped all {blocks.total_rows:,} rows. Check the condition and"
                " the columns that it reads."
            )
        return selection

    def open(self) -> tuple[Source, Selection]:
        """Return the source to read from and the selected rows in its blocks.

        Builds the row cache, whose copy is read in global order.
        """
        if self._opened is None:
            source, selection = self.source, self.select()
            if self._shuffle == "global" and not source.random_access:
                from miniray.data.sources.row_cache import RowCache

                cache = self._cache if self._cache is not None else RowCache(self._cache_dir)
                source = cache.open(source)
                selection = selection.for_blocks(source.list_blocks())
            self._opened = source, selection
        return self._opened

    # -- description -----------------------------------------------------------------------------

    @property
    def members(self) -> Sequence[SourceRows]:
        return (self,)

    @property
    def source_rows(self) -> int:
        """Rows of the source, before the filter and ``max_samples``."""
        return self.source.list_blocks().total_rows

    @property
    def total_rows(self) -> int:
        return self.select().count

    @property
    def max_window_bytes(self) -> int:
        if self.source.random_access or self._shuffle == "global":
            return 0
        blocks = self.source.list_blocks()
        size = self._find_window_bytes() if self._shuffle == "window" else 0
        return max(int(blocks.nbytes.max(initial=0)), min(size, int(blocks.nbytes.sum())))

    def _find_window_bytes(self) -> int:
        return WINDOW_BYTES if self._window_bytes is None else self._window_bytes

    @property
    def fingerprint(self) -> str:
        return self.source.compute_fingerprint()

    def digest_selection(self) -> str:
        return self.select().digest

    def describe_order(self) -> list[Any]:
        order: list[Any] = [self._shuffle or "sequential"]
        if self._shuffle == "window":
            order.append(self._find_window_bytes())
        if self._group_by is not None:
            order += ["group_by", self._group_by]
        return order

    # -- order -----------------------------------------------------------------------------------

    def create_order(self, epoch: int, memory_budget: int) -> EpochOrder:
        selection, seed = self.select(), self.seed
        blocks, window_bytes = self.source.list_blocks(), self._find_window_bytes()
        if self._group_by is not None:
            if self._group_starts is None:
                self._group_starts = find_group_starts(self.source, self._group_by, selection)
            return GroupedOrder(
                blocks, selection, self._group_starts, self._shuffle, seed, epoch, window_bytes
            )
        if self._shuffle is None and self.source.random_access:
            return DataOrder(selection.count)
        if self._shuffle is None:
            return SequentialOrder(blocks, selection, min(SEQUENTIAL_BYTES, memory_budget // 4))
        assert seed is not None
        if self._shuffle == "global":
            return GlobalOrder(selection.count, seed, epoch)
        return WindowOrder(blocks, selection, seed, epoch, window_bytes)

    # -- rows ------------------------------------------------------------------------------------

    def locate(self, ordinals: Int64s, source: int = 0) -> Locations:
        return self.open()[1].locate(ordinals, source)

    def number_ordinals(self, ordinals: Int64s) -> Int64s:
        return self.select().number_rows(ordinals)

    def name_ordinals(self, ordinals: Int64s) -> list[RowId]:
        blocks, files = self.source.list_blocks(), self.source.files
        numbers = self.number_ordinals(ordinals)
        which = np.searchsorted(blocks.edges, numbers, side="right") - 1
        rows = blocks.first_row[which] + numbers - blocks.edges[which]
        return [
            (files[file], row)
            for file, row in zip(blocks.file[which].tolist(), rows.tolist(), strict=True)
        ]


def _resolve_shuffle(shuffle: Shuffle, source: Source) -> Literal["window", "global"] | None:
    check_choice("shuffle", shuffle, (None, True, False, "window", "global"))
    if isinstance(shuffle, str) or not shuffle:
        return shuffle or None
    return "global" if source.random_access else "window"
