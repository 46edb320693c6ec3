"""``WorkerCheckpoints``: the state of the workers in checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import miniray
from miniray.train.options import warn
from miniray.train.run.checkpointer import Checkpointer, Part

if TYPE_CHECKING:
    from miniray.train.run.checkpoints.format import LateState
    from miniray.train.run.loggers.logger_list import LoggerList
    from miniray.train.run.session import RunSession
    from miniray.train.run.state import TrainState

#: Returns the current ``WorkerGroup`` or ``LockstepGroup``.
GetGroup = Callable[[], Any]


class WeightSync:
    """How the weights of independent workers are kept equal. By default, they aren't."""

    @property
    def is_in_sync(self) -> bool:
        """Whether all workers have the same weights."""
        return False

    def pause(self) -> None:
        """Wait until no worker trains."""

    def start_epoch(self) -> None:
        """Note that workers are about to change their weights."""

    def keep(self, step: int) -> bool:
        """Keep the restored state, to restart from; return False if it must be restored again."""
        return True

    def get_weights(self) -> Any:
        """Return the weights of a worker that trains alone, or those of all workers."""
        raise NotImplementedError

    def final_weights(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the workers have the weights of ``get_weights``."""
        return contextlib.nullcontext()

    def get_stats(self) -> dict[str, Any]:
        """Return the statistics of the parameter server; {} without one."""
        return {}

    def describe(self) -> dict[str, Any]:
        """Return the configuration for ``run.json``."""
        return {}


class WorkerCheckpoints:
    """The state of independent workers in checkpoints: the parts ``weights`` and ``workers``.

    ``weights`` are those of all workers, or one copy if these are in sync. ``workers`` has their
    number, and the results of ``get_state`` if they have that method.

    Args:
        get_group: Returns the workers.
        sync: Keeps their weights equal.
    """

    checkpointer: Checkpointer
    session: RunSession
    state: TrainState

    def __init__(self, get_group: GetGroup, sync: WeightSync) -> None:
        self.get_group, self.sync = get_group, sync
        #: A checkpoint to restore when workers exist.
        self.loaded: dict[str, Any] | None = None

    def register(self, checkpointer: Checkpointer, session: RunSession, state: TrainState) -> None:
        """Register the parts that the workers hold. ``state`` is the position of the run."""
        self.checkpointer, self.session, self.state = checkpointer, session, state
        weights = Part(self.get_weights, self._set_weights)
        checkpointer.register("weights", weights, in_workers=True)
        states = Part(self._get_states, self._set_states)
        checkpointer.register("workers", states, in_workers=True)

    # -- writing ----------------------------------------------------------------------------------

    def save(self, *, is_complete: bool, background: bool) -> Path | None:
        """Write a checkpoint of the last completed epoch or step; see ``BaseTrainer``.

        Inside ``train_epoch``, ``is_complete`` says that the running epoch counts as completed.
        """
        self.get_group()  # raises without workers
        state = self.state
        done = state.epoch + (is_complete and state.in_epoch and not state.step_in_epoch)
        if not done and not state.step_in_epoch:
            raise RuntimeError(
                "no epoch was trained yet, so there is nothing to resume from: call train() first, "
                "or save_final_model() for the current weights"
            )
        if not self.can_save():
            return None
        state.number_record()
        late = self.keep()
        state = dataclasses.replace(state, epoch=done)
        return self.checkpointer.save(state, background=background, late=late)

    def can_save(self) -> bool:
        """Return whether the state of the workers is fit for a checkpoint."""
        return True

    def keep(self) -> LateState | None:
        """Let workers keep their state for a checkpoint; None to read it at once."""
        return None

    def save_newest(self) -> None:
        """Write a checkpoint of what workers have kept, because they are stopped in a step."""

    def get_weights(self) -> list[Any] | None:
        """Return a list of weights. None if the workers have no ``get_weights``."""
        group = self.get_group()
        if not group.has("get_weights"):
            return None
        self.sync.pause()
        if self.sync.is_in_sync and not self.state.in_epoch:
            return [self.sync.get_weights()]
        weights: list[Any] = group.call("get_weights", lambda _: (), {})
        return weights

    def _get_states(self) -> dict[str, Any]:
        group = self.get_group()
        has_states = group.has("get_state")
        states = group.call("get_state", lambda _: (), {}) if has_states else None
        return {"count": len(group.handles), "states": states}

    # -- reading ----------------------------------------------------------------------------------

    def load(self, path: str | Path, loggers: LoggerList) -> None:
        """Go to the position of a checkpoint, and open the run directory in which to continue."""
        session, state = self.session, self.state
        where, loaded = self.checkpointer.load(path, session.requested_path, session.title)
        loggers.log_epoch(state)  # of the epoch that a hook goes back from
        state.load_state_dict(loaded["state"])
        run = session.open_for(where)
        self.checkpointer.open(run.checkpoints)
        run.rewind(state.epoch, state.step, state.history)
        self.loaded = loaded

    def restore_loaded(self) -> None:
        """Restore the workers and all parts from the loaded checkpoint, if there is one."""
        if self.loaded is not None:
            step = self.state.step
            self.restore(self.loaded)
            if self.state.step != step:  # the epoch starts again
                self.session.directory.truncate_steps(self.state.step)
            self.loaded = None

    def restore(self, loaded: Mapping[str, Any]) -> None:
        """Restore all parts.

        If an epoch isn't complete and the workers' shards contain other rows than before, it starts
        again.
        """
        group, state = self.get_group(), self.state
        self.sync.pause()  # what asynchronous workers push now is newer than the checkpoint
        self.warn_of_other_size(loaded)
        self.checkpointer.restore(loaded, lambda: list(group.handles))
        while not self.sync.keep(state.step):
            self.checkpointer.restore(loaded, lambda: list(group.handles))
        group.replaced.clear()
        is_other_size = loaded["workers"]["count"] != group.count
        if state.step_in_epoch and is_other_size and not loaded.get("data"):
            epoch_start = state.step - state.step_in_epoch
            text = (
                f"the checkpoint of step {state.step} is inside an epoch, whose rows are sharded "
                f"again: training continues at the start of this epoch, step {epoch_start}. Data "
                "of miniray.data as data= would continue with the remaining rows"
            )
            self._warn_of_change("epoch_restarted", text)
            state.step, state.step_in_epoch = epoch_start, 0
        if len(loaded["weights"] or ()) > 1:
            self.sync.start_epoch()  # the workers' weights differ

    def _set_weights(self, weights: Sequence[Any] | None) -> None:
        """Set the weights. On a different number of workers, all get the average."""
        if weights is None:
            return
        group = self.get_group()
        count = len(group.handles)
        if len(weights) != count:
            from miniray.ps.weights import mean

            one = mean(weights) if len(weights) > 1 else weights[0]
            weights = [miniray.put(one)] * count
        group.map("set_weights", dict(enumerate(weights)))

    def _set_states(self, saved: Mapping[str, Any]) -> None:
        """Restore the states of the workers that both runs have."""
        if saved["states"] is not None:
            group = self.get_group()
            group.map("set_state", dict(enumerate(saved["states"][: len(group.handles)])))

    def _warn_of_change(self, event: str, text: str) -> None:
        """Warn that the run continues with a different configuration, and record the event."""
        warn(text)
        self.session.append_event({"event": event, "message": text})

    def warn_of_other_size(self, loaded: Mapping[str, Any]) -> None:
        """Warn if the run continues from a checkpoint of a different number of workers."""
        weights, saved, count = loaded["weights"], loaded["workers"], self.get_group().count
        if saved["count"] == count:
            return
        kept = min(saved["count"], count)
        text = f"resuming a run of {saved['count']} workers on {count}: data is sharded again"
        if weights is not None and len(weights) > 1:
            text += ", the workers' weights are averaged"
        if saved["states"] is not None:
            rest = (
                "the others start without one"
                if kept == saved["count"]
                else "that of the others is dropped"
            )
            text += f", workers 0 to {kept - 1} restore their state and {rest}"
        self._warn_of_change("resumed_on_other_size", text)
