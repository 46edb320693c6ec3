"""``WorkerActor``: holds the user's worker and the shard of data that is assigned to it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from miniray.train.torch_worker import TorchWorker
from miniray.train.workers.data.loaders import shard_loader
from miniray.train.workers.data.shards import TrainData, find_kind, give_data, is_loader
from miniray.train.workers.group import filter_kwargs


class WorkerActor:
    """Wraps a worker of ``DataParallelTrainer(data=...)``; see ``ActorClass.wrap_with``.

    Attributes:
        user: The user's object.
    """

    def __init__(self, user: Any) -> None:
        self.user = user
        self._shard: Any = None  # set if its position can be saved
        self._stream: Any = None

    def assign_data(self, data: TrainData, shard_id: int, num_shards: int, **kwargs: Any) -> None:
        """Set the loaders of the user's object, or call its ``load_data_shard`` with a shard."""
        user = self.user
        inherited = TorchWorker.load_data_shard if data.data is not None else None
        has_own_load = getattr(type(user), "load_data_shard", None) not in (None, inherited)
        shard = give_data(
            user,
            data,
            shard_id,
            num_shards,
            kwargs,
            has_own_load=has_own_load,
            format="torch" if isinstance(user, TorchWorker) else None,
        )
        if data.data is None:
            return
        if not has_own_load:
            user.train_loader = shard = shard_loader(shard, shard_id, num_shards)
        kind = find_kind("data", data.data)
        if kind == "Hugging Face stream":
            self._stream = shard.dataset if is_loader(shard) else shard
        elif kind == "shardable":
            self._shard = shard if hasattr(shard, "state_dict") else shard.dataset

    def train_on_shard(
        self, epoch: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, dict[str, Any] | None]:
        """Call ``train_epoch``. Return its result and the state of the shard afterwards."""
        if self._stream is not None:
            self._stream.set_epoch(epoch)
        train = self.user.train_epoch
        result = train(epoch, *args, **filter_kwargs(inspect.signature(train), kwargs))
        return result, self.get_shard_state()

    def train_steps_on_shard(
        self, epoch: int, start: int, stop: int | None, **kwargs: Any
    ) -> tuple[Any, dict[str, Any] | None]:
        """Call ``train_steps``. Return its result and the state of the shard afterwards."""
        if self._stream is not None:
            self._stream.set_epoch(epoch)
        train = self.user.train_steps
        result = train(epoch, start, stop, **filter_kwargs(inspect.signature(train), kwargs))
        return result, self.get_shard_state()

    def get_shard_state(self) -> dict[str, Any] | None:
        """Return the position in the shard, or None if it can't be saved."""
        if self._shard is None:
            return None
        state: dict[str, Any] = self._shard.state_dict()
        return state

    def load_shard_state(self, state: Mapping[str, Any]) -> None:
        """Continue at a position that was merged from those of all workers."""
        self._shard.load_state_dict(state)
