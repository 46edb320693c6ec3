"""A rank's share of the epochs: how far it has come, which rows are its part, and where those are.

Arithmetic only; nothing is read but what the order itself needs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, overload

from miniray.checks import check_int
from miniray.data.loader.blocks import Places
from miniray.data.plan import progress
from miniray.data.plan.order import Order, SequentialOrder, starts_of
from miniray.data.plan.selection import Selection
from miniray.data.plan.shard import Even
from miniray.data.sources.base import Source
from miniray.errors import DataError

RowId = tuple[str, int]  # the file, and the row within it


class Share(ABC):
    """A rank's way through the epochs of its dataset, and its part of each.

    A loop that was left starts its epoch again; one that came to the end begins the next. A state
    speaks for all ranks where they have taken as many rows; any number of ranks may load it. Rows
    of the part are known by index, by position in the epoch's order, and by place in the data.
    """

    _rank: int
    _world_size: int
    _even: Even
    _seed: int | None
    _shuffle: Literal["window", "global"] | None
    _window: int
    _max_samples: int
    _group_by: str | None
    _chunk_left: progress.ChunkLeft | None

    def _begin(self, epoch: int) -> None:
        self._epoch = epoch
        self._history: list[list[Any]] = []
        self._began_with = self._world_size
        self._taken: Any = 0
        self._alone = self._complete = False
        self._part: tuple[progress.Intervals, progress.Intervals] | None = None
        self._order: Order | None = None

    @abstractmethod
    def _forget(self) -> None:
        """Drop what follows from the seed and the state, to be worked out again."""

    @abstractmethod
    def _n(self) -> int:
        """Rows of the epoch, of all ranks."""

    @property
    @abstractmethod
    def kind(self) -> str: ...

    @property
    @abstractmethod
    def fingerprint(self) -> str: ...

    @abstractmethod
    def order_of(self, epoch: int, world_size: int) -> Order:
        """The order of an epoch that ``world_size`` ranks begin."""

    @property
    @abstractmethod
    def _selected(self) -> Selection:
        """The rows that take part."""

    @property
    @abstractmethod
    def sources(self) -> list[Source]:
        """Where the rows come from: one, or those of a mixture."""

    # -- how far it has come ---------------------------------------------------------------------

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._world_size

    @property
    def epoch(self) -> int:
        """The epoch that iterating gives next, or is giving."""
        return self._epoch

    @property
    def seed(self) -> int | None:
        """The seed in use: the one given, the run's, the one drawn, or that of a loaded state."""
        return self._seed

    def is_at(self, epoch: int) -> bool:
        """Whether this is the epoch under way or loaded, and not all of it delivered."""
        return epoch == self._epoch and not self._complete

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; nothing happens in the midst of it or where it was loaded.

        So a loop that calls it for every epoch goes on where a loaded state left off.
        """
        if not self.is_at(epoch):
            self._begin(check_int("epoch", epoch))

    def finish_epoch(self) -> None:
        """Begin the next epoch."""
        self._begin(self._epoch + 1)

    def restart(self) -> None:
        """Begin a pass: this epoch again, or the next if all of it has been delivered.

        Some loops stop after ``len`` batches and never ask for the end.
        """
        if self._complete:
            self.finish_epoch()
        self._taken, self._alone = 0, False

    def record(self, taken: Any, alone: bool = False, complete: bool = False) -> None:
        """Remember that this rank has taken so many rows since the epoch was begun or loaded.

        ``alone``: other ranks may have taken another number, so that states must be merged.
        ``complete``: that was the last of them.
        """
        self._taken, self._alone, self._complete = taken, alone, complete

    def set_chunks(self, chunk_left: progress.ChunkLeft) -> None:
        """Say how to find out what an interrupted chunk of batches by tokens had left."""
        self._chunk_left = chunk_left

    def _plan(self) -> dict[str, Any]:
        return {
            "shuffle": self._shuffle or False,
            "window": self._window if self._shuffle == "window" else 0,
            "max_samples": self._max_samples,
            "even": self._even,
            "group_by": self._group_by,
            "began_with": self._began_with,
        }

    def state_dict(self) -> dict[str, Any]:
        """How far the epoch has come, for all ranks: under 1 KB of JSON.

        At a step boundary, where all ranks have taken as many rows, any one rank's state is the
        run's. Where they have not, keep all and use ``merge_states``.
        """
        return {
            "version": progress.STATE_VERSION,
            "kind": self.kind,
            "n": self._n(),
            "fingerprint": self.fingerprint,
            "seed": self._seed,
            "epoch": self._epoch,
            "plan": self._plan(),
            "history": [list(stage) for stage in self._history],
            "world_size": self._world_size,
            "rank": self._rank,
            "taken": self._taken,
            "alone": self._alone and self._world_size > 1,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken, on any number of ranks; all load the same state.

        What is left of the epoch is cut into even parts for the ranks there are now. The seed is
        that of the state. Refuses, with ``DataError``, a state of other data or of another plan,
        and one that speaks for a single rank only.
        """
        progress.check_state(state, self.kind, self.fingerprint, self._plan())
        if state["n"] != self._n():  # may run the filter
            raise DataError(f"the state is of {state['n']} rows, and this dataset has {self._n()}")
        if self._seed != state["seed"]:  # a subset depends on it
            self._seed = state["seed"]
            self._forget()
        self._epoch = int(state["epoch"])
        plan = state["plan"]
        self._window = plan["window"] or self._window
        self._began_with = int(plan["began_with"])
        taken = state["taken"]
        if isinstance(taken, list) and state["rank"] is not None:
            taken = [taken]
        stage = [state["world_size"], taken, *state.get("batching", ())[1:]]
        self._history = progress.extended(
            state["history"], stage, int(state["n"]), joinable=self._group_by is None
        )
        self._taken, self._alone, self._complete = 0, False, False
        if not self._history:
            self._began_with = self._world_size
        self._order = self._part = None

    # -- its part --------------------------------------------------------------------------------

    def _parts(self) -> tuple[progress.Intervals, progress.Intervals]:
        """What is left of the epoch for all ranks, and this rank's part of it."""
        if self._part is None:
            snap = None
            if self._group_by is not None:
                from miniray.data.plan.groups import GroupedOrder

                order = self._current_order()
                assert isinstance(order, GroupedOrder)
                snap = order.snap
            left = progress.remaining(self._n(), self._history, self._even, snap, self._chunk_left)
            edges = progress.cuts(left, self._world_size, self._even, snap)
            own = progress.portion(left, edges[self._rank], edges[self._rank + 1])
            self._part = left, own
        return self._part

    def positions(self, index: Sequence[int]) -> list[int]:
        """Positions in the epoch's order of this rank's ``index``-th rows (padding included)."""
        left, own = self._parts()
        count = progress.size(own)
        if count:
            return progress.positions_at(own, [i if i < count else 0 for i in index])
        spare = self._rank % max(1, progress.size(left))
        return progress.positions_at(left, [spare] * len(index))

    def places(self, index: Sequence[int]) -> Places:
        """Where this rank's ``index``-th rows are."""
        return self.places_of(self.positions(index))

    def places_of(self, positions: Sequence[int]) -> Places:
        """Where the rows at ``positions`` of the epoch's order are."""
        return self.places_in(self._current_order(), positions)

    def _current_order(self) -> Order:
        if self._order is None:
            self._order = self.order_of(self._epoch, self._began_with)
        return self._order

    def ordinals(self, positions: Sequence[int]) -> list[int]:
        """The rows at ``positions`` by their number among all rows that take part, unshuffled."""
        return self.ordinals_in(self._current_order(), positions)

    def ordinals_in(self, order: Order, positions: Sequence[int]) -> list[int]:
        blocks, places = order.places(positions)
        starts = starts_of(self._selected.sizes)
        return [starts[block] + place for block, place in zip(blocks, places, strict=True)]

    def places_of_ordinals(self, ordinals: Sequence[int]) -> Places:
        """Where rows are, by their number among all rows that take part."""
        return self.places_in(SequentialOrder(self._selected.sizes), ordinals)

    def places_in(self, order: Order, positions: Sequence[int]) -> Places:
        """Where the rows at ``positions`` of any order of this dataset are."""
        blocks, places = order.places(positions)
        rows = self._selected.rows(blocks, places)
        return Places([0] * len(blocks), blocks, rows)

    def __len__(self) -> int:
        left, own = self._parts()
        if self._even == "pad":
            return (progress.size(left) + self._world_size - 1) // self._world_size
        return progress.size(own)

    def name_rows(self, places: Places) -> list[RowId]:
        """Stable ids of rows: file, and row within the file."""
        tables = [source.blocks for source in self.sources]
        found = []
        for source, block, row in zip(places.source, places.block, places.row, strict=True):
            blocks = tables[source]
            found.append((blocks.files[blocks.file[block]], blocks.first[block] + row))
        return found

    @property
    def row_ids(self) -> RowIds:
        """Ids ``(file, row)`` of this rank's rows in this epoch, in order; nothing is read."""
        return RowIds(self)

    @property
    def padded(self) -> list[RowId]:
        """Rows this rank gets although it or another rank has them (``even="pad"``)."""
        own = progress.size(self._parts()[1])
        return self.name_rows(self.places(range(own, len(self))))

    @property
    def dropped(self) -> list[RowId]:
        """Rows no rank gets in this epoch (``even="drop"``); the same on all ranks."""
        left = self._parts()[0]
        total = progress.size(left)
        shared = total - total % self._world_size if self._even == "drop" else total
        return self.name_rows(self.places_of(progress.positions_at(left, range(shared, total))))


class RowIds(Sequence[RowId]):
    """Ids of a dataset's rows: a lazy sequence of ``(file, row)``."""

    def __init__(self, dataset: Share) -> None:
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
            wanted = range(*index.indices(self._length))
            return self._dataset.name_rows(self._dataset.places(wanted))
        number = int(index) + (self._length if index < 0 else 0)
        if not 0 <= number < self._length:
            raise IndexError(f"row {index} of {self._length}")
        return self._dataset.name_rows(self._dataset.places([number]))[0]

    def __iter__(self) -> Iterator[RowId]:
        for start in range(0, self._length, 4096):
            yield from self[start : start + 4096]
