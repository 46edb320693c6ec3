"""``WorkerContext``: attributes that a trainer binds to the user's object."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from miniray.core import session

if TYPE_CHECKING:
    from miniray.train.run.state import TrainTarget

#: Environment variable with the values of ``WorkerContext`` that only the driver knows.
_CONTEXT = "MINIRAY_TRAIN_CONTEXT"


class MetricLog:
    """The ``self.log(name, value)`` of workers: collects metrics of a step or a validation step."""

    @classmethod
    def find(cls, user_object: Any) -> MetricLog:
        """Return the log that was bound to an object, or an unused one if its class has its own."""
        log = getattr(user_object, "__dict__", {}).get("log")
        return log if isinstance(log, cls) else cls()

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    def __call__(self, name: str, value: Any) -> None:
        """Add a metric: a number, a mean over the batch, or a pair of a sum and a count."""
        self._values[name] = value

    def take(self) -> Mapping[str, Any]:
        """Return the metrics since the last call."""
        values, self._values = self._values, {}
        return values


@dataclasses.dataclass(frozen=True)
class WorkerContext:
    """Attributes of the user's object that are set before its ``__init__``.

    Attributes:
        rank: Index of the worker.
        world_size: Number of workers.
        device: The worker's GPU, ``"cuda:0"``, if it has one, else ``"cpu"``.
        global_step: Completed optimizer steps of the run.
        epochs: Epochs of the run when the current ``train`` ends; None with ``train(steps=...)``.
        total_steps: Steps of the run when it ends. With ``train(epochs=...)`` it is None in
            ``__init__``, and always if the loader has no length.
        log: See ``MetricLog``.
    """

    rank: int
    world_size: int
    device: str
    global_step: int = 0
    epochs: int | None = None
    total_steps: int | None = None
    log: MetricLog = dataclasses.field(default_factory=MetricLog)

    @classmethod
    def from_environment(cls) -> WorkerContext:
        """Return the context of this worker; without a trainer's environment, that of rank 0."""
        alone = {"rank": 0, "world_size": 1}
        return cls(device=find_device(), **(alone | json.loads(os.environ.get(_CONTEXT, "{}"))))

    def bind(self, user_object: Any) -> None:
        """Set the attributes that the class of ``user_object`` doesn't define itself.

        Objects without a ``__dict__`` are left unchanged.
        """
        for field in dataclasses.fields(self):
            if not hasattr(type(user_object), field.name):
                vars(user_object)[field.name] = getattr(self, field.name)


def create_environment(
    rank: int, world_size: int, step: int, target: TrainTarget
) -> dict[str, str]:
    """Return the environment variable that tells a new worker where the run is and ends."""
    place = {"rank": rank, "world_size": world_size}
    progress = {"global_step": step, "epochs": target.epochs, "total_steps": target.steps}
    return {_CONTEXT: json.dumps(place | progress)}


class BoundAttributes:
    """Attributes of the user's object that change during a run.

    Those that the user's class defines, or that its code has set, are left unchanged.

    Args:
        user_object: The object.
        values: The values that the attributes have had since before its ``__init__``.
    """

    def __init__(self, user_object: Any, values: Mapping[str, Any]) -> None:
        self._attributes: dict[str, Any] = getattr(user_object, "__dict__", {})
        self._values = {name: v for name, v in values.items() if name in self._attributes}

    @classmethod
    def of(cls, user_object: Any, bound: WorkerContext) -> BoundAttributes:
        """Return those of an object to which ``bound`` was bound."""
        names = ("global_step", "epochs", "total_steps")
        return cls(user_object, {name: getattr(bound, name) for name in names})

    def update(self, **values: Any) -> None:
        """Set attributes."""
        for name, value in values.items():
            if name in self._values and _is_equal(self._attributes[name], self._values[name]):
                self._attributes[name] = self._values[name] = value


def _is_equal(found: Any, value: Any) -> bool:
    return type(found) is type(value) and bool(found == value)


def find_device() -> str:
    """Return ``"cuda:0"`` if this process was assigned a GPU that torch can use, else ``"cpu"``."""
    if not session.is_initialized() or not session.get_gpu_ids():
        return "cpu"
    import torch

    return "cuda:0" if torch.cuda.is_available() else "cpu"
