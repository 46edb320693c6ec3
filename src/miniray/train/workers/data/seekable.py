"""``EpochData`` of loaders of ``miniray.data``, which can start at any row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from miniray.errors import DataError
from miniray.train.workers.data.epoch_data import Base, EpochData
from miniray.train.workers.data.plan import Window, create_row_windows

if TYPE_CHECKING:
    from miniray.data import DataLoader
    from miniray.train.run.state import RankState

#: The state of a loader at the start of an epoch.
_AT_START = {"taken": 0, "alone": False, "rank": None}


class SeekableData(EpochData):
    """The batches of a loader with a batch size; the plan of the dataset has their rows.

    If the dataset has groups, ranks have different numbers of rows in each epoch.
    """

    has_position = is_planned = True
    _position_type: type = Mapping

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._windows_of_epoch: list[Window] | None = None  # from its start
        self._plan_windows()

    @property
    def has_equal_epochs(self) -> bool:  # type: ignore[override]
        return bool(self.loader.dataset.has_fixed_shares)

    # -- plan -------------------------------------------------------------------------------------

    def _prepare(self, state: RankState) -> None:
        self._plan_epoch(state.epoch)

    def _plan_epoch(self, epoch: int) -> None:
        if not self.has_equal_epochs and self._base.position is None:
            self._seek_base(epoch)
            self._windows_of_epoch = None
            self._plan_windows()

    def _plan_windows(self) -> None:
        position, limit = self._base.position, self._count_batches_left()
        if position is None and self._windows_of_epoch is not None:
            self.windows = self._windows_of_epoch
            return
        rows, is_rest = _count_rows(self.loader)[:limit], position is not None
        self.windows = create_row_windows(
            rows, self._rank, self._accumulate, self._uneven, is_rest=is_rest
        )
        if position is None:
            self._windows_of_epoch = self.windows

    def _set_base(self, base: Base) -> None:
        if base.position is not None:
            self.loader.load_state_dict(base.position)
            base = Base(base.step, {**self.loader.state_dict(), **_AT_START})
        super()._set_base(base)
        if self.has_equal_epochs or base.position is not None:
            self._plan_windows()

    # -- start ------------------------------------------------------------------------------------

    def _seek(self, epoch: int, done: int) -> None:
        if not self.has_equal_epochs:  # a loaded state would divide the groups again
            assert self.windows is not None
            self._seek_base(epoch)
            self.loader.skip_batches(sum(map(len, self.windows[:done])))
            return
        state, now = self._find_state(epoch, done), self.loader.state_dict()
        if done or (now["epoch"], now["history"]) != (epoch, state["history"]):
            self.loader.load_state_dict(state)

    def _seek_base(self, epoch: int) -> None:
        """Let the loader start at the base."""
        state, now = self._find_base(epoch), self.loader.state_dict()
        if now["taken"] or (now["epoch"], now["history"]) != (epoch, state["history"]):
            self.loader.load_state_dict(state)

    def _load_last(self, epoch: int, done: int) -> Any:
        batch, loader = None, self.loader.shard(self._rank, self._world_size)
        for position in (self._base.position, None):
            loader.load_state_dict(position or self._find_state(epoch, 0, is_start=True))
            for found in loader:
                batch = found
            if batch is not None:
                break
        return batch

    # -- position ---------------------------------------------------------------------------------

    def _find_position(self, epoch: int, done: int, is_inside: bool) -> Any:
        return self._find_state(epoch, done, is_start=not is_inside)

    def _find_state(self, epoch: int, done: int, is_start: bool = False) -> dict[str, Any]:
        """Return the state of the loader at a number of steps after the base."""
        state = self._find_base(epoch, is_start)
        assert self.windows is not None
        batches = sum(map(len, self.windows[:done]))
        return {**state, "taken": batches * self.loader.batch_size}

    def _find_base(self, epoch: int, is_start: bool = False) -> dict[str, Any]:
        """Return the state of the loader at the base, or at the start of the epoch."""
        state: dict[str, Any] | None = None if is_start else self._base.position
        if state is None:
            state = {**self.loader.state_dict(), "epoch": epoch, "history": [], **_AT_START}
        return state

    def _load_seed(self, position: Any) -> None:
        self.loader.load_state_dict(position)


class TokenData(SeekableData):
    """Batches by tokens, which have to be counted.

    Each rank reads the lengths of its rows, and the ranks exchange the numbers of their batches.
    With shuffling, this is repeated in each epoch. The number of steps is enough to know the
    position. The rest of an epoch can be divided among a different number of ranks if each gets the
    merged state of all loaders (``load_own_state``).
    """

    is_planned = False
    _position_type = type(None)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._chunks: list[int] = []  # batches of this rank by chunk of rows
        self._counted: Any = None  # what ``windows`` were counted for
        self._own_state: Any = None  # of the loader, from a saved run, until the loader starts
        self._saved: Mapping[str, Any] | None = None  # position of other ranks, until then
        super().__init__(*args, **kwargs)

    @property
    def has_equal_epochs(self) -> bool:  # type: ignore[override]
        return not self.loader.dataset.is_shuffled

    def _plan_windows(self) -> None:
        """Do nothing: the ranks have to exchange their numbers of batches."""

    def _plan_epoch(self, epoch: int) -> None:
        """Do nothing: see above."""

    def count_batches(self, epoch: int, touch: Callable[[], None] = lambda: None) -> int:
        self._seek_base(epoch)
        self._chunks = []
        for count in self.loader.count_chunk_batches():
            self._chunks.append(count)
            touch()
        self._counted = self._find_counted(epoch)
        return sum(self._chunks)

    def _find_counted(self, epoch: int) -> tuple[int | None, int]:
        """Return what the number of batches depends on."""
        return None if self.has_equal_epochs else epoch, self._base.step

    def _prepare(self, state: RankState) -> None:
        """Plan an epoch, or the rest of it after the base."""
        own, self._own_state = self._own_state, None
        saved, self._saved = self._saved, None
        if saved is not None and state.step_in_epoch:
            if own is None or own["rank"] is not None:
                raise DataError(
                    "The run can't continue inside the epoch: its batches by tokens were saved for "
                    f"{saved['layout'][0]} ranks and accumulate={saved['layout'][2]}, and are now "
                    f"for {self._world_size} ranks and accumulate={self._accumulate}. Change "
                    "accumulate at the end of an epoch.",
                    rank=self._rank,
                )
            self._set_base(Base(state.step_in_epoch, own))
        if self._counted != self._find_counted(state.epoch):
            self.set_counts(self._exchange(self.count_batches(state.epoch, self._touch)))

    def _seek(self, epoch: int, done: int) -> None:
        self._seek_base(epoch)
        self._skip_batches(self._count_taken(done))

    def _count_taken(self, done: int) -> int:
        """Return the number of this rank's batches in a number of steps after the base."""
        assert self.windows is not None
        return sum(weight > 0 for window in self.windows[:done] for weight in window)

    def _skip_batches(self, batches: int) -> None:
        """Let the loader leave out the first batches after the base."""
        chunks = 0
        for count in self._chunks:
            if batches < count:
                break
            batches -= count
            chunks += 1
        self.loader.skip_batches(batches, chunks)

    def _load_last(self, epoch: int, done: int) -> Any:
        taken = self._count_taken(done)
        if taken:
            self._seek_base(epoch)
            self._skip_batches(taken - 1)
        else:  # all batches of this rank were before the base
            self.loader.load_state_dict(self._find_base(epoch, is_start=True))
        return next(iter(self.loader))

    # -- position ---------------------------------------------------------------------------------

    def get_position(self, state: RankState) -> dict[str, Any] | None:
        return super().get_position(state) if self._saved is None else dict(self._saved)

    def _find_position(self, epoch: int, done: int, is_inside: bool) -> None:
        """Return None: the number of steps is enough."""

    def _load_seed(self, position: Any) -> None:
        """Do nothing: ``load_own_state`` restores it."""

    def _load_elsewhere(self, saved: Mapping[str, Any], state: RankState) -> None:
        self._saved = saved

    def get_own_state(self, state: RankState) -> dict[str, Any]:
        own = super().get_own_state(state)
        if self._own_state is not None:
            own["loader"]["own"] = self._own_state
        return own

    def load_own_state(self, saved: Mapping[str, Any]) -> None:
        """Restore ``get_own_state`` of this rank.

        The loader continues at the position, which is restored separately. Only on a different
        number of ranks, it continues at its own state, which is merged then.
        """
        loader = saved["loader"]
        if loader["own"] is not None:
            self._own_state, loader = loader["own"], {**loader, "own": None}
            self.loader.load_state_dict({**self._own_state, "history": [], **_AT_START})
            self._counted = None  # it was for the seed before
        super().load_own_state({**saved, "loader": loader})


def _count_rows(loader: DataLoader) -> list[list[int]]:
    """Return the rows of each rank in each of the batches that are left."""
    size = loader.batch_size
    rows = loader.dataset.count_step_rows(size)
    if loader.drop_last:
        rows = [[count if count == size else 0 for count in step] for step in rows]
        rows = [step for step in rows if any(step)]
    return rows
