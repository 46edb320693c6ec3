"""The rows of a rank: which ones, in which order, and how many of them have been delivered.

Ranks create the same dataset with their rank and never communicate. Rows are known by *position* in
the order of the epoch, by *ordinal* among the selected rows in data order, and by *location* in the
blocks of a source. Only positions are saved in states.
"""

from __future__ import annotations

import copy
import operator
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar, overload

import numpy as np
import numpy.typing as npt

from miniray.checks import check_choice, check_int
from miniray.data.loader.blocks import BlockBuffer
from miniray.data.loader.columns import to_rows
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
    FindGroupStart,
    Interleaved,
    Split,
)
from miniray.data.sources.base import Source, parse_bytes

_ITERATION_ROWS = 256  # gathered at a time

RowId = tuple[str, int]  # file, and row within the file
SplitName = Literal["contiguous", "interleaved"]

Self = TypeVar("Self", bound="Dataset")


class Dataset(ABC):
    """Rows of ``rank`` of ``world_size``, in the order of the current epoch.

    ``len(ds)``, ``ds[i]`` and iteration cover the rank's rows of this epoch, or the rest of them
    after ``load_state_dict``. Iterating to the end starts the next epoch. A loop that ended early
    starts the epoch again. See ``ParquetDataset`` for the arguments.
    """

    def __init__(
        self,
        *,
        rank: int | None,
        world_size: int | None,
        even: Even,
        split: SplitName,
        seed: int | None,
        is_seed_fixed: bool,
        memory_budget: int | str,
    ) -> None:
        self._set_rank(rank, world_size)
        check_even(even)
        self._even: Even = even
        self._split: SplitName = check_choice("split", split, ("contiguous", "interleaved"))
        self._seed, self._is_seed_fixed = seed, is_seed_fixed
        #: Created outside of the run, without a seed. The run's seed replaces a random one.
        self._is_seed_random = seed is not None and not is_seed_fixed and find_run_seed() is None
        self._budget = parse_bytes(memory_budget)
        self._find_chunk_rest: FindChunkRest | None = None
        self._start_epoch(0)
        self._reset()

    def _set_rank(self, rank: int | None, world_size: int | None) -> None:
        """Set rank and world size. None is a dataset that isn't sharded yet."""
        self._is_sharded = rank is not None or world_size is not None
        self._rank, self._world_size = check_rank(
            0 if rank is None else rank, 1 if world_size is None else world_size
        )
        self._has_started = False

    def _start_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._history: list[list[Any]] = []
        self._taken: Any = 0
        self._is_alone = self._is_complete = False
        self._reset_epoch()

    def _reset_epoch(self) -> None:
        """Discard what depends on the epoch and the rank."""
        self._order: EpochOrder | None = None
        self._assignment: Assignment | None = None

    def _reset(self) -> None:
        """Discard what is computed from the arguments and the seed."""
        self._buffer: BlockBuffer | None = None
        self._reset_epoch()

    #: Attributes that aren't pickled.
    _transient: tuple[str, ...] = ("_order", "_assignment", "_buffer", "_find_chunk_rest")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, **dict.fromkeys(self._transient)}

    # -- for subclasses --------------------------------------------------------------------------

    @abstractmethod
    def prepare(self: Self) -> Self:
        """Run the filter and build the row cache now, instead of when the first row is read."""

    @property
    @abstractmethod
    def sources(self) -> list[Source]:
        """Sources that rows are read from: one, or those of a mixture."""

    @property
    @abstractmethod
    def kind(self) -> str:
        """Name of the format, such as ``"parquet"``."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Identifier of the data, which doesn't depend on the directory of the files.

        It changes with the names of files and their content, which is identified by the size and
        the footer (Parquet), a checksum (JSON lines), or a checksum of both ends (Arrow IPC). Of
        Python objects, only the number of rows is known.
        """

    @property
    @abstractmethod
    def column_names(self) -> list[str] | None:
        """Columns of the rows, or None if rows aren't of a table, as in ``IndexedDataset``."""

    @property
    @abstractmethod
    def total_rows(self) -> int:
        """Rows of all ranks in an epoch, after the filter and ``max_samples``."""

    @property
    @abstractmethod
    def distinct_rows(self) -> int:
        """Distinct rows after the filter and ``max_samples``; mixtures can repeat or skip some."""

    @abstractmethod
    def _create_order(self, epoch: int) -> EpochOrder: ...

    @abstractmethod
    def _describe_order(self) -> list[Any]:
        """Return what the order depends on besides the data and the seed."""

    @abstractmethod
    def _digest_selection(self) -> str: ...

    @abstractmethod
    def locate(self, positions: Int64s) -> Locations:
        """Return the locations of the rows at ``positions`` of the epoch's order."""

    @abstractmethod
    def locate_ordinals(self, ordinals: Int64s) -> Locations:
        """Return the locations of rows by their ordinal among the selected rows."""

    @abstractmethod
    def find_ordinals(self, positions: Int64s) -> Int64s:
        """Return the ordinals among the selected rows of the rows at ``positions``."""

    @abstractmethod
    def name_positions(self, positions: Int64s) -> list[RowId]:
        """Return the ids of the rows at ``positions``. Nothing is read."""

    @abstractmethod
    def name_rows(self, locations: Locations) -> list[RowId]:
        """Return the ids ``(file, row)`` of rows."""

    @abstractmethod
    def number_rows(self, locations: Locations) -> list[int]:
        """Return the numbers of rows in the dataset, the same on all ranks and in all epochs."""

    @abstractmethod
    def number_positions(self, positions: Int64s) -> list[int]:
        """Return the numbers of the rows at ``positions``. Nothing is read."""

    @property
    @abstractmethod
    def is_persistent(self) -> bool:
        """Whether the fingerprint changes whenever the content may have changed."""

    def _sort_blocks(self, source: int, blocks: Int64s) -> Int64s:
        """Return blocks of a source in the order in which they should be read."""
        return self._current_order().sort_blocks(blocks)

    @property
    def _find_group_start(self) -> FindGroupStart | None:
        return None

    # -- progress --------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return self._rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._world_size

    @property
    def is_sharded(self) -> bool:
        """Whether ``rank`` and ``world_size`` were passed, or set by ``shard``."""
        return self._is_sharded

    @property
    def split(self) -> SplitName:
        """How rows are divided among ranks: ``"contiguous"`` or ``"interleaved"``."""
        return self._split

    @property
    def has_started(self) -> bool:
        """Whether iteration has started."""
        return self._has_started

    @property
    @abstractmethod
    def is_shuffled(self) -> bool:
        """Whether each epoch has a different order."""

    @property
    def has_fixed_shares(self) -> bool:
        """Whether each rank has the same number of rows in all epochs."""
        return not self.is_shuffled or self._find_group_start is None

    @property
    def epoch(self) -> int:
        """Current epoch, from 0."""
        return self._epoch

    @property
    def seed(self) -> int | None:
        """Seed in use: passed, the run's, drawn, or that of a loaded state."""
        return self._seed

    @property
    def memory_budget(self) -> int:
        """Bytes that this rank may hold."""
        return self._budget

    def set_memory_budget(self, budget: int | str) -> None:
        """Set the budget. It doesn't change the order of rows."""
        self._budget = parse_bytes(budget)
        self._buffer = None

    def shard(self: Self, rank: int, world_size: int) -> Self:
        """Return the same dataset for a different rank. Nothing is read again.

        If the dataset was created without a seed outside of the run, it takes the seed of the run.
        """
        other = copy.copy(self)
        other.__dict__.update(self.__dict__)  # with what ``__getstate__`` leaves out
        if self._is_seed_random and (run_seed := find_run_seed()) is not None:
            other._seed, other._is_seed_random = run_seed, False
            other._reset()
        other._set_rank(rank, world_size)
        other._taken, other._is_alone, other._is_complete = 0, False, False
        other._buffer = other._assignment = None
        return other

    def is_at(self, epoch: int) -> bool:
        """Return whether ``epoch`` is the current one and not completely delivered."""
        return epoch == self._epoch and not self._is_complete

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch, unless it is the current one or its state was loaded.

        A loop can therefore call this before every epoch, and still resume from a loaded state.
        """
        if not self.is_at(epoch):
            self._start_epoch(check_int("epoch", epoch))

    def finish_epoch(self) -> None:
        """Start the next epoch."""
        self._start_epoch(self._epoch + 1)

    def start_pass(self) -> None:
        """Start this epoch again, or the next one if all of its rows were delivered.

        Some loops stop after ``len`` batches, before iteration ends. Warn if several ranks read
        all rows because the dataset isn't sharded.
        """
        if not self._is_sharded and not self._has_started:
            warn_if_several_ranks()
        self._has_started = True
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

    def set_chunk_rest(self, find_chunk_rest: FindChunkRest) -> None:
        """Set the function that finds the rest of an interrupted chunk of token batches."""
        self._find_chunk_rest = find_chunk_rest

    def state_dict(self) -> dict[str, Any]:
        """Return the progress of the epoch for all ranks, in less than 1 KB of JSON.

        At a step boundary, when all ranks have taken the same number of rows, the state of any rank
        is valid for the run. Otherwise, keep the states of all ranks and use ``merge_states``.
        """
        return {
            "version": progress.STATE_VERSION,
            "fingerprint": self.fingerprint,
            "seed": self._seed,
            "epoch": self._epoch,
            "n": self.total_rows,
            "order": self._describe_order(),
            "split": self._split,
            "even": self._even,
            "selection": self._digest_selection(),
            "history": [list(stage) for stage in self._history],
            "world_size": self._world_size,
            "rank": self._rank,
            "taken": self._taken,
            "alone": self._is_alone and self._world_size > 1,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from ``state`` on any number of ranks, all of which load the same state.

        The remaining rows of the epoch are divided among the ranks. A seed that wasn't passed is
        taken from the state.

        Raises:
            DataError: The state is of different data or options, or valid for a single rank only.
        """
        progress.check_state(state)
        progress.check_single_state(state)
        expected: dict[str, Any] = {
            "fingerprint": self.fingerprint,
            "order": self._describe_order(),
            "split": self._split,
            "even": self._even,
        }
        if self._is_seed_fixed:
            expected["seed"] = self._seed
        progress.check_compatible(state, expected)
        self._is_seed_random = False
        if self._seed != state["seed"]:  # a subset depends on it
            self._seed = state["seed"]
            self._reset()
        rows = {"selection": self._digest_selection(), "n": self.total_rows}
        progress.check_compatible(state, rows)
        self._epoch = int(state["epoch"])
        taken = state["taken"]
        if isinstance(taken, list) and state["rank"] is not None:
            taken = [taken]
        stage = [state["world_size"], taken, *state.get("batching", ())[1:]]
        self._reset_epoch()
        self._history = state["history"]
        self._history = self._get_progress().extend(stage).history
        self._taken, self._is_alone, self._is_complete = 0, False, False

    # -- rows of the rank ------------------------------------------------------------------------

    def _current_order(self) -> EpochOrder:
        if self._order is None:
            self._order = self._create_order(self._epoch)
        return self._order

    def _create_split(self) -> Split:
        if self._split == "interleaved":
            return Interleaved(self._even)
        return Contiguous(self._even, self._find_group_start, self._find_chunk_rest)

    def _get_progress(self) -> Progress:
        return Progress(self.total_rows, self._create_split(), self._history)

    def _assign(self) -> Assignment:
        """Return the positions of this rank."""
        if self._assignment is None:
            found = self._get_progress()
            self._assignment = found.split.assign_positions(
                found.remaining, self._rank, self._world_size
            )
        return self._assignment

    def __len__(self) -> int:
        return self._assign().length

    def count_step_rows(self, batch_size: int) -> list[list[int]]:
        """Return the rows of each rank in each step of the rest of the epoch, from the plan."""
        found = self._get_progress()
        return found.split.count_step_rows(found.remaining, self._world_size, batch_size)

    def find_positions(self, indices: npt.ArrayLike) -> Int64s:
        """Return the positions of this rank's rows at ``indices``, padding included."""
        return self._assign().find_positions(np.asarray(indices, dtype=np.int64))

    def iter_windows(self, skip: int = 0) -> Iterator[Window]:
        """Yield this rank's rows in order, with the blocks to hold for them.

        The first ``skip`` rows are left out.
        """
        assignment = self._assign()
        order = self._current_order()
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
        rows = self.locate(positions)
        sources = self.sources
        blocks = []
        for source in np.unique(rows.array[:, 0]).tolist():
            if not sources[source].random_access:
                found = np.unique(rows.array[rows.array[:, 0] == source, 1])
                sorted_blocks = self._sort_blocks(source, found).tolist()
                blocks += [BlockKey(source, block) for block in sorted_blocks]
        return Window(blocks, rows)

    @property
    def row_ids(self) -> RowIds:
        """Ids ``(file, row)`` of this rank's rows in this epoch, in order. Nothing is read."""
        return RowIds(self)

    @property
    def padded(self) -> list[RowId]:
        """Rows that this rank repeats (``even="pad"``)."""
        indices = np.arange(self._assign().count, len(self))
        return self.name_positions(self.find_positions(indices))

    @property
    def dropped(self) -> list[RowId]:
        """Rows that no rank gets in this epoch (``even="drop"``); the same on all ranks."""
        assignment = self._assign()
        total = assignment.remaining.total
        shared = self._create_split().count_shared(total, self._world_size)
        numbers = np.arange(shared, total)
        return self.name_positions(assignment.remaining.find_positions(numbers))

    def _get_buffer(self) -> BlockBuffer:
        if self._buffer is None or self._buffer.pid != os.getpid():
            self._buffer = BlockBuffer(self.sources, self._budget // 2)
        return self._buffer

    def read_ordinals(self, ordinals: Sequence[int]) -> list[Any]:
        """Read rows by their ordinal among the selected rows."""
        locations = self.locate_ordinals(np.asarray(ordinals, dtype=np.int64))
        return self._to_rows(self._get_buffer().read_rows(locations), locations)

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
        positions = self.find_positions(np.array(checked, dtype=np.int64))
        locations = self.locate(positions)
        return self._to_rows(self._get_buffer().read_rows(locations), locations)

    def _to_rows(self, rows: Any, locations: Locations) -> list[Any]:
        return to_rows(rows, lambda i: self.name_rows(locations[i : i + 1])[0])

    def __iter__(self) -> Iterator[Any]:
        self.start_pass()
        count, number = len(self), 0
        buffer = self._get_buffer()
        for window in self.iter_windows():
            buffer.keep_only(window.blocks)
            buffer.load(window.blocks)
            for start in range(0, len(window.rows), _ITERATION_ROWS):
                locations = window.rows[start : start + _ITERATION_ROWS]
                for row in self._to_rows(buffer.gather(locations), locations):
                    number += 1
                    self.record_taken(number, complete=number == count)
                    yield row
        self.finish_epoch()


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
            return self._name(np.arange(*index.indices(self._length)))
        number = int(index) + (self._length if index < 0 else 0)
        if not 0 <= number < self._length:
            raise IndexError(f"row {index} of {self._length}")
        return self._name(np.array([number]))[0]

    def _name(self, indices: Int64s) -> list[RowId]:
        return self._dataset.name_positions(self._dataset.find_positions(indices))

    def __iter__(self) -> Iterator[RowId]:
        for start in range(0, self._length, 4096):
            yield from self[start : start + 4096]
