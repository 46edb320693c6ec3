"""Data that the trainer deals out: ``DataParallelTrainer(data=...)``.

Worker i gets ``data.shard(i, num_workers)`` as the argument ``data`` of its ``load_data_shard``.
Its class is derived from, so that the trainer can ask the shard how far it has come (every epoch,
for checkpoints, for a worker's replacement) and tell it where to go on. The states of all workers
make one, which any number of workers can go on from: every row of an epoch comes exactly once.

Where a worker is travels with the result of its epoch, in one answer: a worker that dies before it
repeats the epoch's rows, one that dies after it does not.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from miniray.core.remote import ClassSpec
from miniray.data import merge_states
from miniray.errors import DataError
from miniray.train.workers.group import WorkerGroup, accepted


class Shardable(Protocol):
    """A dataset or loader of ``miniray.data``, or anything that can do the same."""

    def shard(self, rank: int, world_size: int) -> Any: ...


class _Dealt:
    """What the trainer calls. After the user's class in the order of bases: its names win.

    Errors speak of the user's methods: there ``_dealt_`` (``workers.WRAPPED``) is left out.
    """

    _dealt: Any = None

    def _dealt_load_data_shard(
        self, data: Any, shard_id: int, num_shards: int, **kwargs: Any
    ) -> None:
        self._dealt = data
        if callable(prepare := getattr(data, "prepare", None)):
            prepare()  # a filter or a cache build can take long, so not between barriers
        load: Any = self.load_data_shard  # type: ignore[attr-defined]
        load(shard_id, num_shards, data=data, **accepted(inspect.signature(load), kwargs))

    def _dealt_state(self) -> dict[str, Any]:
        state: dict[str, Any] = self._dealt.state_dict()
        return state

    def _dealt_train_epoch(self, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        train: Any = self.train_epoch  # type: ignore[attr-defined]
        result = train(*args, **accepted(inspect.signature(train), kwargs))
        return result, self._dealt_state()

    def _load_dealt_state(self, state: Mapping[str, Any]) -> None:
        self._dealt.load_state_dict(state)


@functools.cache
def dealt_spec(spec: ClassSpec) -> ClassSpec:
    """The class of ``spec`` as one that data can be dealt to; as it is where it takes none."""
    cls: Any = spec.cls
    load = getattr(cls, "load_data_shard", None)
    if load is None or not accepted(inspect.signature(load), {"data": None}):
        return spec
    own = {"__module__": cls.__module__, "__doc__": cls.__doc__, "__qualname__": cls.__qualname__}
    return ClassSpec(type(cls.__name__, (cls, _Dealt), own))


class Dealer:
    """The driver's side: the data itself and, after each epoch, where the workers are in it."""

    def __init__(self, data: Shardable) -> None:
        if not callable(getattr(data, "shard", None)):
            raise TypeError(
                f"data must be a dataset or loader of miniray.data, not {type(data).__name__}; "
                "put anything with len and [] into miniray.data.IndexedDataset(...)"
            )
        self._data = data
        self._states: Sequence[Mapping[str, Any]] = ()
        self._trained = False  # whether they are those of the end of the epoch under way

    def deal(self, group: WorkerGroup, kwargs: Mapping[str, Any]) -> None:
        """Give every worker its shard."""
        if not group.has("_dealt_load_data_shard"):
            raise TypeError(
                f"data= was given to the trainer, but {group.handles[0]._info.class_name} does not "
                "take it: it needs load_data_shard(self, shard_id, num_shards, data)"
            )
        count = len(group.handles)
        group.call(
            "_dealt_load_data_shard", lambda i: (self._data.shard(i, count), i, count), kwargs
        )
        self._states = group.call("_dealt_state", lambda _: (), {})

    def deal_one(self, group: WorkerGroup, worker_id: int, kwargs: Mapping[str, Any]) -> None:
        """Give a replacement its shard, as this epoch found it or, once it was trained, left it."""
        count = len(group.handles)
        shard = self._data.shard(worker_id, count)
        group.set_up_call(worker_id, "_dealt_load_data_shard", shard, worker_id, count, **kwargs)
        if self._states:  # else it is lost while the first shards are dealt
            group.set_up_call(worker_id, "_load_dealt_state", self.state())

    def train(
        self,
        group: WorkerGroup,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        epoch: int | None,
    ) -> list[Any]:
        """``train_epoch`` on all workers; results by worker id."""
        answers = group.call("_dealt_train_epoch", lambda _: args, kwargs, epoch)
        self._states = [state for _, state in answers]
        self._trained = True
        return [result for result, _ in answers]

    def note(self, group: WorkerGroup) -> None:
        """The epoch is over. What it has left of a pass over the data is shared out anew.

        So all workers count from the same point, and the part of a replacement in the next epoch
        cannot overlap with the others'.
        """
        if not self._trained:  # they were called in some other way
            self._states = group.call("_dealt_state", lambda _: (), {})
        self._trained = False
        try:
            state = self.state()
        except DataError:
            return  # some are an epoch ahead; whoever needs one state for all hears of it
        taken = state["taken"]
        if any(taken) if isinstance(taken, list) else taken:
            self.load(group, state)

    def state(self) -> dict[str, Any]:
        """One state for the whole run. ``DataError`` where there is none."""
        return merge_states(self._states)

    def load(self, group: WorkerGroup, state: Mapping[str, Any]) -> None:
        """Let all workers go on from ``state``, however many they were then."""
        group.call("_load_dealt_state", lambda _: (state,), {})
        self._states = group.call("_dealt_state", lambda _: (), {})
