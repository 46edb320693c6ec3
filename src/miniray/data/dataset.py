"""A rank's share of a source: which rows, in which order, how far it has come.

Ranks of a run make the same dataset with their own ``rank`` and never talk to each other. Nothing
is read until a row is asked for; metadata is looked at when the dataset is made, so that files
which cannot work are refused before training starts.
"""

from __future__ import annotations

import operator
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from miniray.checks import check_int, suggest_options
from miniray.data.loader.blocks import BlockCache, Places
from miniray.data.plan import progress
from miniray.data.plan.order import (
    GlobalOrder,
    Order,
    SequentialOrder,
    Shuffle,
    WindowOrder,
    shuffle_kind,
    window_bytes,
)
from miniray.data.plan.selection import Kept, Selection
from miniray.data.plan.shard import (
    Even,
    check_even,
    checked_samples,
    resolve_seed,
)
from miniray.data.share import Share
from miniray.data.sources.base import Source, column_list, parse_bytes, wanted

ROWS_AT_A_TIME = 256  # in iteration over rows

Self = TypeVar("Self", bound="Dataset")


@suggest_options()
class Dataset(Share):
    """Rows of ``source`` that are ``rank``'s of ``world_size``, in the order of the current epoch.

    ``len(ds)``, ``ds[i]`` and iteration are about what this rank gets in this epoch: all of its
    part, or what is left of it after ``load_state_dict``. Iterating to the end begins the next
    epoch; a loop that was left starts the epoch again. See ``ParquetDataset`` for the arguments.
    """

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
        memory_budget: int | str = "256MB",
    ) -> None:
        self._set_rank(rank, world_size)
        self._max_samples = max_samples = checked_samples(max_samples)
        check_even(even)
        if group_by is not None and even != "exact":
            raise ValueError(
                f"group_by keeps groups whole, so ranks cannot get equally many rows: leave out"
                f" even={even!r}"
            )
        if group_by is not None and (names := source.column_names()) is not None:
            wanted(names, [group_by], "the data")
        self._source = source
        self._group_by = group_by
        self._shuffle = shuffle_kind(shuffle, source)
        if filter is not None and not callable(filter):
            raise ValueError(f"filter must be a function of a row, not {filter!r}")
        self._filter, self._filter_id = filter, filter_id
        self._filter_columns = column_list("filter_columns", filter_columns)
        self._filter_workers = check_int("filter_workers", filter_workers, 1)
        self._even: Even = even
        self._budget = parse_bytes(memory_budget)
        self._window = window_bytes(self._budget, source.blocks)
        total = sum(source.blocks.rows)
        drawn = -1 < max_samples < total
        self._seed = None if seed is None else check_int("seed", seed)
        self._seed_given = seed is not None
        if drawn or self._shuffle:
            self._seed = resolve_seed(
                seed, self._world_size, "max_samples" if drawn else "shuffling"
            )
        self._chunk_left: progress.ChunkLeft | None = None
        self._begin(0)
        self._forget()

    def _forget(self) -> None:
        self._selection: Selection | None = None
        self._rows: int | None = None
        self._groups: list[int] | None = None
        self._cache: BlockCache | None = None
        self._order = None
        self._part = None

    def __getstate__(self) -> dict[str, Any]:
        forgotten = ("_selection", "_rows", "_groups", "_cache", "_order", "_part", "_chunk_left")
        return {**self.__dict__, **dict.fromkeys(forgotten)}

    # -- what it is ------------------------------------------------------------------------------

    @property
    def memory_budget(self) -> int:
        """Bytes that may be held for this rank."""
        return self._budget

    @property
    def sources(self) -> list[Source]:
        return [self._source]

    @property
    def total_rows(self) -> int:
        """Rows of all ranks in an epoch, after filter and ``max_samples``."""
        return self._n()

    @property
    def distinct_rows(self) -> int:
        """Rows there are, after filter and ``max_samples``; a mixture may repeat or leave some."""
        return self._n()

    @property
    def kind(self) -> str:
        """``parquet``, ``jsonl``, ...: what the rows are kept in."""
        return self._source.kind

    @property
    def fingerprint(self) -> str:
        """Identifies the data, wherever its files lie; changes with their names and content.

        Content is known by size, rows and, of parquet, the footer; of JSON lines a checksum; of
        Arrow's files one of both ends. Of objects only the number of rows is known.
        """
        return self._source.fingerprint

    @property
    def column_names(self) -> list[str] | None:
        """Columns of the rows; None where a row is no table's, as in ``IndexedDataset``."""
        return self._source.column_names()

    def shard(self: Self, rank: int, world_size: int) -> Self:
        """The same dataset as another rank sees it; cheap, nothing is read again."""
        other = self._twin()
        other._set_rank(rank, world_size)
        # A seed that is needed was found when this one was made, and holds for all its shards.
        if not other._history:
            other._began_with = world_size
        other._taken, other._alone, other._complete = 0, False, False
        other._cache = other._order = other._part = None
        return other

    def _twin(self: Self) -> Self:
        """A copy that has what was worked out, the filter's answer among it; pickle leaves it."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    def prepare(self: Self) -> Self:
        """Do now what is otherwise done at the first row: the filter, or loading its answer."""
        if self._selection is None:
            blocks = self._source.blocks
            self._selection = Selection(blocks.rows, self._kept(), self._max_samples, self._seed)
            if self._group_by is not None:
                from miniray.data.plan.groups import group_starts

                self._groups = group_starts(self._source, self._group_by, self._selection)
        return self

    def _kept(self) -> Kept | None:
        if self._filter is None:
            return None
        from miniray.data.filter.fingerprint import filter_identity
        from miniray.data.filter.run import FilterRun

        columns, name = self._filter_columns, None
        if self._source.lasting or self._filter_id is not None:
            kind = self._source.kind
            name = f"filter-{filter_identity(self._filter, self._filter_id, kind, columns)}"
        kept = FilterRun(
            self._source,
            self._filter,
            columns,
            name,
            rank=self._rank,
            world_size=self._world_size,
            threads=self._filter_workers,
        ).result()
        rows = sum(self._source.blocks.rows)
        if rows and not any(kept.sizes) and self._rank == 0:
            warnings.warn(f"the filter keeps none of {rows:,} rows", RuntimeWarning, stacklevel=2)
        return kept

    @property
    def _selected(self) -> Selection:
        self.prepare()
        assert self._selection is not None
        return self._selection

    def order_of(self, epoch: int, world_size: int) -> Order:
        """The order of an epoch that ``world_size`` ranks begin."""
        sizes, nbytes = self._selected.sizes, self._source.blocks.nbytes
        if self._group_by is not None:
            from miniray.data.plan.groups import GroupedOrder

            assert self._groups is not None
            return GroupedOrder(
                sizes, nbytes, self._groups, self._shuffle, self._seed, epoch, self._window
            )
        if self._shuffle is None:
            return SequentialOrder(sizes)
        assert self._seed is not None
        if self._shuffle == "global":
            return GlobalOrder(sizes, self._seed, epoch)
        return WindowOrder(sizes, nbytes, self._seed, epoch, self._window, world_size)

    def _n(self) -> int:
        """Rows of the epoch, of all ranks."""
        if self._rows is None:
            self._rows = self._count()
        return self._rows

    def _count(self) -> int:
        return self._selected.n

    # -- rows ------------------------------------------------------------------------------------

    def new_cache(
        self, budget: int | None = None, columns: Sequence[str] | None = None
    ) -> BlockCache:
        """Memory for blocks: two windows and a little, one to take rows from and one to read.

        Touching memory for the first time costs more than reading, so more of the budget is used
        only where any block may be needed again.
        """
        largest = max(window_bytes(self._budget, source.blocks) for source in self.sources)
        held = 2 * largest + self._budget // 32
        if self._shuffle == "global":
            held = self._budget * 3 // 4
        return BlockCache(self.sources, budget or held, largest, columns)

    def set_memory_budget(self, budget: int | str) -> None:
        """Another budget. It decides how many blocks are mixed, so all ranks need the same."""
        self._budget = parse_bytes(budget)
        if not self._history:
            self._window = window_bytes(self._budget, self._source.blocks)
        self._cache = self._order = None

    def rows_at(self, places: Places) -> list[Any]:
        """Rows anywhere in the data, as Python objects."""
        return self._blocks_held().rows(places)

    def _blocks_held(self) -> BlockCache:
        if self._cache is None or self._cache.pid != os.getpid():
            self._cache = self.new_cache()
        return self._cache

    def __getitem__(self, index: int | slice) -> Any:
        """This rank's ``index``-th row of the epoch, as a dict; a list of rows for a slice."""
        if isinstance(index, slice):
            return self.__getitems__(range(*index.indices(len(self))))
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Several rows at once, as torch's loader asks for them."""
        return self._blocks_held().rows(self.places(checked_indices(indices, len(self))))

    def __iter__(self) -> Iterator[Any]:
        self.restart()
        count, cache = len(self), self._blocks_held()
        for start in range(0, count, ROWS_AT_A_TIME):
            stop = min(count, start + ROWS_AT_A_TIME)
            for number, row in enumerate(cache.rows(self.places(range(start, stop))), start + 1):
                self.record(number, complete=number == count)
                yield row
        self.finish_epoch()

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__}: rank {self._rank} of {self._world_size},"
            f" {len(self._source.blocks.files)} files, epoch {self._epoch}>"
        )


def checked_indices(indices: Sequence[int], count: int) -> list[int]:
    """``indices`` of ``count`` rows with those from the end counted from the start."""
    asked = [i + count if i < 0 else i for i in map(operator.index, indices)]
    if asked and not 0 <= min(asked) <= max(asked) < count:
        raise IndexError(f"rows {list(indices)} of {count}")
    return asked
