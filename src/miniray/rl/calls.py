"""What the driver tells a worker and asks of it, in classes that do without torch.

A driver only calls workers, so it need not load torch for it: that saves it a second and the memory
of one more process. The class it makes its workers of is ``Worker``, and what it gets in their
processes is an ``RLWorker``.
"""

from __future__ import annotations

import dataclasses
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from miniray.checks import check_choice
from miniray.rl.config import Algorithm, Sampling, above
from miniray.rl.metrics import Quad
from miniray.rl.sources import Row, Source, called_with, check_data
from miniray.train.lockstep.process_group import ProcessGroupSpec
from miniray.train.pretrained import SavedFiles, write_model

if TYPE_CHECKING:
    from torch import Tensor

    from miniray.rl.collective import Collective


#: In a group of an optimizer's parameters: the rate that is theirs whatever ``set_lr`` says.
OWN_RATE = "own_rate"


@dataclasses.dataclass(frozen=True)
class Setup:
    """What every worker is told; the same for all of them, and checked before anything starts.

    See ``RLTrainer`` for what the fields mean.
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
                f"policy must be a function that makes the model, not a "
                f"{type(self.policy).__name__} itself: every worker has one of its own"
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
            above("reward_timeout", self.reward_timeout, 0)
        check_data("data", self.data)
        if self.eval_data is not None:
            check_data("eval_data", self.eval_data)

    @property
    def held_out_sampling(self) -> Sampling:
        """How held-out prompts are answered; where nothing was said, by the likeliest tokens."""
        return self.eval_sampling or dataclasses.replace(self.sampling, temperature=0.0)


class Worker(ABC):
    """An ``RLWorker``, by the name that needs no torch. Weights and state are dealt with here."""

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

            return object.__new__(RLWorker)  # whose __init__ comes next
        return object.__new__(cls)

    @abstractmethod
    def __init__(self, worker_id: int, setup: Setup) -> None: ...

    # -- a step: RLWorker does these ---------------------------------------------------------------

    @abstractmethod
    def train_epoch(self, epoch: int, seed: int, kl_coef: float) -> dict[str, Quad]:
        """One step; ``epoch`` is its number."""

    @abstractmethod
    def evaluate(
        self, shard_id: int, num_shards: int, data: Sequence[Row] | None = None, first: int = 0
    ) -> dict[str, Quad]:
        """Rewards on held-out prompts."""

    @abstractmethod
    def join_group(self, spec: ProcessGroupSpec) -> None:
        """From now on, add up gradients with the other workers."""

    # -- weights, state ----------------------------------------------------------------------------

    def get_weights(self) -> dict[str, Tensor]:
        """The policy's, on the CPU."""
        return {k: v.detach().cpu() for k, v in self.policy.state_dict().items()}

    def _write_pretrained(self, directory: str | None, send_files: bool) -> SavedFiles:
        """Write the policy's model, without a value head; see ``write_model``."""
        model = getattr(self.policy, "model", self.policy)
        return write_model(self.policy, model, directory, send_files)

    def set_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Raises ``RuntimeError``, and changes nothing, if they are another model's."""
        self.policy.load_state_dict(weights)

    def set_lr(self, lr: float) -> None:
        """For all parameters but those with a rate of their own (``critic_lr``)."""
        for settings in self.optimizer.param_groups:
            settings["lr"] = settings.get(OWN_RATE, lr)

    def get_reference(self) -> dict[str, Tensor] | None:
        """The weights that the policy is held to; None if it is held to nothing, or not yet."""
        if self.reference is None:
            return None
        return {k: v.detach().cpu() for k, v in self.reference.state_dict().items()}

    def set_reference(self, weights: Mapping[str, Tensor] | None) -> None:
        """Hold the policy to these; None leaves all as it is."""
        if weights is not None:
            self.reference = self._frozen_copy()
            needed = self.reference.state_dict()  # of a policy's weights, all but a critic's
            self.reference.load_state_dict({k: v for k, v in weights.items() if k in needed})

    def get_optimizer(self) -> dict[str, Any]:
        """Its ``state_dict``."""
        state: dict[str, Any] = self.optimizer.state_dict()
        return state

    def set_optimizer(self, state: dict[str, Any]) -> None:
        """Take up what ``get_optimizer`` gave, but for the rates, which are the config's.

        ``critic_lr`` may be new: parameters are numbered alike with and without it. An optimizer
        that the trainer was given has the rates, and must have the groups, of the state.
        """
        if self.setup.optimizer is None:
            groups = self.optimizer.state_dict()["param_groups"]
            if _members(groups) == _members(state["param_groups"]):
                state = {**state, "param_groups": groups}
        self.optimizer.load_state_dict(state)

    def get_state(self) -> dict[str, Any]:
        """What is this worker's own: its place in the data, random numbers, optimizer."""
        import torch

        version, internal, gauss = random.getstate()
        name, keys, *rest = np.random.get_state()
        return {
            "source": self.source.state_dict(),
            # Of workers that add up gradients it is the same: the trainer keeps it once.
            "optimizer": None if self.setup.sync == "grad" else self.get_optimizer(),
            "torch": torch.get_rng_state(),
            "random": [version, list(internal), gauss],
            "numpy": [name, keys, *rest],
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Take up what ``get_state`` gave: the run goes on bit for bit (on the CPU)."""
        import torch

        self.source.load_state_dict(state["source"])
        if state["optimizer"] is not None:
            self.set_optimizer(state["optimizer"])
        torch.set_rng_state(state["torch"])
        version, internal, gauss = state["random"]
        random.setstate((version, tuple(internal), gauss))
        np.random.set_state(tuple(state["numpy"]))

    def get_source(self) -> dict[str, Any]:
        """This worker's place in the data."""
        return self.source.state_dict()

    def set_source(self, state: Mapping[str, Any]) -> None:
        """Take up another worker's place in the data: loaders that allow it share out anew."""
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
        """The policy as it is now, for log-probs alone."""


def _members(groups: Sequence[Mapping[str, Any]]) -> list[int]:
    """The numbers of all parameters in the groups of an optimizer's state."""
    return [number for group in groups for number in group["params"]]
