"""Data that the trainer deals out: ``DataParallelTrainer(data=...)``.

Worker i gets ``data.shard(i, num_workers)`` as the argument ``data`` of its ``load_data_shard``.
Its class is derived from, so that the trainer can ask the shard how far it has come (every epoch,
for checkpoints, for a worker's replacement) and tell it where to go on. The states of all workers
make one, which any number of workers can go on from: every row of an epoch comes exactly once.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import miniray
from miniray.core.remote import ClassSpec
from miniray.data import merge_states
from miniray.errors import DataError
from miniray.train.workers import WorkerGroup, accepted


class Shardable(Protocol):
    """A dataset or loader of ``miniray.data``, or anything that can do the same."""

    def shard(self, rank: int, world_size: int) -> Any: ...


class _Dealt:
    """What the trainer calls. After the user's class in the order of bases: its names win."""

    _dealt: Any = None

    def _deal(self, data: Any, shard_id: int, num_shards: int, **kwargs: Any) -> None:
        self._dealt = data
        load: Any = self.load_data_shard  # type: ignore[attr-defined]
        load(shard_id, num_shards, data=data, **accepted(inspect.signature(load), kwargs))

    def _dealt_state(self) -> dict[str, Any]:
        state: dict[str, Any] = self._dealt.state_dict()
        return state

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

    def deal(self, group: WorkerGroup, kwargs: Mapping[str, Any]) -> None:
        """Give every worker its shard."""
        if not group.has("_deal"):
            raise TypeError(
                f"data= was given to the trainer, but {group.handles[0]._info.class_name} does not "
                "take it: it needs load_data_shard(self, shard_id, num_shards, data)"
            )
        count = len(group.handles)
        group.call("_deal", lambda i: (self._data.shard(i, count), i, count), kwargs)
        self._states = group.call("_dealt_state", lambda _: (), {})

    def deal_one(self, worker: Any, worker_id: int, count: int, kwargs: Mapping[str, Any]) -> None:
        """Give a replacement its shard, as it was when this epoch began."""
        shard = self._data.shard(worker_id, count)
        miniray.get(worker._deal.remote(shard, worker_id, count, **kwargs))
        miniray.get(worker._load_dealt_state.remote(self.state()))

    def note(self, group: WorkerGroup) -> None:
        """Ask the workers where they are.

        Workers that took different numbers of batches share out anew what is left of the epoch:
        only so does a replacement's part not overlap with the others'.
        """
        self._states = group.call("_dealt_state", lambda _: (), {})
        try:
            state = self.state()
        except DataError:
            return  # some are an epoch ahead; whoever needs one state for all hears of it
        if isinstance(state["taken"], list) and any(state["taken"]):
            self.load(group, state)

    def state(self) -> dict[str, Any]:
        """One state for the whole run. ``DataError`` where there is none."""
        return merge_states(self._states)

    def load(self, group: WorkerGroup, state: Mapping[str, Any]) -> None:
        """Let all workers go on from ``state``, however many they were then."""
        group.call("_load_dealt_state", lambda _: (state,), {})
        self._states = group.call("_dealt_state", lambda _: (), {})
