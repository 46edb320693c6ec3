"""The interface between the driver and its workers, in classes that don't import torch.

The driver only calls workers. Without torch, it starts about a second faster and needs less memory.
It creates actors of ``Worker``; in the worker processes, the instances are ``RLWorker`` objects.
"""

from __future__ import annotations

import dataclasses
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from miniray.checks import check_choice, check_number
from miniray.rl.config import Algorithm, Sampling
from miniray.rl.metrics import Quad
from miniray.rl.rollouts.sources import Row, Source, called_with, check_data
from miniray.train.lockstep.process_group import ProcessGroupSpec
from miniray.train.pretrained import SavedFiles, write_model

if TYPE_CHECKING:
    from torch import Tensor

    from miniray.rl.collective import Collective


#: Key of an optimizer's parameter group: the learning rate that ``set_lr`` doesn't change.
OWN_RATE = "own_rate"


@dataclasses.dataclass(frozen=True)
class Setup:
    """The arguments of all workers, which are checked before anything is started.

    See ``RLTrainer`` for the fields.
    """

    policy: Callable[[], Any]
    reward: Callable[[Any, Any], Any]
    data: Any
    config: Algorithm
    sampling: Sampling
    eval_sampling: Sampling | None
    num_workers: int
    tokenizer: Any = None
    eval_data: Any = None
    optimizer: Callable[[Any], Any] | None = None
    sync: str = "grad"
    on_error: str = "raise"
    reward_timeout: float | None = 60.0
    device: str = "auto"
    precision: str = "fp32"

    def __post_init__(self) -> None:
        for name in ("policy", "reward"):
            if not callable(getattr(self, name)):
                raise TypeError(f"{name} must be a function, not {getattr(self, name)!r}")
        if hasattr(self.policy, "state_dict") and not isinstance(self.policy, type):
            raise TypeError(  # TRL would take it
                f"policy must be a function that creates the model, not a "
                f"{type(self.policy).__name__}, because every worker creates its own model"
            )
        called_with("policy", self.policy)
        called_with("reward", self.reward, "row", "response")
        for name in ("sampling", "eval_sampling"):
            given = getattr(self, name)
            if not isinstance(given, Sampling) and (name, given) != ("eval_sampling", None):
                raise TypeError(f"{name} must be a Sampling, not {given!r:.200}")
        check_choice("sync", self.sync, ("grad", "weights"))
        check_choice("on_error", self.on_error, ("raise", "skip"))
        check_choice("precision", self.precision, ("fp32", "bf16"))
        if self.reward_timeout is not None:
            check_number("reward_timeout", self.reward_timeout, 0, open_low=True)
        check_data("data", self.data)
        if self.eval_data is not None:
            check_data("eval_data", self.eval_data)

    @property
    def held_out_sampling(self) -> Sampling:
        """Sampling options for evaluation. The default is greedy decoding."""
        return self.eval_sampling or dataclasses.replace(self.sampling, temperature=0.0)


class Worker(ABC):
    """The base class of ``RLWorker``, which can be imported without torch.

    Creating a ``Worker`` returns an ``RLWorker``. This class gets and sets weights and state.
    """

    rank: int
    setup: Setup
    policy: Any
    reference: Any
    optimizer: Any
    source: Source
    collective: Collective

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is Worker:
            from miniray.rl.worker import RLWorker

            return object.__new__(RLWorker)  # Python calls its __init__ next
        return object.__new__(cls)

    @abstractmethod
    def __init__(self, worker_id: int, setup: Setup) -> None: ...

    # -- a step: RLWorker does these ---------------------------------------------------------------

    @abstractmethod
    def train_epoch(self, epoch: int, seed: int, kl_coef: float) -> dict[str, Quad]:
        """Train one step. ``epoch`` is the number of the step."""

    @abstractmethod
    def evaluate(
        self, shard_id: int, num_shards: int, data: Sequence[Row] | None = None, first: int = 0
    ) -> dict[str, Quad]:
        """Return the metrics on held-out prompts."""

    @abstractmethod
    def join_group(self, spec: ProcessGroupSpec) -> None:
        """Join the process group, and sum gradients over its workers from now on."""

    # -- weights, state ----------------------------------------------------------------------------

    def get_weights(self) -> dict[str, Tensor]:
        """Return the weights of the policy, on the CPU."""
        return {k: v.detach().cpu() for k, v in self.policy.state_dict().items()}

    def _write_pretrained(self, directory: str | None, send_files: bool) -> SavedFiles:
        """Write the policy's model, without a value head; see ``write_model``."""
        model = getattr(self.policy, "model", self.policy)
        return write_model(self.policy, model, directory, send_files)

    def set_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Set the weights of the policy.

        Raises:
            RuntimeError: The weights belong to a different model.
        """
        self.policy.load_state_dict(weights)

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of all parameters except those with a separate ``critic_lr``."""
        for settings in self.optimizer.param_groups:
            settings["lr"] = settings.get(OWN_RATE, lr)

    def get_reference(self) -> dict[str, Tensor] | None:
        """Return the weights of the reference model, or None if it doesn't exist (yet)."""
        if self.reference is None:
            return None
        return {k: v.detach().cpu() for k, v in self.reference.state_dict().items()}

    def set_reference(self, weights: Mapping[str, Tensor] | None) -> None:
        """Set the weights of the reference model. ``None`` changes nothing."""
        if weights is not None:
            self.reference = self._frozen_copy()
            needed = self.reference.state_dict()  # all weights of the policy except the critic's
            self.reference.load_state_dict({k: v for k, v in weights.items() if k in needed})

    def get_optimizer(self) -> dict[str, Any]:
        """Return the ``state_dict`` of the optimizer."""
        state: dict[str, Any] = self.optimizer.state_dict()
        return state

    def set_optimizer(self, state: dict[str, Any]) -> None:
        """Restore the state from ``get_optimizer``, except the learning rates of the config.

        ``critic_lr`` may differ, because parameters have the same numbers with and without it. If
        the trainer has an ``optimizer`` argument, the learning rates of the state are restored, and
        the parameter groups must match.
        """
        if self.setup.optimizer is None:
            groups = self.optimizer.state_dict()["param_groups"]
            if _members(groups) == _members(state["param_groups"]):
                state = {**state, "param_groups": groups}
        self.optimizer.load_state_dict(state)

    def get_state(self) -> dict[str, Any]:
        """Return the state of this worker: position in the data, random state and optimizer."""
        import torch

        version, internal, gauss = random.getstate()
        name, keys, *rest = np.random.get_state()
        return {
            "source": self.source.state_dict(),
            # Workers that sum gradients have the same optimizer state. The trainer stores it once.
            "optimizer": None if self.setup.sync == "grad" else self.get_optimizer(),
            "torch": torch.get_rng_state(),
            "random": [version, list(internal), gauss],
            "numpy": [name, keys, *rest],
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state from ``get_state``. On the CPU, the run continues bit-identically."""
        import torch

        self.source.load_state_dict(state["source"])
        if state["optimizer"] is not None:
            self.set_optimizer(state["optimizer"])
        torch.set_rng_state(state["torch"])
        version, internal, gauss = state["random"]
        random.setstate((version, tuple(internal), gauss))
        np.random.set_state(tuple(state["numpy"]))

    def get_source(self) -> dict[str, Any]:
        """Return the position of this worker in the data."""
        return self.source.state_dict()

    def set_source(self, state: Mapping[str, Any]) -> None:
        """Continue at a merged position in the data. Loaders that support it are resharded."""
        self.source.load_state_dict(state)

    def get_snapshot(self, is_source: bool) -> dict[str, Any]:
        """Return all that a restart after a step needs.

        Weights and optimizer are equal on all workers: only the source returns them.
        """
        shared = {"weights": self.get_weights(), "optimizer": self.get_optimizer()}
        return {"shared": shared if is_source else None, "own": self.get_state()}

    def load_snapshot(self, source: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        """Restore the snapshots of the source and of this worker, learning rates included."""
        shared = source["shared"]
        self.set_weights(shared["weights"])
        self.optimizer.load_state_dict(shared["optimizer"])
        self.set_state(own["own"])

    @abstractmethod
    def _frozen_copy(self) -> Any:
        """Return a copy of the current policy without gradients, to compute log-probs."""


def _members(groups: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the numbers of all parameters in the groups of an optimizer's state."""
    return [number for group in groups for number in group["params"]]
