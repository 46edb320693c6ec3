"""``WorkerActor``: holds the user's worker and the shard of data that is assigned to it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from miniray.train.workers.group import accepted


class WorkerActor:
    """Wrapper of a worker of ``DataParallelTrainer(data=...)``; see ``ActorClass.wrap_with``.

    Attributes:
        user: The user's object.
    """

    def __init__(self, user: Any) -> None:
        self.user = user
        self._shard: Any = None

    def assign_shard(self, data: Any, shard_id: int, num_shards: int, **kwargs: Any) -> None:
        """Call ``load_data_shard`` of the user's object with a shard as ``data``."""
        self._shard = data
        if callable(prepare := getattr(data, "prepare", None)):
            prepare()  # a filter or a cache build can take long, so not between barriers
        load = self.user.load_data_shard
        load(shard_id, num_shards, data=data, **accepted(inspect.signature(load), kwargs))

    def train_on_shard(self, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Call ``train_epoch``. Return its result and the state of the shard afterwards."""
        train = self.user.train_epoch
        result = train(*args, **accepted(inspect.signature(train), kwargs))
        return result, self.get_shard_state()

    def get_shard_state(self) -> dict[str, Any]:
        """Return the position in the shard."""
        state: dict[str, Any] = self._shard.state_dict()
        return state

    def load_shard_state(self, state: Mapping[str, Any]) -> None:
        """Continue at a position that was merged from all workers."""
        self._shard.load_state_dict(state)
