"""What a trainer can be told: small dataclasses, checked when they are made; and adaptive KL.

Defaults are verl's where it has one, except the number of prompts and tokens, which suit a small
model.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Collection, Mapping
from typing import Any

from miniray.checks import check_bool, check_choice, check_int, suggest_options

#: How losses of tokens become one; how the distance to the reference is estimated. See ``losses``.
AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")
KL_KINDS = ("k1", "k2", "k3")
_COUNTS = ("rollouts", "epochs", "mini_batches", "micro_batch_tokens")
#: Prompts of a step if neither the config nor the loaders set their number.
PROMPTS_PER_STEP = 64
#: Hints for names that aren't options of a config.
_CONFIG_HINTS = {
    **dict.fromkeys(("steps", "max_steps", "max_epochs", "num_epochs"), "Pass train(steps=...)."),
    "batch_size": "Use prompts_per_step=.",
    "clip_norm": "Use max_grad_norm=.",
    "gradient_clip_val": "Use max_grad_norm=.",
    "beta": "Use kl=KLPenalty(coef=...).",
    "kl_coef": "Use kl=KLPenalty(coef=...).",
    "on_error": "Pass it to the trainer.",
}


def in_range(
    name: str, value: Any, low: float, high: float = math.inf, *, sign: str = ">="
) -> None:
    """Refuses NaN too, which compares false with everything."""
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not number or not low <= value <= high or (sign == ">" and value == low):
        upper = "" if high == math.inf else f" and <= {high:g}"
        raise ValueError(f"{name} must be a number {sign} {low:g}{upper}, not {value!r}")


def above(name: str, value: Any, low: float, high: float = math.inf) -> None:
    """The same without ``low`` itself."""
    in_range(name, value, low, high, sign=">")


@suggest_options()
@dataclasses.dataclass(frozen=True)
class KLPenalty:
    """How the policy is held to its reference, which is what it was at the start.

    Args:
        coef: how strongly; 0 means not at all, and then there is no reference model.
        kind: the estimate, ``"k1"``, ``"k2"`` or ``"k3"``; see ``losses.kl``.
        place: ``"loss"``: a term of the loss; ``"reward"``: taken off every token's reward (PPO).
        target: adapt ``coef`` so that the mean KL of a token stays near this; see ``AdaptiveKL``.
        horizon: over how many sequences it adapts.
    """

    coef: float = 0.001
    kind: str = "k3"
    place: str = "loss"
    target: float | None = None
    horizon: float = 10_000

    def __post_init__(self) -> None:
        in_range("KLPenalty.coef", self.coef, 0)
        check_choice("KLPenalty.kind", self.kind, KL_KINDS)
        check_choice("KLPenalty.place", self.place, ("loss", "reward"))
        above("KLPenalty.horizon", self.horizon, 0)
        if self.target is not None:
            above("KLPenalty.target", self.target, 0)
            if self.coef == 0:
                raise ValueError("KLPenalty.target needs a coef > 0 to start from: 0 stays 0")


class AdaptiveKL:
    """Raises the coefficient while the KL is above its target and lowers it while below.

    Each update multiplies it by ``1 + clip(kl / target - 1, ±0.2) * steps / horizon`` (Ziegler et
    al., https://arxiv.org/abs/1909.08593, section 2.2). A KL that is no finite number is refused:
    it would stay in the coefficient for ever.

    It lives on the driver, which sees the KL of all workers as (sum, count) and sends the
    coefficient with every step. So that is one number for all ranks by construction.
    """

    def __init__(self, coefficient: float, target: float, horizon: float = 10_000) -> None:
        in_range("coefficient", coefficient, 0)
        above("target", target, 0)
        above("horizon", horizon, 0)
        self.coefficient = float(coefficient)
        self.target = float(target)
        self.horizon = float(horizon)

    def update(self, kl: float, steps: float) -> float:
        """Take note of the mean KL over ``steps`` samples; returns the new coefficient."""
        if not math.isfinite(kl):
            raise ValueError(f"the mean KL to the reference is {kl}, so it cannot be adapted to")
        error = min(0.2, max(-0.2, kl / self.target - 1))
        # A step of many samples against a short horizon must not make it negative.
        self.coefficient *= max(0.0, 1 + error * steps / self.horizon)
        return self.coefficient

    def state_dict(self) -> dict[str, float]:
        """The coefficient, for a checkpoint; the rest is settings."""
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on with the coefficient of a ``state_dict``."""
        self.coefficient = float(state["coefficient"])


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """What PPO and GRPO have in common.

    Args:
        prompts_per_step: Prompts per step, of all workers together. Default: the sum of the
            workers' batch sizes if a ``make_loader`` returns loaders that yield batches, else 64.
            If both are set, they must be equal.
        rollouts: responses sampled for each prompt.
        epochs: how often the responses of a step are used.
        mini_batches: updates in each of these epochs.
        micro_batch_tokens: padded tokens in one forward and backward pass at most.
        lr: of AdamW, unless the trainer is given an ``optimizer``.
        max_grad_norm: gradients are scaled down to this norm.
        clip_low, clip_high, dual_clip, agg: see ``losses.policy_loss``.
        entropy_coef: what a nat of entropy is worth.
        kl: see ``KLPenalty``.
    """

    prompts_per_step: int | None = None
    rollouts: int = 8
    epochs: int = 1
    mini_batches: int = 1
    micro_batch_tokens: int = 16_384
    lr: float = 1e-6
    max_grad_norm: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = 3.0
    agg: str = "token-mean"
    entropy_coef: float = 0.0
    kl: KLPenalty = dataclasses.field(default_factory=KLPenalty)

    def __post_init__(self) -> None:
        for name in _COUNTS:
            check_int(name, getattr(self, name), 1)
        if self.prompts_per_step is not None:
            check_int("prompts_per_step", self.prompts_per_step, 1)
        for name in ("lr", "clip_low", "clip_high", "entropy_coef"):
            in_range(name, getattr(self, name), 0)
        above("max_grad_norm", self.max_grad_norm, 0)
        if self.dual_clip is not None:
            above("dual_clip", self.dual_clip, 1)
        check_choice("agg", self.agg, AGGREGATIONS)
        if not isinstance(self.kl, KLPenalty):
            raise TypeError(f"kl must be a KLPenalty, not {self.kl!r}")


@suggest_options(_CONFIG_HINTS)
@dataclasses.dataclass(frozen=True)
class GRPOConfig(Algorithm):
    """Group relative policy optimisation: a response against the others of its prompt.

    Args:
        baseline: ``"grpo"`` or ``"rloo"``; see ``advantages``.
        norm_std: divide by the group's standard deviation. False is Dr. GRPO.
    """

    baseline: str = "grpo"
    norm_std: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("baseline", self.baseline, ("grpo", "rloo"))
        check_bool("norm_std", self.norm_std)
        if self.kl.place == "reward":
            raise ValueError(
                'KLPenalty(place="reward") is for PPO: GRPO has one reward a response, not a token'
            )


@suggest_options(_CONFIG_HINTS)
@dataclasses.dataclass(frozen=True)
class PPOConfig(Algorithm):
    """Proximal policy optimisation: a response against what the value head expected.

    Args:
        gamma, lam: see ``advantages.gae``.
        whiten: give advantages mean 0 and variance 1 over the tokens of all workers.
        value_clip: see ``losses.value_loss``; None does not clip.
        value_coef: how much the value loss counts.
        critic_lr: of what only values need: a value head, a critic of its own. None: as ``lr``.
    """

    rollouts: int = 1
    gamma: float = 1.0
    lam: float = 1.0
    whiten: bool = True
    value_clip: float | None = 0.5
    value_coef: float = 0.5
    critic_lr: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        in_range("gamma", self.gamma, 0, 1)
        in_range("lam", self.lam, 0, 1)
        in_range("value_coef", self.value_coef, 0)
        check_bool("whiten", self.whiten)
        for name in ("value_clip", "critic_lr"):
            if getattr(self, name) is not None:
                in_range(name, getattr(self, name), 0)


@suggest_options()
@dataclasses.dataclass(frozen=True)
class Sampling:
    """How responses are generated.

    Args:
        max_new_tokens: where a response ends if the model does not end it.
        temperature: 0 takes the most likely token.
        top_k: only the k most likely tokens; 0 means all.
        top_p: only the most likely tokens that together have this probability.
        max_prompt_tokens: longer prompts are left out, and counted.
        stop_ids: tokens that end a response, besides the model's own end of sequence.
        batch_tokens: how many tokens, prompts included, are generated at a time at most.
    """

    max_new_tokens: int = 64
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    max_prompt_tokens: int | None = None
    stop_ids: tuple[int, ...] = ()
    batch_tokens: int = 65_536

    def __post_init__(self) -> None:
        check_int("max_new_tokens", self.max_new_tokens, 1)
        in_range("temperature", self.temperature, 0)
        check_int("top_k", self.top_k, 0)
        above("top_p", self.top_p, 0, 1)  # of 0 no token would be left
        if self.max_prompt_tokens is not None:
            check_int("max_prompt_tokens", self.max_prompt_tokens, 1)
        if not isinstance(self.stop_ids, Collection):
            raise TypeError(f"stop_ids must be a tuple of token ids, not {self.stop_ids!r}")
        for token in self.stop_ids:
            check_int("a token of stop_ids", token, 0)
        check_int("batch_tokens", self.batch_tokens, 1)
