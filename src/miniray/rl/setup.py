"""What every worker is told; the same for all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from miniray.rl.config import Algorithm
from miniray.rl.sampling import Sampling


@dataclasses.dataclass(frozen=True)
class Setup:
    """See ``RLTrainer`` for what the fields mean."""

    policy: Callable[[], Any]
    reward: Callable[[Any, Any], Any]
    data: Any
    config: Algorithm
    sampling: Sampling
    eval_sampling: Sampling
    num_workers: int
    tokenizer: Any = None
    eval_data: Any = None
    optimizer: Callable[[Any], Any] | None = None
    sync: str = "grad"
    on_error: str = "raise"
    reward_timeout: float | None = 60.0
    device: str = "auto"
    precision: str = "fp32"
