"""What a worker is asked for besides steps: weights, and state to resume from."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from miniray.rl.collective import Collective
from miniray.rl.sources import Source


class WorkerState:
    """The part of ``RLWorker`` that trainers use between steps."""

    rank: int
    setup: Any
    policy: Any
    reference: Any
    optimizer: Any
    source: Source
    collective: Collective

    # -- weights, state ----------------------------------------------------------------------------

    def get_weights(self) -> dict[str, Tensor]:
        return {k: v.detach().cpu() for k, v in self.policy.state_dict().items()}

    def set_weights(self, weights: Mapping[str, Tensor]) -> None:
        self.policy.load_state_dict(weights)

    def set_lr(self, lr: float) -> None:
        for settings in self.optimizer.param_groups:
            settings["lr"] = lr

    def get_reference(self) -> dict[str, Tensor] | None:
        if self.reference is None:
            return None
        return {k: v.detach().cpu() for k, v in self.reference.state_dict().items()}

    def set_reference(self, weights: Mapping[str, Tensor] | None) -> None:
        if weights is not None:
            self.reference = self._frozen_copy()
            self.reference.load_state_dict(weights)

    def get_optimizer(self) -> dict[str, Any]:
        state: dict[str, Any] = self.optimizer.state_dict()
        return state

    def set_optimizer(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)

    def get_state(self) -> dict[str, Any]:
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
        self.source.load_state_dict(state["source"])
        if state["optimizer"] is not None:
            self.set_optimizer(state["optimizer"])
        torch.set_rng_state(state["torch"])
        version, internal, gauss = state["random"]
        random.setstate((version, tuple(internal), gauss))
        np.random.set_state(tuple(state["numpy"]))

    def get_source(self) -> dict[str, Any]:
        return self.source.state_dict()

    def set_source(self, state: Mapping[str, Any]) -> None:
        """Take up another worker's place in the data: loaders that allow it share out anew."""
        self.source.load_state_dict(state)

    def ping(self) -> int:
        return self.rank

    def _frozen_copy(self) -> Any:
        return copy.deepcopy(self.policy).requires_grad_(False).eval()
