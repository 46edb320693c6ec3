"""Add log-probs, values and advantages to the rollouts of a worker.

Each worker processes its own sequences. The counts and moments that advantages need from other
workers are summed by the collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from miniray.errors import NonFiniteError
from miniray.rl import advantages as adv
from miniray.rl import losses
from miniray.rl.calls import Setup
from miniray.rl.collective import Collective
from miniray.rl.config import Algorithm, GRPOConfig, PPOConfig
from miniray.rl.losses import selected
from miniray.rl.metrics import Metrics
from miniray.rl.rollouts.batch import MicroBatch, Rollouts
from miniray.rl.rollouts.reward import brief
from miniray.rl.update import bad_sequences, run_policy


def look_back(
    rollouts: Rollouts,
    batches: Iterable[MicroBatch],
    setup: Setup,
    policy: Any,
    reference: Any,
    precision: Callable[[], AbstractContextManager[Any]],
) -> None:
    """Compute values and log-probs of the sampled tokens, also under the reference model."""
    config = setup.config
    with_values = isinstance(config, PPOConfig)
    several = config.epochs * config.mini_batches > 1
    # A single update computes the old log-probs in its own forward pass.
    old_wanted = several or with_values or setup.on_error == "skip"
    for batch in batches:
        if not bool(batch.mask.any()):
            continue  # empty responses
        with torch.no_grad(), precision():
            if old_wanted:
                logp, _, values = run_policy(policy, batch, with_values)
                rollouts.put("old_logp", batch, logp)
                if values is not None:
                    rollouts.put("values", batch, values)
            if reference is not None:
                rollouts.put("ref_logp", batch, run_policy(reference, batch, False)[0])


def drop_bad(rollouts: Rollouts, on_error: str, worker: int, step: int, metrics: Metrics) -> None:
    """Drop and count sequences that have log-probs or values with NaN or infinity.

    Raise ``NonFiniteError`` for the first such sequence unless ``on_error`` is ``"skip"``.
    """
    bad = torch.zeros(len(rollouts), dtype=torch.bool)
    for name in ("old_logp", "values", "ref_logp"):
        if name in rollouts.tokens:
            bad |= bad_sequences(rollouts.tokens[name], rollouts.mask)
    if bool(bad.any()) and on_error != "skip":
        at = int(torch.nonzero(bad)[0, 0])
        raise NonFiniteError(
            f"Worker {worker}, step {step}: log-probs or values are NaN or infinite for "
            f"{int(bad.sum())} of {len(bad)} sequences.\n"
            f"  first: sequence {int(rollouts.ids[at])}, row: {brief(rollouts.rows[at])}",
            (worker,),
            worker=worker,
            step=step,
        )
    metrics.total("skipped_nonfinite", int(bad.sum()))
    rollouts.keep(~bad)


def add_advantages(
    rollouts: Rollouts,
    config: Algorithm,
    collective: Collective,
    kl_coef: float,
    step: int,
    metrics: Metrics,
) -> None:
    """Add the advantage of each token to ``rollouts``. All workers must call it."""
    mask = rollouts.mask
    distance = None
    if "old_logp" in rollouts.tokens and "ref_logp" in rollouts.tokens:
        old, reference = rollouts.tokens["old_logp"], rollouts.tokens["ref_logp"]
        distance = selected(losses.kl(old, reference, config.kl.kind), mask)
        metrics.extend("kl", distance[mask].tolist())
    if isinstance(config, PPOConfig):
        rewards = _on_last_token(rollouts.rewards, mask)
        if distance is not None and config.kl.place == "reward":
            rewards = rewards - kl_coef * distance
        values = rollouts.tokens.get("values", torch.zeros(mask.shape))
        made, returns = adv.gae(rewards, values, mask, config.gamma, config.lam)
        if config.whiten:
            stats = collective.sum(adv.moments(made, mask), f"moments of step {step}")
            made = adv.whiten(made, mask, stats)
        rollouts.tokens["returns"] = returns
        rollouts.tokens["values"] = values
    else:
        assert isinstance(config, GRPOConfig)
        if config.baseline == "rloo":
            scores = adv.rloo(rollouts.rewards, rollouts.groups)
        else:
            scores = adv.grpo(rollouts.rewards, rollouts.groups, norm_std=config.norm_std)
        metrics.extend("flat_groups", _flat(rollouts.rewards, rollouts.groups))
        made = adv.spread(scores, mask)
    rollouts.tokens["advantages"] = made


def _on_last_token(rewards: Tensor, mask: Tensor) -> Tensor:
    """Return rewards per token: the reward on the last sampled token, and 0 on all others."""
    numbered = mask.long().cumsum(-1)
    last = mask & (numbered == numbered[:, -1:]) if mask.shape[1] else mask
    return rewards[:, None] * last


def _flat(rewards: Tensor, groups: Tensor) -> list[float]:
    """Return 1 for each prompt whose rewards are all equal, so that all advantages are 0; else 0.

    Prompts with a single response have 0, because their reward is the advantage.
    """
    ids, index, counts = torch.unique(groups, return_inverse=True, return_counts=True)
    low, high = (
        torch.zeros(len(ids)).scatter_reduce_(0, index, rewards, kind, include_self=False)
        for kind in ("amin", "amax")
    )
    flat: list[float] = ((low == high) & (counts > 1)).double().tolist()
    return flat
