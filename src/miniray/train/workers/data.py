"""Assign data to workers: ``load_data_shard``, and ``DataParallelTrainer(data=...)``.

With ``data=``, worker i gets ``data.shard(i, num_workers)`` as the argument ``data`` of its
``load_data_shard``. The trainer reads the position of each shard after every epoch, for checkpoints
and replacements. The positions of all workers merge into one, from which any number of workers can
continue: every row of an epoch is trained exactly once.

The position is part of the answer that contains the result of an epoch. A worker that is lost
before its answer repeats the rows of the epoch. One that is lost after it doesn't.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from miniray.data import merge_states
from miniray.errors import DataError
from miniray.train.workers.group import WorkerGroup, accepted, method_spec


class Shardable(Protocol):
    """A dataset or loader of ``miniray.data``, or an object with the same methods."""

    def shard(self, rank: int, world_size: int) -> Any: ...


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

    Raises:
        TypeError: ``data`` has no method ``shard``.
    """

    def __init__(self, data: Shardable) -> None:
        if not callable(getattr(data, "shard", None)):
            raise TypeError(
                f"data must be a dataset or loader of miniray.data, not {type(data).__name__}; "
                "put anything with len and [] into miniray.data.IndexedDataset(...)"
            )
        self._data = data
        self._group: WorkerGroup | None = None
        self._states: Sequence[Mapping[str, Any]] = ()
        self._trained = False  # whether the states are those of the end of the running epoch

    def start(self, group: WorkerGroup) -> None:
        """Assign a shard to every worker.

        Raises:
            TypeError: ``load_data_shard`` of the workers doesn't accept ``data``.
        """
        self._group, self._states = group, ()
        load = method_spec(group.handles[0], "load_data_shard")
        if load is None or not accepted(load.signature, {"data": None}):
            raise TypeError(
                f"data= was given to the trainer, but {group.handles[0]._info.class_name} does not "
                "take it: it needs load_data_shard(self, shard_id, num_shards, data)"
            )
        count = len(group.handles)
        group.call(
            "assign_shard", lambda i: (self._data.shard(i, count), i, count), group.get_kwargs()
        )
        self._states = group.call("get_shard_state", lambda _: (), {})

    def set_up(self, group: WorkerGroup, worker_id: int) -> None:
        """Assign a replacement its shard, at the start or the end of the running epoch."""
        count = len(group.handles)
        shard = self._data.shard(worker_id, count)
        group.set_up_call(worker_id, "assign_shard", shard, worker_id, count, **group.get_kwargs())
        if self._states:  # else the worker was lost while the first shards were assigned
            group.set_up_call(worker_id, "load_shard_state", self.state_dict())

    def train_epoch(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], epoch: int | None
    ) -> list[Any]:
        """Call ``train_epoch`` on all workers, and return the results by worker id."""
        assert self._group is not None
        answers = self._group.call("train_on_shard", lambda _: args, kwargs, epoch)
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
        try:
            state = self.state_dict()
        except DataError:
            return  # some workers are an epoch ahead; what needs one state for all raises
        taken = state["taken"]
        if any(taken) if isinstance(taken, list) else taken:
            self.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        """Return one position for all workers. Raise ``DataError`` if they have none."""
        return merge_states(self._states)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let all workers continue at ``state``, whatever their number was."""
        group = self._group
        assert group is not None
        group.call("load_shard_state", lambda _: (state,), {})
        self._states = group.call("get_shard_state", lambda _: (), {})
