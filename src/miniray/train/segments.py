"""``SegmentLoop``: trains epochs of workers with ``train_steps`` in segments.

The workers train a segment of an epoch on their own. Between two segments, the driver logs,
evaluates, saves, syncs or stops. The workers keep their loaders open, so this changes no weights.

Workers whose shards have fewer batches than others have nothing to do in the last segment. The step
of the run is that of the worker with the most batches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from miniray.core import session
from miniray.train.run.records import number
from miniray.train.run.step_log import LogWindow
from miniray.train.torch_worker import trains_steps
from miniray.train.workers.aggregate import aggregate

if TYPE_CHECKING:
    from miniray.train.run.state import TrainState, TrainTarget
    from miniray.train.steps import StepActions, StepOptions
    from miniray.train.workers.data.feed import DataFeed
    from miniray.train.workers.group import WorkerGroup
    from miniray.train.workers.sync.policy import SyncPolicy

#: Seconds between two pauses if no option asks for one: then a signal can end the run.
_PAUSE_S = 1.0


class SegmentLoop:
    """Trains epochs in segments; see the module.

    Args:
        sync: Combines the weights.
        feed: The data of the trainer; None if the workers load their own.
    """

    def __init__(self, sync: SyncPolicy, feed: DataFeed | None) -> None:
        self._sync, self._feed = sync, feed
        self._step_seconds: float | None = None
        self._group: WorkerGroup | None = None  # the group that ``_has_steps`` is about
        self._has_steps = False

    def find_problem(self, worker_class: Any, group: Any) -> str | None:
        """Return what is missing to count steps; None if nothing is, or if it isn't known yet."""
        if self._sync.mode != "sync":
            return 'mode="sync": with mode="async", no worker waits for a step'
        if group is None:
            can = worker_class is None or trains_steps(worker_class)
        else:
            can = self.is_supported(group)
        if can:
            return None
        return (
            "workers with train_steps(epoch, start, stop), such as a TorchWorker without its own "
            "train_epoch. With train_epoch alone, the steps are the workers' own"
        )

    def is_supported(self, group: WorkerGroup) -> bool:
        """Return whether the workers have ``train_steps``, and no other way to train an epoch."""
        if self._group is not group:
            self._group, self._has_steps = group, group.has("train_steps")
            if self._has_steps and group.has("_has_own_loop"):
                self._has_steps = not any(group.call("_has_own_loop", lambda _: (), {}))
        return self._has_steps

    def train(
        self,
        group: WorkerGroup,
        epoch: int,
        kwargs: Mapping[str, Any],
        target: TrainTarget,
        steps: StepActions,
        *,
        act: Callable[[Mapping[str, Any]], bool],
    ) -> dict[str, Any]:
        """Train an epoch, or the part of it up to the target; return the aggregated results.

        ``act(result)`` is called between two segments. It returns whether to stop.
        """
        kwargs = {k: v for k, v in kwargs.items() if k not in ("epoch", "start", "stop")}
        state = steps.state
        epoch_start = state.step - state.step_in_epoch
        count = _count_steps(group, epoch, state.step_in_epoch)
        while True:
            start, began = state.step_in_epoch, time.monotonic()
            due = steps.find_pause(target, count)
            pause = steps.find_pause(target, count, [self._choose_pause(steps.options.log_every)])
            stop = None if pause is None else pause - epoch_start
            synced = _find_synced_step(steps, start)
            results = self._train_segment(group, epoch, start, stop, synced, kwargs)
            done = max(_take_steps(i, result) for i, result in enumerate(results))
            is_complete = stop is None or done < stop
            state.report_step(epoch_start + done, 0 if is_complete else done)
            if done > start:
                self._step_seconds = (time.monotonic() - began) / (done - start)
            _log(group, steps, at_once=is_complete or state.step == due)
            result = {"step": state.step, **aggregate(results)}
            if is_complete:
                return result
            if steps.is_sync_due():
                self._sync.sync(epoch)
                self._sync.settle(epoch)
            if act(result) or target.is_reached(state):
                return result

    def _choose_pause(self, log_every: int) -> int | None:
        """Return the number of steps between two pauses for logging and for signals.

        There are none if the workers share a process: its random numbers would depend on them.
        """
        if not session.engine().capabilities.processes:
            return None
        if self._step_seconds is None:
            return 1
        steps = max(1, int(_PAUSE_S / self._step_seconds))
        return steps - steps % log_every if steps > log_every else steps

    def _train_segment(
        self,
        group: WorkerGroup,
        epoch: int,
        start: int,
        stop: int | None,
        synced: int,
        kwargs: Mapping[str, Any],
    ) -> list[Any]:
        """Train a segment on all workers, and return the results by worker id.

        A replacement has the weights of step ``synced``, and trains what came after it.
        """
        if not start:
            group.replaced.clear()
        method = "train_steps" if self._feed is None else "train_steps_on_shard"

        def submit(worker_id: int) -> Any:
            first = synced if worker_id in group.replaced else start
            return group.submit(worker_id, method, epoch, first, stop, **kwargs)

        self._sync.start_epoch()
        answers = group.call_some(range(group.count), submit, method, epoch)
        group.replaced.clear()
        results = [answers[worker_id] for worker_id in range(group.count)]
        return results if self._feed is None else self._feed.take_states(results)


def _count_steps(group: WorkerGroup, epoch: int, start: int) -> int | None:
    """Return the steps of an epoch of the worker with the most; None if they aren't known."""
    if not group.has("count_steps"):
        return None
    counts = group.call("count_steps", lambda _: (epoch, start), {})
    return None if None in counts else max(counts)


def _find_synced_step(steps: StepActions, start: int) -> int:
    """Return the step of this epoch after which the weights were synced."""
    every = steps.options.sync_every_steps
    return 0 if every is None else max(0, start - steps.state.step % every)


def _take_steps(worker_id: int, result: Any) -> int:
    """Remove ``num_steps`` from the result of a worker and return it."""
    steps = number(result.pop("num_steps", None)) if isinstance(result, dict) else None
    if steps is None:
        raise TypeError(
            f"worker {worker_id}: train_steps(epoch, start, stop) must return a dict of results "
            f"with num_steps, the number of completed steps of the epoch, not {result!r:.200}"
        )
    return int(steps)


def _log(group: WorkerGroup, steps: StepActions, *, at_once: bool) -> None:
    """Log what the workers have trained since the last record."""
    state = steps.state
    is_due = at_once or state.step == 1 or state.step % steps.options.log_every == 0
    if is_due and group.has("take_log"):
        windows: Sequence[LogWindow] = group.call("take_log", lambda _: (), {})
        steps.logs.add(window._replace(step=state.step, epoch=state.epoch) for window in windows)
    steps.log(at_once=at_once)


class StepSetup:
    """Gives ``TorchWorker``s the limits of their batches and the length of the run.

    It is a ``WorkerSetup``. Workers create the schedulers that depend on the length.

    Args:
        options: The options of the trainer.
        get_position: Returns the position of the run, and where it ends.
        trains_steps: Returns whether the workers' ``train_steps`` trains their epochs.
    """

    def __init__(
        self,
        options: StepOptions,
        get_position: Callable[[], tuple[TrainState, TrainTarget]],
        trains_steps: Callable[[WorkerGroup], bool],
    ) -> None:
        self._options = options
        self._get_position, self._trains_steps = get_position, trains_steps
        self._epoch_steps: int | None = None  # of each epoch, if the number is known and fixed
        self._length: RunLength | None = None  # what workers know; None if they don't count steps

    def start(self, group: WorkerGroup) -> None:
        """Prepare new workers, which have their data."""
        self._length = None
        if self._options.describe_limits():
            if not group.has("_set_limits"):
                raise self._options.create_limits_error(group.handles[0]._info.class_name)
            group.call("_set_limits", lambda _: (self._options,), {})
        if group.has("_prepare_steps") and self._trains_steps(group):
            counts = group.call("_count_equal_epochs", lambda _: (), {})
            self._epoch_steps = None if None in counts else max(counts)
            self._call(group, "_prepare_steps")

    def set_up(self, group: WorkerGroup, worker_id: int) -> None:
        """Prepare a replacement."""
        if self._options.describe_limits():
            group.set_up_call(worker_id, "_set_limits", self._options)
        if self._length is not None:
            group.set_up_call(worker_id, "_prepare_steps", *self._length)

    def start_epoch(self, group: WorkerGroup) -> None:
        """Tell the workers where the run is, and where this call of ``train`` ends."""
        if self._length is not None:
            self._call(group, "_set_length")

    def check_validation(self, group: WorkerGroup) -> None:
        """Validate on a few batches, so that an error doesn't wait for the first evaluation."""
        limit, count = self._options.sanity_limit, len(group.handles)
        if limit and group.has("_check_validation"):
            group.call("_check_validation", lambda i: (i, count, limit), {})

    def _call(self, group: WorkerGroup, method: str) -> None:
        state, target = self._get_position()
        first_step = state.step - state.step_in_epoch
        total = target.count_steps(state, self._epoch_steps)
        length = self._length = RunLength(first_step, target.epochs, total)
        group.call(method, lambda _: length, {})


class RunLength(NamedTuple):
    """The steps of the run before this epoch, and the epochs and steps at the end of the run."""

    first_step: int
    epochs: int | None
    total_steps: int | None
