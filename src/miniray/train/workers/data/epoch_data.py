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
from miniray.train.workers.data.plan import Window, create_counted_windows

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


def create_epoch_data(loader: Any, *args: Any, **kwargs: Any) -> EpochData:
    """Return the ``EpochData`` for this kind of loader. See ``EpochData`` for the arguments."""
    kind = EpochData
    if data.planned(loader) is not None:
        kind = PlannedData
    elif isinstance(loader, DataLoader):
        from miniray.train.workers.data.seekable import SeekableData, TokenData

        kind = SeekableData if loader.batch_by is None else TokenData
    return kind(loader, *args, **kwargs)


class EpochData:
    """The loader of a rank; see the module.

    This class is for loaders whose batches user code chooses. They keep their own state, or start
    at the beginning and skip batches. Subclasses are for loaders with a known position.

    Args:
        exchange: Returns the numbers of all ranks for the number of each. A collective.

    Attributes:
        loader: The loader.
        windows: The steps from the base to the end of the epoch, or None if the number isn't known.
        planned: The batches that miniray plans, if it does.
        has_position: Whether the position follows from the number of steps.
        is_planned: Whether the rows of each step are known without reading any.
        has_equal_epochs: Whether all epochs have the same number of steps.
    """

    has_position = False
    is_planned = False
    has_equal_epochs = True
    #: Type of the position in a checkpoint.
    _position_type: type = int

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
        #: To continue inside an epoch, the loader starts at the beginning and skips batches.
        self._skips = not self.has_position and not hasattr(loader, "state_dict")
        self._start_state: dict[str, Any] | None = None
        self._base = Base()
        self.windows: list[Window] | None = None

    def count_batches(self, epoch: int, touch: Callable[[], None] = lambda: None) -> int | None:
        """Return the number of this rank's batches in an epoch; None if it isn't known."""
        del epoch, touch
        return data.length(self.loader)

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
        self._prepare(state)
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

    def _prepare(self, state: RankState) -> None:
        """Plan the epoch, or save the random state at its start, or restore it to skip batches."""
        if not self._skips:
            return
        if not state.step_in_epoch or self._start_state is None:
            loader_state = get_loader_state(self.loader, has_position=False)
            self._start_state = {"random": parts.random_state(), "loader": loader_state}
        else:
            # Starting the processes of the loader draws random numbers.
            load_loader_state(self.loader, self._start_state["loader"])
            parts.set_random_state(self._start_state["random"])

    def _seek(self, epoch: int, done: int) -> None:
        """Let the loader start at a number of steps after the base."""

    def _load_last(self, epoch: int, done: int) -> Any:
        """Load the last batch of this rank before a step, or any batch if there is none."""
        raise NotImplementedError

    # -- position ---------------------------------------------------------------------------------

    def _set_base(self, base: Base) -> None:
        """Set the base, and plan from there."""
        self._base = base

    def _find_position(self, epoch: int, done: int, is_inside: bool) -> Any:
        """Return the position at a number of steps after the base."""
        raise NotImplementedError

    def _load_elsewhere(self, saved: Mapping[str, Any], state: RankState) -> None:
        """Continue inside an epoch at the position of ranks with a different layout."""
        self._set_base(Base(state.step_in_epoch, saved["position"]))

    def get_position(self, state: RankState) -> dict[str, Any] | None:
        """Return the position, which is the same on all ranks, or None if it isn't known."""
        if not self.has_position:
            return None
        is_inside = state.step_in_epoch > 0
        done = state.step_in_epoch - self._base.step if is_inside else 0
        return {
            "layout": self._describe_layout(),
            "base": [self._base.step, self._base.position] if is_inside else [0, None],
            "position": self._find_position(state.epoch, done, is_inside),
        }

    def _describe_layout(self) -> list[int]:
        """Return the numbers that determine the rows of a step."""
        size = self.loader.batch_size if self.planned is None else self.planned.plan.batch_size
        return [self._world_size, size, self._accumulate]

    def load_position(self, saved: Mapping[str, Any] | None, state: RankState) -> None:
        """Continue at a position, on any number of ranks; ``state`` has been restored.

        Raises:
            DataError: The position belongs to different data.
        """
        if saved is None or not self.has_position:
            return
        if not isinstance(saved["position"], self._position_type):
            raise DataError("The position in the data was saved with a different kind of loader.")
        self._load_seed(saved["position"])
        if not state.step_in_epoch:
            self._set_base(Base())
        elif list(saved["layout"]) == self._describe_layout():
            self._set_base(Base(*saved["base"]))
            self._plan_epoch(state.epoch)
        else:
            self._load_elsewhere(saved, state)

    def _load_seed(self, position: Any) -> None:
        """Use the seed of the run that saved the position, if the position contains it."""

    def _plan_epoch(self, epoch: int) -> None:
        """Plan an epoch in which ranks have different numbers of rows than in others."""

    def get_own_state(self, state: RankState) -> dict[str, Any]:
        """Return the state of this rank's loader alone."""
        loader = get_loader_state(self.loader, has_position=not self.is_planned)
        return {"loader": loader, "start": self._start_state if state.step_in_epoch else None}

    def load_own_state(self, saved: Mapping[str, Any]) -> None:
        """Restore ``get_own_state`` of this rank."""
        load_loader_state(self.loader, saved["loader"])
        self._start_state = saved.get("start")


class PlannedData(EpochData):
    """The ``EpochData`` of a torch loader with ``PlannedBatches``."""

    has_position = is_planned = True
    planned: data.PlannedBatches

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._plan = self.planned.plan  # of the whole epoch
        self._set_base(Base())

    def _set_base(self, base: Base) -> None:
        super()._set_base(base)
        is_whole, limit = base.position is None, self._count_batches_left()
        self.planned.plan = self._plan if is_whole else self._plan.rest(base.position, limit)
        self.windows = self.planned.windows()

    def _seek(self, epoch: int, done: int) -> None:
        self.planned.set_epoch(epoch, done)

    def _load_last(self, epoch: int, done: int) -> Any:
        plan = self.planned.plan
        if done and any(self.planned.windows()[done - 1]):
            self.planned.set_epoch(epoch, done - 1)
            *_, batch = iter(self.loader)
        else:
            self.planned.plan = self._plan
            self.planned.set_epoch(epoch)
            batch = next(iter(self.loader))
            self.planned.plan = plan
        return batch

    def _find_position(self, epoch: int, done: int, is_inside: bool) -> int:
        start: int = self._base.position or 0
        return start + self.planned.plan.samples(done) if is_inside else 0
