"""Assign data to workers: ``load_data_shard``, and ``DataParallelTrainer(data=...)``.

With ``data=``, each worker takes its shard; see ``shards``. The trainer reads the position of
shards of ``miniray.data`` after every epoch, for checkpoints and replacements. The positions of all
workers are merged into one, from which any number of workers can continue, so that every row of an
epoch is used exactly once. Other data starts again with each epoch, so it has no position.

Workers return the position together with the result of an epoch. If a worker is lost before it
returns, its replacement repeats the rows of the epoch; if it is lost afterwards, it doesn't.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from miniray.data import merge_states
from miniray.errors import DataError
from miniray.train.workers.data.shards import DataRef, TrainData
from miniray.train.workers.group import WorkerGroup


class ShardLoading:
    """Call ``load_data_shard(shard_id, num_shards, **kwargs)`` of workers that have it."""

    def start(self, group: WorkerGroup) -> None:
        """Load the shards of all workers at the same time."""
        if group.has("load_data_shard"):
            count = len(group.handles)
            group.call("load_data_shard", lambda i: (i, count), group.get_kwargs())

    def set_up(self, group: WorkerGroup, worker_id: int) -> None:
        """Load the shard of a replacement."""
        if group.has("load_data_shard"):
            shard = (worker_id, len(group.handles))
            group.set_up_call(worker_id, "load_data_shard", *shard, **group.get_kwargs())


class DataFeed:
    """Assign shards of ``data`` to the workers, and track how far each has read.

    It is a ``WorkerSetup``, and the part ``data`` of checkpoints. The workers are wrapped with
    ``WorkerActor``.
    """

    def __init__(self, data: TrainData) -> None:
        self._data = DataRef(data)
        self._group: WorkerGroup | None = None
        self._states: Sequence[Mapping[str, Any] | None] = ()
        self._trained = False  # whether the states are those of the end of the running epoch

    @property
    def has_position(self) -> bool:
        """Whether the shards know how far they have been read."""
        return any(state is not None for state in self._states)

    def start(self, group: WorkerGroup) -> None:
        """Assign a shard to every worker."""
        self._group, self._states = group, ()
        count, given = len(group.handles), self._data.get()
        group.call("assign_data", lambda i: (given, i, count), group.get_kwargs())
        self._states = group.call("get_shard_state", lambda _: (), {})

    def set_up(self, group: WorkerGroup, worker_id: int) -> None:
        """Assign a replacement its shard, at the start or the end of the running epoch."""
        count, given = len(group.handles), self._data.get()
        group.set_up_call(worker_id, "assign_data", given, worker_id, count, **group.get_kwargs())
        if self.has_position:  # else the worker was lost while the first shards were assigned
            group.set_up_call(worker_id, "load_shard_state", self.state_dict())

    def close(self) -> None:
        """Forget what the engine holds, before it stops."""
        self._data.close()

    def train_epoch(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], epoch: int | None
    ) -> list[Any]:
        """Call ``train_epoch`` on all workers, and return the results by worker id."""
        assert self._group is not None
        return self.take_states(self._group.call("train_on_shard", lambda _: args, kwargs, epoch))

    def take_states(self, answers: Sequence[tuple[Any, Mapping[str, Any] | None]]) -> list[Any]:
        """Keep the states of the shards after training, and return the results, by worker id."""
        self._states = [state for _, state in answers]
        self._trained = True
        return [result for result, _ in answers]

    def end_epoch(self) -> None:
        """Divide the rows that are left of the current pass over the data again.

        All workers then count from the same position, so the shard of a replacement in the next
        epoch can't overlap with those of the others.
        """
        group = self._group
        assert group is not None
        if not self._trained:  # train_epoch was called directly
            self._states = group.call("get_shard_state", lambda _: (), {})
        self._trained = False
        if not self.has_position:
            return
        try:
            state = self.state_dict()
        except DataError:
            return  # some workers are an epoch ahead; what needs one state for all raises
        taken = state["taken"]
        if any(taken) if isinstance(taken, list) else taken:
            self.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        """Return one position for all workers; empty if the data has none.

        Raises:
            DataError: The workers are in different epochs.
        """
        states = [state for state in self._states if state is not None]
        return merge_states(states) if states else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let all workers continue at ``state``, whatever their number was."""
        if not state:
            return
        group = self._group
        assert group is not None
        group.call("load_shard_state", lambda _: (state,), {})
        self._states = group.call("get_shard_state", lambda _: (), {})
