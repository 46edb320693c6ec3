"""What every worker is told; the same for all of them, and checked before anything starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from miniray.checks import one_of
from miniray.rl.checks import above, called_with
from miniray.rl.config import Algorithm
from miniray.rl.sampling import Sampling
from miniray.rl.sources import check_data


@dataclasses.dataclass(frozen=True)
class Setup:
    """See ``RLTrainer`` for what the fields mean."""

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
        one_of("sync", self.sync, ("grad", "weights"))
        one_of("on_error", self.on_error, ("raise", "skip"))
        one_of("precision", self.precision, ("fp32", "bf16"))
        if self.reward_timeout is not None:
            above("reward_timeout", self.reward_timeout, 0)
        check_data("data", self.data)
        if self.eval_data is not None:
            check_data("eval_data", self.eval_data)

    @property
    def held_out_sampling(self) -> Sampling:
        """How held-out prompts are answered; where nothing was said, by the likeliest tokens."""
        return self.eval_sampling or dataclasses.replace(self.sampling, temperature=0.0)
