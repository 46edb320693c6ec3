"""The user's worker class, made into one whose objects can be ranks.

The class is derived from, not changed: its own methods are called as before. What it lacks of a
worker's methods (``get_weights``, ``set_weights``, ``set_lr``, ``evaluate``) is ``TorchWorker``'s.

Steps are made by ``ddp.loop`` where the class has a ``training_step``. A ``train_epoch`` of the
user's own, or an ``optimize``, is used instead: it is there because it does something else.
"""

from __future__ import annotations

import contextlib
import functools
import os
from typing import Any

from miniray.core import session
from miniray.core.remote import ClassSpec
from miniray.doctor import actors
from miniray.train.lockstep.rank import MemberMethods
from miniray.train.torch_worker import TorchWorker
from miniray.train.workers import torch_utils as parts


class RankMethods(MemberMethods):
    """What the driver calls. After the user's class in the order of bases: its names come first."""

    _ddp_steps = False  # the steps are ours, not the user's
    _ddp_sharded = False  # the user has cut the data
    _ddp_own_methods: tuple[str, ...] = ()  # what is the user's of what ``TorchWorker`` would do

    rank = functools.cached_property(lambda _: int(os.environ.get(actors.RANK, "0")))
    world_size = functools.cached_property(lambda _: int(os.environ.get(actors.WORLD_SIZE, "1")))

    @functools.cached_property
    def device(self) -> str:
        """Where a worker with ``training_step`` trains: its GPU if it was given one."""
        import torch

        mine = torch.cuda.is_available() and session.get_gpu_ids()
        return "cuda:0" if mine else "cpu"

    def _rank_prepare(self, rank: int, world_size: int, settings: Any) -> Any:
        for name, value in (("rank", rank), ("world_size", world_size)):
            if getattr(type(self), name) is getattr(RankMethods, name):  # else the user's own
                vars(self).setdefault(name, value)
        if settings.shard == "full":  # torch's FSDP takes a second to import
            from miniray.train.ddp.sharded import ShardedRank as Kind
        else:
            from miniray.train.ddp.rank import Rank as Kind  # type: ignore[assignment]
        self._member = Kind(self, rank, world_size, settings)
        return self._member.describe()

    def _rank_write_pretrained(self, directory: str | None, send_files: bool) -> Any:
        return self._mine().write_pretrained(directory, send_files)

    def _rank_evaluate(self, rows: Any) -> Any:
        return self._mine().evaluate(rows)


def is_own(cls: type, name: str) -> bool:
    """Whether the user's class has a method of its own, besides what ``TorchWorker`` gives."""
    method = getattr(cls, name, None)
    return method is not None and method is not getattr(TorchWorker, name, None)


@functools.cache
def rank_spec(spec: ClassSpec) -> ClassSpec:
    """The class of ``spec`` as one whose objects can be ranks; the same one for the same spec."""
    cls = spec.cls
    steps = is_own(cls, "training_step") and not (
        is_own(cls, "train_epoch") or is_own(cls, "optimize")
    )
    added: dict[str, Any] = {
        name: getattr(TorchWorker, name) for name in ("set_lr", "_part") if not hasattr(cls, name)
    }
    for name in ("get_weights", "set_weights"):
        if not is_own(cls, name):
            added[name] = _of_the_rank(name)
    if hasattr(cls, "evaluate"):
        added["evaluate"] = _alone(cls.evaluate)
    elif hasattr(cls, "validation_step"):
        added["evaluate"] = _alone(TorchWorker.evaluate)
    if hasattr(cls, "validation_step"):
        added["validation_step"] = _told(cls.validation_step)
    if steps and hasattr(cls, "load_data_shard") and not is_own(cls, "load_data_shard"):
        added["load_data_shard"] = _left_to_ddp
    added["get_state"], added["set_state"] = _states(cls)
    added["_ddp_steps"] = steps
    added["_ddp_sharded"] = is_own(cls, "load_data_shard")
    added["_ddp_own_methods"] = tuple(
        name for name in ("get_weights", "set_weights", "evaluate") if is_own(cls, name)
    )
    added["__module__"], added["__doc__"] = cls.__module__, cls.__doc__
    return ClassSpec(type(cls.__name__, (cls, RankMethods), added))


def _left_to_ddp(self: Any, shard_id: int, num_shards: int) -> None:
    """The samples are dealt out step by step, when the ranks are set up."""


def _of_the_rank(name: str) -> Any:
    """``TorchWorker``'s method; the rank's own, once the worker is one."""
    plain = getattr(TorchWorker, name)

    @functools.wraps(plain)
    def method(self: Any, *args: Any) -> Any:
        if self._member is None:
            return plain(self, *args)
        return getattr(self._member, name)(*args)

    return method


def _alone(evaluate: Any) -> Any:
    @functools.wraps(evaluate)
    def alone(self: Any, *args: Any, **kwargs: Any) -> Any:
        with contextlib.nullcontext() if self._member is None else self._member.alone():
            return evaluate(self, *args, **kwargs)

    return alone


def _told(step: Any) -> Any:
    """Says with every batch that the rank moves: one that loads slowly is not taken for stuck."""

    @functools.wraps(step)
    def told(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._member is not None:
            self._member.pulse.go_on()
        return step(self, *args, **kwargs)

    return told


def _states(cls: Any) -> tuple[Any, Any]:
    """``get_state`` and ``set_state`` with the rank's own state beside the user's.

    That is its random numbers and where its loader is. What else ``TorchWorker`` would save is in
    the state that all ranks share.
    """
    get_users = cls.get_state if is_own(cls, "get_state") else None
    set_users = cls.set_state if is_own(cls, "set_state") else None

    def get_state(self: Any) -> Any:
        users = None if get_users is None else get_users(self)
        if self._member is None:
            return users
        loader = parts.loader_state(getattr(self, "train_loader", None))
        own = {"random": parts.random_state(), "loader": loader}
        return {"rank": own, "worker": users}

    def set_state(self: Any, state: Any) -> None:
        if self._member is not None:
            own, state = state["rank"], state["worker"]
            parts.load_loader_state(getattr(self, "train_loader", None), own["loader"])
            parts.set_random_state(own["random"])
        if set_users is not None and state is not None:
            set_users(self, state)

    return get_state, set_state
