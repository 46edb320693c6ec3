"""``WorkerContext``: attributes that a trainer binds to the user's object."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from miniray.core import session
from miniray.doctor import actors


@dataclasses.dataclass(frozen=True)
class WorkerContext:
    """Attributes of the user's object that are set before its ``__init__``.

    Attributes:
        rank: Index of the worker.
        world_size: Number of workers.
        device: The worker's GPU, ``"cuda:0"``, if it has one, else ``"cpu"``.
    """

    rank: int
    world_size: int
    device: str

    @classmethod
    def from_environment(cls) -> WorkerContext:
        """Return the context of this process; without a trainer's environment, that of rank 0."""
        rank, world_size = os.environ.get(actors.RANK, "0"), os.environ.get(actors.WORLD_SIZE, "1")
        return cls(int(rank), int(world_size), find_device())

    def bind(self, user_object: Any) -> None:
        """Set the attributes that the class of ``user_object`` doesn't define itself.

        Objects without a ``__dict__`` are left unchanged.
        """
        if not hasattr(user_object, "__dict__"):
            return
        for field in dataclasses.fields(self):
            if not hasattr(type(user_object), field.name):
                vars(user_object)[field.name] = getattr(self, field.name)


def find_device() -> str:
    """Return ``"cuda:0"`` if this process was assigned a GPU that torch can use, else ``"cpu"``."""
    if not session.get_gpu_ids():
        return "cpu"
    import torch

    return "cuda:0" if torch.cuda.is_available() else "cpu"
