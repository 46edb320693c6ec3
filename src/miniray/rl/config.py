"""The configuration of RL trainers, in dataclasses that check their values; and adaptive KL.

Defaults are those of verl if it has one, except the numbers of prompts and tokens, which suit small
models.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping

from miniray.checks import check_bool, check_choice, check_int, check_number, suggest_options

#: Ways to aggregate token losses, and estimators of the KL to the reference. See ``losses``.
AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")
KL_KINDS = ("k1", "k2", "k3")
_COUNTS = ("rollouts", "epochs", "mini_batches", "micro_batch_tokens")
#: Prompts per step if neither the config nor the loaders set it.
PROMPTS_PER_STEP = 64
#: Hints for names that aren't options of a config.
_CONFIG_HINTS = {
    **dict.fromkeys(("steps", "max_steps", "max_epochs", "num_epochs"), "Pass train(steps=...)."),
    "batch_size": "Use prompts_per_step=.",
    "beta": "Use kl=KLPenalty(coef=...).",
    "kl_coef": "Use kl=KLPenalty(coef=...).",
    "on_error": "Pass it to the trainer.",
}


@suggest_options()
@dataclasses.dataclass(frozen=True)
class KLPenalty:
    """KL penalty that keeps the policy close to the reference model, which is the initial policy.

    Args:
        coef: Coefficient of the penalty. With 0, no reference model is created.
        kind: Estimator: ``"k1"``, ``"k2"`` or ``"k3"``. See ``losses.kl``.
        place: ``"loss"`` adds the penalty to the loss. ``"reward"`` subtracts it from the reward of
            each token (PPO only).
        target: Adapt ``coef`` to keep the mean KL per token near this value. See ``AdaptiveKL``.
        horizon: Number of sequences over which ``coef`` adapts.
    """

    coef: float = 0.001
    kind: str = "k3"
    place: str = "loss"
    target: float | None = None
    horizon: float = 10_000

    def __post_init__(self) -> None:
        check_number("KLPenalty.coef", self.coef, 0)
        check_choice("KLPenalty.kind", self.kind, KL_KINDS)
        check_choice("KLPenalty.place", self.place, ("loss", "reward"))
        check_number("KLPenalty.horizon", self.horizon, 0, open_low=True)
        if self.target is not None:
            check_number("KLPenalty.target", self.target, 0, open_low=True)
            if self.coef == 0:
                raise ValueError("KLPenalty.target needs an initial coef > 0, because 0 stays 0")


class AdaptiveKL:
    """KL coefficient that increases while the KL is above its target and decreases while below.

    Each update multiplies it by ``1 + clip(kl / target - 1, ±0.2) * steps / horizon`` (Ziegler et
    al., https://arxiv.org/abs/1909.08593, section 2.2). A KL that isn't finite raises
    ``ValueError``, because it would make the coefficient NaN or infinite for the rest of the run.

    The driver owns it. It combines the KL of all workers and sends the coefficient with every step,
    so all ranks use the same value.
    """

    def __init__(self, coefficient: float, target: float, horizon: float = 10_000) -> None:
        check_number("coefficient", coefficient, 0)
        check_number("target", target, 0, open_low=True)
        check_number("horizon", horizon, 0, open_low=True)
        self.coefficient = float(coefficient)
        self.target = float(target)
        self.horizon = float(horizon)

    def update(self, kl: float, steps: float) -> float:
        """Update the coefficient with the mean KL over ``steps`` samples, and return it."""
        if not math.isfinite(kl):
            raise ValueError(f"can't adapt the KL coefficient to a mean KL of {kl}")
        error = min(0.2, max(-0.2, kl / self.target - 1))
        # The coefficient must not become negative if a step has more samples than the horizon.
        self.coefficient *= max(0.0, 1 + error * steps / self.horizon)
        return self.coefficient

    def state_dict(self) -> dict[str, float]:
        """Return the coefficient, which is the only state."""
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore the coefficient from a ``state_dict``."""
        self.coefficient = float(state["coefficient"])


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """Options that PPO and GRPO have in common.

    Args:
        prompts_per_step: Prompts per step, of all workers together. Default: the sum of the
            workers' batch sizes if a ``make_loader`` returns loaders that yield batches, else 64.
            If both are set, they must be equal.
        rollouts: Responses to sample per prompt.
        epochs: Number of passes over the responses of a step.
        mini_batches: Updates per pass.
        micro_batch_tokens: Maximum number of padded tokens in a forward and backward pass.
        lr: Learning rate of AdamW. Not used if the trainer has an ``optimizer``.
        clip_norm: Maximum norm of the gradients of all parameters together. None: no clipping.
        clip_low, clip_high, dual_clip, agg: See ``losses.policy_loss``.
        entropy_coef: Coefficient of the entropy bonus.
        kl: See ``KLPenalty``.
    """

    prompts_per_step: int | None = None
    rollouts: int = 8
    epochs: int = 1
    mini_batches: int = 1
    micro_batch_tokens: int = 16_384
    lr: float = 1e-6
    clip_norm: float | None = 1.0
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
            check_number(name, getattr(self, name), 0)
        if self.clip_norm is not None:
            check_number("clip_norm", self.clip_norm, 0, open_low=True)
        if self.dual_clip is not None:
            check_number("dual_clip", self.dual_clip, 1, open_low=True)
        check_choice("agg", self.agg, AGGREGATIONS)
        if not isinstance(self.kl, KLPenalty):
            raise TypeError(f"kl must be a KLPenalty, not {self.kl!r}")


@suggest_options(_CONFIG_HINTS)
@dataclasses.dataclass(frozen=True)
class GRPOConfig(Algorithm):
    """Options of group relative policy optimization (GRPO).

    Args:
        baseline: ``"grpo"`` or ``"rloo"``. See ``advantages``.
        norm_std: Divide advantages by the group's standard deviation. False is Dr. GRPO.
    """

    baseline: str = "grpo"
    norm_std: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("baseline", self.baseline, ("grpo", "rloo"))
        check_bool("norm_std", self.norm_std)
        if self.kl.place == "reward":
            raise ValueError(
                'KLPenalty(place="reward") requires PPO, because GRPO has one reward per response'
            )


@suggest_options(_CONFIG_HINTS)
@dataclasses.dataclass(frozen=True)
class PPOConfig(Algorithm):
    """Options of proximal policy optimization (PPO).

    Args:
        gamma, lam: See ``advantages.gae``.
        whiten: Scale advantages to mean 0 and variance 1 over the tokens of all workers.
        value_clip: See ``losses.value_loss``. ``None`` disables clipping.
        value_coef: Coefficient of the value loss.
        critic_lr: Learning rate of the value head or the separate critic. Default: ``lr``.
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
        check_number("gamma", self.gamma, 0, 1)
        check_number("lam", self.lam, 0, 1)
        check_number("value_coef", self.value_coef, 0)
        check_bool("whiten", self.whiten)
        for name in ("value_clip", "critic_lr"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), 0)


@suggest_options()
@dataclasses.dataclass(frozen=True)
class Sampling:
    """Options for generating responses.

    Args:
        max_new_tokens: Maximum number of tokens in a response.
        temperature: Sampling temperature. 0 selects the most likely token.
        top_k: Sample from the k most likely tokens. 0 disables it.
        top_p: Sample from the most likely tokens whose probabilities add up to this value.
        max_prompt_tokens: Skip longer prompts. Their number is logged as ``filtered_prompts``.
        stop_ids: Token IDs that end a response, in addition to the end-of-sequence tokens.
        batch_tokens: Maximum number of tokens, including prompts, to generate in one batch.
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
        check_number("temperature", self.temperature, 0)
        check_int("top_k", self.top_k, 0)
        check_number("top_p", self.top_p, 0, 1, open_low=True)  # 0 would exclude all tokens
        if self.max_prompt_tokens is not None:
            check_int("max_prompt_tokens", self.max_prompt_tokens, 1)
        if not isinstance(self.stop_ids, Collection):
            raise TypeError(f"stop_ids must be a tuple of token ids, not {self.stop_ids!r}")
        for token in self.stop_ids:
            check_int("each token ID in stop_ids", token, 0)
        check_int("batch_tokens", self.batch_tokens, 1)
