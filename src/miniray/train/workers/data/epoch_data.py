"""``EpochData``: the batches of one rank by optimizer step, and the position inside an epoch.

The position is the same on all ranks, and follows from the number of completed steps. The *base* is
the step at which the current plan starts. This is the start of the epoch, or, after resuming inside
an epoch on a different number of ranks, the step of the checkpoint. The rest of the epoch is then
planned again, so that every row is delivered exactly once.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from miniray.data import DataLoader
from miniray.errors import DataError
from miniray.train.workers import torch_utils as parts
from miniray.train.workers.data import planned as data
from miniray.train.workers.data.loaders import get_loader_state, load_loader_state
from miniray.train.workers.data.plan import (
    Window,
    create_counted_windows,
    create_row_windows,
)

if TYPE_CHECKING:
    from miniray.train.run.state import RankState


@dataclasses.dataclass(frozen=True)
class Base:
    """The step of the epoch at which a plan starts.

    Attributes:
        step: Completed steps of the epoch.
        position: Completed samples of planned batches, or the state of a loader of miniray.data.
            ``None`` is the start of the epoch.
    """

    step: int = 0
    position: Any = None


class EpochData:
    """The loader of a rank; see the module.

    The position is known for batches that miniray plans, and for loaders of ``miniray.data``. Other
    loaders keep their own state.

    Batches by tokens have to be counted: each rank reads the lengths of its rows, and the ranks
    exchange the numbers of their batches. With shuffling, this is repeated in each epoch. The rest
    of an epoch can be divided among a different number of ranks if each gets the merged state of
    all loaders (``load_own_state``).

    Args:
        exchange: Returns the numbers of all ranks for the number of each. A collective.

    Attributes:
        loader: The loader.
        is_counted: Whether the loader creates batches by tokens.
        windows: The steps from the base to the end of the epoch, or None if the number isn't known.
    """

    def __init__(
        self,
        loader: Any,
        rank: int,
        world_size: int,
        *,
        accumulate: int,
        uneven: str,
        limit: int | None = None,
        touch: Callable[[], None] = lambda: None,
        exchange: Callable[[int], Sequence[int]] = lambda count: [count],
    ) -> None:
        self.loader = loader
        self._rank, self._world_size = rank, world_size
        self._accumulate, self._uneven, self._touch = accumulate, uneven, touch
        self._limit, self._exchange = limit, exchange
        self.planned = data.planned(loader)
        self._plan = None if self.planned is None else self.planned.plan  # of the whole epoch
        self._is_seekable = isinstance(loader, DataLoader)
        self.is_counted = isinstance(loader, DataLoader) and loader.batch_by is not None
        self._chunks: list[int] = []  # batches by tokens of this rank
        self._counted: Any = None  # what ``windows`` were counted for
        self._own_state: Any = None  # of the loader, from a saved run, until the loader starts
        self._saved: Mapping[str, Any] | None = None  # position of other ranks, until then
        #: To continue inside an epoch, the loader starts at the beginning and skips batches.
        self._skips = not self.has_position and not hasattr(loader, "state_dict")
        self._start_state: dict[str, Any] | None = None
        self._base = Base()
        self.windows: list[Window] | None = None
        self._windows_of_epoch: list[Window] | None = None  # from its start
        if self.is_planned:
            self._plan_windows()

    @property
    def has_position(self) -> bool:
        """Whether the position follows from the number of steps."""
        return self.planned is not None or self._is_seekable

    @property
    def is_planned(self) -> bool:
        """Whether the rows of each step are known without reading any."""
        return self.has_position and not self.is_counted

    @property
    def has_equal_epochs(self) -> bool:
        """Whether all epochs have the same number of steps."""
        if not self._is_seekable:
            return True
        dataset = self.loader.dataset
        return not dataset.is_shuffled if self.is_counted else bool(dataset.has_fixed_shares)

    def count_batches(self, epoch: int, touch: Callable[[], None] = lambda: None) -> int | None:
        """Return the number of this rank's batches in an epoch; None if it isn't known."""
        if not self.is_counted:
            return data.length(self.loader)
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

    def set_counts(self, counts: Sequence[int]) -> None:
        """Plan with the number of batches of each rank, whose rows aren't known."""
        limit = self._count_batches_left()
        if limit is not None:
            counts = [min(count, limit) for count in counts]
        self.windows = create_counted_windows(
            counts, self._rank, self._accumulate, self._uneven, is_rest=self._base.step > 0
        )

    def _count_batches_left(self) -> int | None:
        """Return how many batches ``limit`` allows after the base."""
        if self._limit is None:
            return None
        return max(0, self._limit - self._base.step * self._accumulate)

    def count_steps(self) -> int | None:
        """Return the number of steps of the current epoch, or None if it isn't known."""
        return None if self.windows is None else self._base.step + len(self.windows)

    def count_global_batch(self) -> int | None:
        """Return the number of rows in a step of all ranks; None if the loader decides on it."""
        return math.prod(self._describe_layout()) if self.is_planned else None

    # -- an epoch ---------------------------------------------------------------------------------

    def start(self, state: RankState) -> tuple[Iterator[tuple[int, Any]], list[Window] | None, Any]:
        """Start the loader at the current step.

        Return the batches with their numbers, the windows that are left, and the last batch that
        this rank had if the first of these windows repeats it. A collective for batches by tokens.
        """
        if not state.step_in_epoch and self._base.step:
            self._set_base(Base())
        if self.is_counted:
            self._count_epoch(state)
        self._plan_epoch(state.epoch)
        if self._skips:
            self._set_start_state(state.step_in_epoch)
        data.set_epoch(self.loader, state.epoch)
        if self.windows is None:
            return enumerate(iter(self.loader)), None, None
        done = state.step_in_epoch - self._base.step
        windows, last = self.windows[done:], None
        number = self._base.step * self._accumulate
        number += sum(weight > 0 for window in self.windows[:done] for weight in window)
        if windows and not windows[0][0] and self.has_position:
            last = number - 1, self._load_last(state.epoch, done)
        self._seek(state.epoch, done)
        batches = iter(self.loader if self._skips or any(map(any, windows)) else ())
        for item in enumerate(itertools.islice(batches, number)) if self._skips else ():
            self._touch()  # so that a slow loader isn't reported as hung
            last = item
        return enumerate(batches, number), windows, last

    def _set_start_state(self, first: int) -> None:
        """Save the random state at the start of an epoch, or restore it to skip batches."""
        if not first or self._start_state is None:
            loader_state = get_loader_state(self.loader, has_position=False)
            self._start_state = {"random": parts.random_state(), "loader": loader_state}
        else:
            # Starting the processes of the loader draws random numbers.
            load_loader_state(self.loader, self._start_state["loader"])
            parts.set_random_state(self._start_state["random"])

    def _seek(self, epoch: int, done: int) -> None:
        """Let the loader start at a number of steps after the base."""
        if self.planned is not None:
            self.planned.set_epoch(epoch, done)
        elif self.is_counted:
            assert self.windows is not None
            self._seek_base(epoch)
            self._skip_batches(sum(w > 0 for window in self.windows[:done] for w in window))
        elif not self.has_equal_epochs:  # groups: a loaded state would divide them again
            assert self.windows is not None
            self._seek_base(epoch)
            self.loader.skip_batches(sum(map(len, self.windows[:done])))
        elif self._is_seekable:
            state = self._find_state(epoch, done)
            now = self.loader.state_dict()
            if done or (now["epoch"], now["history"]) != (epoch, state["history"]):
                self.loader.load_state_dict(state)

    def _count_epoch(self, state: RankState) -> None:
        """Plan an epoch of batches by tokens, or the rest of it after the base."""
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
            count = self.count_batches(state.epoch, self._touch)
            assert count is not None
            self.set_counts(self._exchange(count))

    def _seek_base(self, epoch: int) -> None:
        """Let the loader start at the base."""
        state, now = self._find_base(epoch), self.loader.state_dict()
        if now["taken"] or (now["epoch"], now["history"]) != (epoch, state["history"]):
            self.loader.load_state_dict(state)

    def _skip_batches(self, batches: int) -> None:
        """Let the loader leave out the first batches by tokens after the base."""
        chunks = 0
        for count in self._chunks:
            if batches < count:
                break
            batches -= count
            chunks += 1
        self.loader.skip_batches(batches, chunks)

    def _load_last(self, epoch: int, done: int) -> Any:
        """Load the last batch of this rank before a step, or any batch if there is none."""
        batch = None
        if self.is_counted:
            return self._load_last_counted(epoch, done)
        if self.planned is not None:
            plan = self.planned.plan
            if done and any(self.planned.windows()[done - 1]):
                self.planned.set_epoch(epoch, done - 1)
                *_, batch = iter(self.loader)
            else:
                assert self._plan is not None
                self.planned.plan = self._plan
                self.planned.set_epoch(epoch)
                batch = next(iter(self.loader))
                self.planned.plan = plan
            return batch
        loader = self.loader.shard(self._rank, self._world_size)
        for position in (self._base.position, None):
            loader.load_state_dict(position or self._find_state(epoch, 0, is_start=True))
            for found in loader:
                batch = found
            if batch is not None:
                break
        return batch

    def _load_last_counted(self, epoch: int, done: int) -> Any:
        assert self.windows is not None
        taken = sum(weight > 0 for window in self.windows[:done] for weight in window)
        if taken:
            self._seek_base(epoch)
            self._skip_batches(taken - 1)
        else:  # all batches of this rank were before the base
            self.loader.load_state_dict(self._find_base(epoch, is_start=True))
        return next(iter(self.loader))

    # -- plan -------------------------------------------------------------------------------------

    def _set_base(self, base: Base) -> None:
        if self._is_seekable and base.position is not None:
            self.loader.load_state_dict(base.position)
            base = Base(base.step, {**self.loader.state_dict(), **_AT_START})
        self._base = base
        if self.is_planned and (self.has_equal_epochs or base.position is not None):
            self._plan_windows()

    def _plan_epoch(self, epoch: int) -> None:
        """Plan an epoch in which ranks have different numbers of rows than in others."""
        if self.is_planned and not self.has_equal_epochs and self._base.position is None:
            self._seek_base(epoch)
            self._windows_of_epoch = None
            self._plan_windows()

    def _plan_windows(self) -> None:
        position, limit = self._base.position, self._count_batches_left()
        if self.planned is not None:
            assert self._plan is not None
            is_whole = position is None
            self.planned.plan = self._plan if is_whole else self._plan.rest(position, limit)
            self.windows = self.planned.windows()
        elif self._is_seekable:
            if position is None and self._windows_of_epoch is not None:
                self.windows = self._windows_of_epoch
                return
            rows = _count_rows(self.loader)
            self.windows = create_row_windows(
                rows[:limit],
                self._rank,
                self._accumulate,
                self._uneven,
                is_rest=position is not None,
            )
            if position is None:
                self._windows_of_epoch = self.windows

    # -- position ---------------------------------------------------------------------------------

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

    def get_position(self, state: RankState) -> dict[str, Any] | None:
        """Return the position, which is the same on all ranks, or None if it isn't known."""
        if not self.has_position:
            return None
        if self._saved is not None:
            return dict(self._saved)
        is_inside = state.step_in_epoch > 0
        done = state.step_in_epoch - self._base.step if is_inside else 0
        if self.is_counted:
            position: Any = None  # the number of steps is enough
        elif self._is_seekable:
            position = self._find_state(state.epoch, done, is_start=not is_inside)
        else:
            assert self.planned is not None
            start = self._base.position or 0
            position = start + self.planned.plan.samples(done) if is_inside else 0
        return {
            "layout": self._describe_layout(),
            "base": [self._base.step, self._base.position] if is_inside else [0, None],
            "position": position,
        }

    def _describe_layout(self) -> list[int]:
        """Return the numbers that determine the rows of a step."""
        return [
            self._world_size,
            self.loader.batch_size or self._get_batch_size(),
            self._accumulate,
        ]

    def _get_batch_size(self) -> int:
        assert self.planned is not None
        return self.planned.plan.batch_size

    def load_position(self, saved: Mapping[str, Any] | None, state: RankState) -> None:
        """Continue at a position, on any number of ranks; ``state`` has been restored.

        Raises:
            DataError: The position belongs to different data.
        """
        if saved is None or not self.has_position:
            return
        position = saved["position"]
        kind = type(None) if self.is_counted else Mapping if self._is_seekable else int
        if not isinstance(position, kind):
            raise DataError("The position in the data was saved with a different kind of loader.")
        if self._is_seekable and not self.is_counted:
            self.loader.load_state_dict(position)  # with its seed
        if not state.step_in_epoch:
            self._set_base(Base())
        elif list(saved["layout"]) == self._describe_layout():
            self._set_base(Base(*saved["base"]))
            self._plan_epoch(state.epoch)
        elif self.is_counted:
            self._saved = saved
        else:
            self._set_base(Base(state.step_in_epoch, position))

    def get_own_state(self, state: RankState) -> dict[str, Any]:
        """Return the state of this rank's loader alone."""
        loader = get_loader_state(self.loader, has_position=not self.is_planned)
        if self._own_state is not None:
            loader["own"] = self._own_state
        return {"loader": loader, "start": self._start_state if state.step_in_epoch else None}

    def load_own_state(self, saved: Mapping[str, Any]) -> None:
        """Restore ``get_own_state`` of this rank.

        Batches by tokens continue at the position, which is restored separately. Only on a
        different number of ranks, they continue at the loader's state, which is merged then.
        """
        loader = saved["loader"]
        if self.is_counted and loader["own"] is not None:
            self._own_state, loader = loader["own"], {**loader, "own": None}
            self.loader.load_state_dict({**self._own_state, "history": [], **_AT_START})
            self._counted = None  # it was for the seed before
        load_loader_state(self.loader, loader)
        self._start_state = saved.get("start")


_AT_START = {"taken": 0, "alone": False, "rank": None}


def _count_rows(loader: DataLoader) -> list[list[int]]:
    """Return the rows of each rank in each of the batches that are left."""
    size = loader.batch_size
    rows = loader.dataset.count_step_rows(size)
    if loader.drop_last:
        rows = [[count if count == size else 0 for count in step] for step in rows]
        rows = [step for step in rows if any(step)]
    return rows
