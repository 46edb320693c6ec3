"""The rows of a rank: which ones, in which order, and how many of them have been delivered.

Ranks create the same dataset with their rank and never communicate. Rows are known by *position* in
the order of the epoch, by *ordinal* among the selected rows in data order, and by *location* in the
blocks of a source. Only positions are saved in states.
"""

from __future__ import annotations

import copy
import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeVar, overload

import numpy as np
import numpy.typing as npt

from miniray.checks import check_choice, check_int
from miniray.data.loader.blocks import BlockBuffer
from miniray.data.loader.columns import RowId, to_rows
from miniray.data.locations import BlockKey, Int64s, Locations
from miniray.data.plan import progress
from miniray.data.plan.order import EpochOrder, Window
from miniray.data.plan.progress import Progress
from miniray.data.plan.shard import (
    Even,
    check_even,
    check_rank,
    find_run_seed,
    warn_if_several_ranks,
)
from miniray.data.plan.split import (
    Assignment,
    Contiguous,
    FindChunkRest,
    Interleaved,
    IntervalSet,
    Split,
)
from miniray.data.rows import RowSet
from miniray.data.sources.base import Source, parse_bytes

_ITERATION_ROWS = 256  # gathered at a time

SplitName = Literal["contiguous", "interleaved"]

Self = TypeVar("Self", bound="Dataset")


class Dataset:
    """Rows of ``rank`` of ``world_size``, in the order of the current epoch.

    ``len(ds)``, ``ds[i]`` and iteration cover the rank's rows of this epoch, or the rest of them
    after ``load_state_dict``. Iterating to the end starts the next epoch. A loop that ended early
    starts the epoch again. See ``ParquetDataset`` for the arguments.

    Attributes:
        row_set: The rows of all ranks, and their order.
        rank: Rank of this process.
        world_size: Number of ranks.
        is_sharded: Whether ``rank`` and ``world_size`` were passed, or set by ``shard``.
        split: How rows are divided among ranks: ``"contiguous"`` or ``"interleaved"``.
        memory_budget: Bytes that this rank may hold.
        epoch: Current epoch, from 0.
        has_started: Whether iteration has started.
    """

    def __init__(
        self,
        row_set: RowSet,
        *,
        rank: int | None,
        world_size: int | None,
        even: Even,
        split: SplitName,
        memory_budget: int | str,
    ) -> None:
        self.is_sharded = rank is not None or world_size is not None
        self.rank, self.world_size = resolve_rank(rank, world_size)
        self.row_set = row_set.for_rank(self.rank, self.world_size)
        self.has_started = False
        check_even(even)
        self._even: Even = even
        self.split: SplitName = check_choice("split", split, ("contiguous", "interleaved"))
        if row_set.is_grouped and (even != "exact" or split != "contiguous"):
            raise ValueError(
                "group_by= keeps groups on one rank, so ranks can't get the same number of rows."
                f" Leave out {f'even={even!r}' if even != 'exact' else f'split={split!r}'}."
            )
        if split == "interleaved" and row_set.max_window_bytes:
            raise ValueError(
                "split='interleaved' would make every rank read every block of the files. Pass"
                " shuffle='global', which copies the rows to a local cache, or leave out split=."
            )
        #: Created outside of the run, without a seed. The run's seed replaces a random one.
        self._is_seed_random = (
            row_set.seed is not None and not row_set.is_seed_fixed and find_run_seed() is None
        )
        self.set_memory_budget(memory_budget)
        self._start_epoch(0)

    def _start_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self._history: list[list[Any]] = []
        #: Positions that other runs left of the epoch; None for all of it.
        self._remaining: IntervalSet | None = None
        self._taken: Any = 0
        self._is_alone = self._is_complete = False
        self._order: EpochOrder | None = None
        self._assignment: Assignment | None = None

    def __getstate__(self) -> dict[str, Any]:
        transient = ("_order", "_assignment", "_buffer")
        return {**self.__dict__, **dict.fromkeys(transient)}

    # -- description -----------------------------------------------------------------------------

    def prepare(self: Self) -> Self:
        """Run the filter and build the row cache now, instead of when the first row is read."""
        for member in self.row_set.members:
            member.open()
        return self

    @property
    def sources(self) -> list[Source]:
        """Sources that rows are read from: one, or those of a mixture."""
        return [member.open()[0] for member in self.row_set.members]

    @property
    def fingerprint(self) -> str:
        """Identifier of the data, which doesn't depend on the directory of the files.

        It changes with the names of files and their content, which is identified by the size and
        the footer (Parquet), a checksum (JSON lines), or a checksum of both ends (Arrow IPC). Of
        Python objects, only the number of rows is known.
        """
        return self.row_set.fingerprint

    @property
    def is_persistent(self) -> bool:
        """Whether the fingerprint changes whenever the content may have changed."""
        return all(member.source.is_persistent for member in self.row_set.members)

    @property
    def column_names(self) -> list[str] | None:
        """Columns of the rows, or None if rows aren't of a table, as in ``IndexedDataset``.

        Those of the first member of a mixture.
        """
        return self.row_set.members[0].source.list_columns()

    @property
    def total_rows(self) -> int:
        """Rows of all ranks in an epoch, after the filter and ``max_samples``."""
        return self.row_set.total_rows

    @property
    def distinct_rows(self) -> int:
        """Distinct rows after the filter and ``max_samples``; mixtures can repeat or skip some."""
        return sum(member.total_rows for member in self.row_set.members)

    @property
    def is_shuffled(self) -> bool:
        """Whether each epoch has a different order."""
        return self.row_set.is_shuffled

    # -- names of rows ---------------------------------------------------------------------------

    def _get_order(self) -> EpochOrder:
        if self._order is None:
            self._order = self.row_set.create_order(self.epoch, self.memory_budget)
        return self._order

    def find_ordinals(self, positions: npt.ArrayLike) -> Int64s:
        """Return the ordinals among the selected rows of the rows at ``positions``."""
        return self._get_order().map_positions(np.asarray(positions, dtype=np.int64))

    def locate(self, positions: Int64s) -> Locations:
        """Return the locations of the rows at ``positions`` of the epoch's order."""
        return self.row_set.locate(self.find_ordinals(positions))

    def number_positions(self, positions: npt.ArrayLike) -> list[int]:
        """Return the numbers of the rows at ``positions``. Nothing is read.

        They number all rows of the sources, the same on all ranks and in all epochs.
        """
        numbers = self.row_set.number_ordinals(self.find_ordinals(positions))
        return numbers.tolist()  # type: ignore[no-any-return]

    def name_positions(self, positions: npt.ArrayLike) -> list[RowId]:
        """Return the ids of the rows at ``positions``. Nothing is read."""
        return self.row_set.name_ordinals(self.find_ordinals(positions))

    # -- progress --------------------------------------------------------------------------------

    @property
    def has_fixed_shares(self) -> bool:
        """Whether each rank has the same number of rows in all epochs."""
        return not (self.row_set.is_shuffled and self.row_set.is_grouped)

    @property
    def seed(self) -> int | None:
        """Seed in use: passed, the run's, drawn, or that of a loaded state."""
        return self.row_set.seed

    def set_memory_budget(self, budget: int | str) -> None:
        """Set the budget. It doesn't change the order of rows.

        Raises ``ValueError`` if half the budget can't hold one window of every member.
        """
        self.memory_budget = parse_bytes(budget)
        needed = 2 * self.row_set.max_window_bytes
        if needed > self.memory_budget:
            raise ValueError(
                f"memory_budget={self.memory_budget} can't hold windows of {needed // 2} bytes in"
                f" its half for blocks. Pass memory_budget={needed} or more, or a smaller"
                " window_bytes= (row groups are read in blocks of up to 8 MB)."
            )
        self._buffer: BlockBuffer | None = None
        self._order = None

    def shard(self: Self, rank: int, world_size: int) -> Self:
        """Return the same dataset for a different rank. Nothing is read again.

        If the dataset was created without a seed outside of the run, it takes the seed of the run.
        """
        other = copy.copy(self)
        other._order = self._order
        if self._is_seed_random and (run_seed := find_run_seed()) is not None:
            other._set_seed(run_seed)
        other.rank, other.world_size = check_rank(rank, world_size)
        other.is_sharded, other.has_started = True, False
        other.row_set = other.row_set.for_rank(other.rank, other.world_size)
        other._taken, other._is_alone, other._is_complete = 0, False, False
        return other

    def _set_seed(self, seed: int | None) -> None:
        self._is_seed_random = False
        if seed != self.seed:  # a subset depends on it
            self.row_set = self.row_set.with_seed(seed)
            self._order = self._assignment = self._remaining = self._buffer = None

    def is_at(self, epoch: int) -> bool:
        """Return whether ``epoch`` is the current one and not completely delivered."""
        return epoch == self.epoch and not self._is_complete

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch, unless it is the current one or its state was loaded.

        A loop can therefore call this before every epoch, and still resume from a loaded state.
        """
        if not self.is_at(epoch):
            self._start_epoch(check_int("epoch", epoch))

    def finish_epoch(self) -> None:
        """Start the next epoch."""
        self._start_epoch(self.epoch + 1)

    def start_pass(self) -> None:
        """Start this epoch again, or the next one if all of its rows were delivered.

        Some loops stop after ``len`` batches, before iteration ends. Warn if several ranks read
        all rows because the dataset isn't sharded.
        """
        if not self.is_sharded and not self.has_started:
            warn_if_several_ranks()
        self.has_started = True
        if self._is_complete:
            self.finish_epoch()
        self._taken, self._is_alone = 0, False

    def record_taken(self, taken: Any, alone: bool = False, complete: bool = False) -> None:
        """Record how many rows the rank has taken since the epoch was started or loaded.

        Args:
            taken: Number of rows.
            alone: Other ranks can have taken different numbers, so that states must be merged.
            complete: These were the last rows of the epoch.
        """
        self._taken, self._is_alone, self._is_complete = taken, alone, complete

    def state_dict(self) -> dict[str, Any]:
        """Return the progress of the epoch for all ranks, in less than 1 KB of JSON.

        At a step boundary, when all ranks have taken the same number of rows, the state of any rank
        is valid for the run. Otherwise, keep the states of all ranks and use ``merge_states``.
        """
        return {
            "version": progress.STATE_VERSION,
            "fingerprint": self.fingerprint,
            "seed": self.seed,
            "epoch": self.epoch,
            "n": self.total_rows,
            "order": self.row_set.describe_order(),
            "split": self.split,
            "even": self._even,
            "selection": self.row_set.digest_selection(),
            "history": [list(stage) for stage in self._history],
            "world_size": self.world_size,
            "rank": self.rank,
            "taken": self._taken,
            "alone": self._is_alone and self.world_size > 1,
        }

    def load_state_dict(
        self, state: Mapping[str, Any], find_chunk_rest: FindChunkRest | None = None
    ) -> None:
        """Resume from ``state`` on any number of ranks, all of which load the same state.

        The remaining rows of the epoch are divided among the ranks. A seed that wasn't passed is
        taken from the state.

        Args:
            state: The state of a dataset or loader.
            find_chunk_rest: Passed by loaders with batches by tokens, to resume within a chunk.

        Raises:
            DataError: The state is of different data or options, or valid for a single rank only.
        """
        progress.check_state(state)
        progress.check_single_state(state)
        expected: dict[str, Any] = {
            "fingerprint": self.fingerprint,
            "order": self.row_set.describe_order(),
            "split": self.split,
            "even": self._even,
        }
        if self.row_set.is_seed_fixed:
            expected["seed"] = self.seed
        progress.check_compatible(state, expected)
        self._set_seed(state["seed"])
        rows = {"selection": self.row_set.digest_selection(), "n": self.total_rows}
        progress.check_compatible(state, rows)
        taken = state["taken"]
        if isinstance(taken, list) and state["rank"] is not None:
            taken = [taken]
        stage = [state["world_size"], taken, *state.get("batching", ())[1:]]
        self._start_epoch(int(state["epoch"]))
        split = self._create_split(find_chunk_rest)
        found = Progress(self.total_rows, split, state["history"]).extend(stage)
        self._history, self._remaining = found.history, found.remaining

    # -- rows of the rank ------------------------------------------------------------------------

    def _create_split(self, find_chunk_rest: FindChunkRest | None = None) -> Split:
        if self.split == "interleaved":
            return Interleaved(self._even)
        find_group_start = self._get_order().find_group_start if self.row_set.is_grouped else None
        return Contiguous(self._even, find_group_start, find_chunk_rest)

    def _find_remaining(self) -> IntervalSet:
        if self._remaining is not None:
            return self._remaining
        return Progress(self.total_rows, self._create_split()).remaining

    def _assign(self) -> Assignment:
        """Return the positions of this rank."""
        if self._assignment is None:
            self._assignment = self._create_split().assign_positions(
                self._find_remaining(), self.rank, self.world_size
            )
        return self._assignment

    def __len__(self) -> int:
        return self._assign().length

    def count_step_rows(self, batch_size: int) -> list[list[int]]:
        """Return the rows of each rank in each step of the rest of the epoch, from the plan."""
        split, remaining = self._create_split(), self._find_remaining()
        return split.count_step_rows(remaining, self.world_size, batch_size)

    def find_positions(self, indices: npt.ArrayLike) -> Int64s:
        """Return the positions of this rank's rows at ``indices``, padding included."""
        return self._assign().find_positions(np.asarray(indices, dtype=np.int64))

    def iter_windows(self, skip: int = 0) -> Iterator[Window]:
        """Yield this rank's rows in order, with the blocks to hold for them.

        The first ``skip`` rows are left out.
        """
        assignment = self._assign()
        order = self._get_order()
        if assignment.step == 1:
            for start, stop in assignment.iter_intervals(skip):
                for low, high in order.iter_ranges(start, stop):
                    yield self._create_window(np.arange(low, high))
            rest = max(skip, assignment.count)
        else:
            rest = skip
        for first in range(rest, assignment.length, _ITERATION_ROWS):
            indices = np.arange(first, min(assignment.length, first + _ITERATION_ROWS))
            yield self._create_window(assignment.find_positions(indices))

    def _create_window(self, positions: Int64s) -> Window:
        rows, sources, order = self.locate(positions), self.sources, self._get_order()
        blocks = []
        for source in np.unique(rows.array[:, 0]).tolist():
            if not sources[source].random_access:
                found = np.unique(rows.array[rows.array[:, 0] == source, 1])
                found = order.sort_blocks(found, source, int(positions[0]))
                blocks += [BlockKey(source, block) for block in found.tolist()]
        return Window(blocks, rows)

    @property
    def row_ids(self) -> RowIds:
        """Ids ``(file, row)`` of this rank's rows in this epoch, in order. Nothing is read."""
        return RowIds(self)

    @property
    def padded(self) -> list[RowId]:
        """Rows that this rank repeats (``even="pad"``)."""
        return self.row_ids[self._assign().count :]

    @property
    def dropped(self) -> list[RowId]:
        """Rows that no rank gets in this epoch (``even="drop"``); the same on all ranks."""
        assignment = self._assign()
        total = assignment.remaining.total
        shared = self._create_split().count_shared(total, self.world_size)
        numbers = np.arange(shared, total)
        return self.name_positions(assignment.remaining.find_positions(numbers))

    def _get_buffer(self) -> BlockBuffer:
        if self._buffer is None or self._buffer.pid != os.getpid():
            self._buffer = BlockBuffer(self.sources, self.memory_budget // 2)
        return self._buffer

    def read_ordinals(self, ordinals: npt.ArrayLike) -> list[Any]:
        """Read rows by their ordinal among the selected rows."""
        array = np.asarray(ordinals, dtype=np.int64)
        rows = self._get_buffer().read_rows(self.row_set.locate(array))
        return to_rows(rows, lambda i: self.row_set.name_ordinals(array[i : i + 1])[0])

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        """Return this rank's ``index``-th row of the epoch, or a list of rows for a slice."""
        if isinstance(index, slice):
            return self.__getitems__(range(*index.indices(len(self))))
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return several rows at once, as torch's loader requests them."""
        checked = check_indices(indices, len(self))
        if not checked:
            return []
        return self.read_ordinals(self.find_ordinals(self.find_positions(checked)))

    def __iter__(self) -> Iterator[Any]:
        self.start_pass()
        count, number = len(self), 0
        buffer = self._get_buffer()
        for window in self.iter_windows():
            buffer.keep_only(window.blocks)
            buffer.load(window.blocks)
            for start in range(0, len(window.rows), _ITERATION_ROWS):
                rows = buffer.gather(window.rows[start : start + _ITERATION_ROWS])
                for row in to_rows(rows, partial(self._name_row, number)):
                    number += 1
                    self.record_taken(number, complete=number == count)
                    yield row
        self.finish_epoch()

    def _name_row(self, first: int, index: int) -> RowId:
        return self.row_ids[first + index]

    def __repr__(self) -> str:
        files = sum(len(member.source.files) for member in self.row_set.members)
        return (
            f"<{type(self).__name__}: rank {self.rank} of {self.world_size}, {files} files,"
            f" epoch {self.epoch}>"
        )


def resolve_rank(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return both after a check. None is a dataset that isn't sharded: rank 0 of 1."""
    return check_rank(0 if rank is None else rank, 1 if world_size is None else world_size)


def check_indices(indices: Sequence[int], count: int) -> list[int]:
    """Return ``indices`` of ``count`` rows with negative ones counted from the end."""
    checked = [i + count if i < 0 else i for i in map(operator.index, indices)]
    if checked and not 0 <= min(checked) <= max(checked) < count:
        raise IndexError(f"rows {list(indices)} of {count}")
    return checked


class RowIds(Sequence[RowId]):
    """Ids of a dataset's rows: a lazy sequence of ``(file, row)``."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._length = len(dataset)

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> RowId: ...
    @overload
    def __getitem__(self, index: slice) -> list[RowId]: ...
    def __getitem__(self, index: int | slice) -> RowId | list[RowId]:
        if isinstance(index, slice):
            return self._name(range(*index.indices(self._length)))
        return self._name(check_indices([index], self._length))[0]

    def _name(self, indices: Sequence[int]) -> list[RowId]:
        return self._dataset.name_positions(self._dataset.find_positions(indices))

    def __iter__(self) -> Iterator[RowId]:
        for start in range(0, self._length, 4096):
            yield from self[start : start + 4096]
