"""Update the policy with the rollouts of a step.

Each epoch over the rollouts has several mini-batches, with one update per mini-batch. A mini-batch
is processed in micro-batches. Updates don't depend on the number of workers: sequences are assigned
to mini-batches by their numbers, and each loss is divided by the count over all workers before
gradients are summed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from miniray.data.plan.permutation import mix
from miniray.errors import NonFiniteError
from miniray.rl import losses
from miniray.rl.collective import Collective, sum_gradients
from miniray.rl.config import Algorithm, PPOConfig
from miniray.rl.losses import selected
from miniray.rl.metrics import Metrics
from miniray.rl.rollouts.batch import MicroBatch, Rollouts
from miniray.rl.rollouts.reward import brief


def mini_batch_of(ids: Tensor, count: int, seed: Sequence[int]) -> Tensor:
    """Return the mini-batch, from 0 to ``count`` - 1, of each sequence in ``ids``.

    Each block of ``count`` consecutive sequences has one sequence in every mini-batch, so that all
    workers have similar shares of a mini-batch. ``seed`` determines the rotation of each block.
    """
    block, place = np.divmod(ids.numpy().astype(np.uint64), np.uint64(count))
    key = np.random.SeedSequence([int(s) for s in seed]).generate_state(1, np.uint64)[0]
    turn = mix(block ^ key)
    return torch.from_numpy(((place + turn) % np.uint64(count)).astype(np.int64))


class Updater:
    """Runs the updates of a step. ``precision()`` is the context of every forward pass."""

    def __init__(
        self,
        policy: Any,
        optimizer: torch.optim.Optimizer,
        config: Algorithm,
        collective: Collective,
        precision: Callable[[], AbstractContextManager[Any]],
        *,
        device: torch.device,
        on_error: str,
    ) -> None:
        self.policy = policy
        self.optimizer = optimizer
        self.config = config
        self.collective = collective
        self._precision = precision
        self._device = device
        self._skip = on_error == "skip"
        self._parameters = [p for p in policy.parameters() if p.requires_grad]
        # Layers of transformers use gradient checkpointing only if ``training`` is set. Their
        # submodules stay in evaluation mode.
        self._checkpointed = [
            m for m in policy.modules() if getattr(m, "gradient_checkpointing", False)
        ]

    def update(
        self, rollouts: Rollouts, kl_coef: float, step: int, seed: int, temperature: float
    ) -> Metrics:
        """Run all updates of a step. All workers of the collective must call it."""
        config, metrics = self.config, Metrics()
        plan = [
            mini_batch_of(rollouts.ids, config.mini_batches, (seed, step, epoch))
            for epoch in range(config.epochs)
        ]
        counts, skipped = self._counts(rollouts, plan, step), 0
        for layer in self._checkpointed:
            layer.training = True
        for epoch, members in enumerate(plan):
            for part in range(config.mini_batches):
                count = float(counts[epoch, part])
                where = f"step {step}, epoch {epoch}, mini-batch {part}"
                if count == 0:  # on every worker
                    skipped += 1
                    continue
                chosen = torch.nonzero(members == part)[:, 0].tolist()
                self.optimizer.zero_grad(set_to_none=True)
                loss = 0.0
                batches = rollouts.micro_batches(
                    config.micro_batch_tokens,
                    device=self._device,
                    temperature=temperature,
                    among=chosen,
                )
                for batch in batches:
                    if bool(batch.mask.any()):
                        loss += self._backward(rollouts, batch, count, kl_coef, where, metrics)
                skipped += not self._step(loss, where, metrics)
        for layer in self._checkpointed:
            layer.training = False
        if skipped:
            metrics.add("skipped_updates", skipped)
        return metrics

    def _counts(self, rollouts: Rollouts, plan: Sequence[Tensor], step: int) -> Tensor:
        """Return the divisor of each mini-batch's losses, summed over all workers in one call."""
        config = self.config
        own = torch.zeros(config.epochs, config.mini_batches, dtype=torch.float64)
        for epoch, members in enumerate(plan):
            for part in range(config.mini_batches):
                own[epoch, part] = losses.count(rollouts.mask[members == part], config.agg)
        return self.collective.sum(own, f"token counts of step {step}")

    def _backward(
        self,
        rollouts: Rollouts,
        batch: MicroBatch,
        count: float,
        kl_coef: float,
        where: str,
        metrics: Metrics,
    ) -> float:
        config, mask = self.config, batch.mask
        tokens = float(mask.sum())
        with_values = isinstance(config, PPOConfig)
        with self._precision():
            logp, spread, values = run_policy(self.policy, batch, with_values)
        if not self._skip:  # with "skip", the gradient becomes NaN and all workers skip the update
            check_finite({"log_probs": logp, "values": values}, batch, where, self.collective.rank)
        known = "old_logp" in rollouts.tokens
        # With one update per step, the policy is still the one that sampled the tokens.
        old_logp = rollouts.get("old_logp", batch) if known else logp.detach()
        loss, seen = losses.policy_loss(
            logp,
            old_logp,
            rollouts.get("advantages", batch),
            mask,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            dual_clip=config.dual_clip,
            agg=config.agg,
            global_count=count,
        )
        share = losses.count(mask, config.agg) / count  # shares of all workers add up to 1
        metrics.merge("policy_loss", _part(loss, share))
        if spread is not None:
            seen["entropy"] = selected(spread.detach(), mask).sum() / tokens
            if config.entropy_coef:
                term = losses.aggregate(spread, mask, config.agg, global_count=count)
                loss = loss - config.entropy_coef * term
        if "ref_logp" in rollouts.tokens and config.kl.place == "loss":
            reference = selected(rollouts.get("ref_logp", batch), mask)
            distance = losses.kl(selected(logp, mask), reference, config.kl.kind)
            loss = loss + kl_coef * losses.aggregate(distance, mask, config.agg, global_count=count)
            if not known:
                metrics.add("kl", float(selected(distance.detach(), mask).sum()) / tokens, tokens)
        if isinstance(config, PPOConfig):
            assert values is not None
            value_loss, more = losses.value_loss(
                values,
                rollouts.get("values", batch),
                rollouts.get("returns", batch),
                mask,
                clip=config.value_clip,
                agg=config.agg,
                global_count=count,
            )
            loss = loss + config.value_coef * value_loss
            metrics.merge("value_loss", _part(value_loss, share))
            seen.update(more)
        loss.backward()
        metrics.merge("loss", _part(loss, share))
        for name, value in seen.items():
            metrics.add(name, float(value), tokens)
        return float(loss.detach())

    def _step(self, loss: float, where: str, metrics: Metrics) -> bool:
        """Update the weights. Return False on all workers if the gradient isn't finite."""
        sum_gradients(self._parameters, self.collective, f"gradients of {where}")
        limit = math.inf if self.config.clip_norm is None else self.config.clip_norm
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, limit))
        if not math.isfinite(norm):  # same on all workers, because their gradients are equal
            if not self._skip:
                raise self._create_error(loss, where)
            return False
        metrics.add("grad_norm", norm)
        self.optimizer.step()
        return True

    def _create_error(self, loss: float, where: str) -> NonFiniteError:
        """Return an error that names the workers with a NaN. All workers must call it."""
        rank = self.collective.rank
        flags = torch.zeros(max(rank + 1, self.collective.size))  # ``Alone`` can have any rank
        flags[rank] = not math.isfinite(loss)
        bad = torch.nonzero(self.collective.sum(flags, "flags"))[:, 0].tolist()
        problem = "the gradient isn't finite, although the loss is finite on all workers"
        if bad:
            who = ", ".join(map(str, bad))
            problem = f"the loss isn't finite on worker{'s' if len(bad) > 1 else ''} {who}"
        return NonFiniteError(f"{where}: {problem}. The weights are unchanged.", tuple(bad))


def run_policy(
    policy: Any, batch: MicroBatch, with_values: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return (log-probs, entropies or None, values or None), after checking their shapes."""
    values = None
    if with_values and hasattr(policy, "log_probs_and_values"):
        told, values = policy.log_probs_and_values(batch)
    else:
        told = policy.log_probs(batch)
        if with_values:
            values = policy.values(batch)
    logp, spread = told if isinstance(told, tuple) else (told, None)
    for name, made in (("log_probs", logp), ("entropies", spread), ("values", values)):
        if made is not None and made.shape != batch.mask.shape:
            raise ValueError(
                f"{type(policy).__name__}: {name} must have the shape of the responses, "
                f"{tuple(batch.mask.shape)}, not {tuple(made.shape)}"
            )
    return logp, spread, values


def bad_sequences(values: Tensor, mask: Tensor) -> Tensor:
    """Return for each sequence whether the value of one of its tokens is NaN or infinite."""
    return (~torch.isfinite(values) & mask.bool()).any(-1)


def check_finite(
    named: dict[str, Tensor | None], batch: MicroBatch, where: str, worker: int
) -> None:
    """Raise ``NonFiniteError`` for the first row with a value that is NaN or infinite."""
    for name, values in named.items():
        if values is None:
            continue
        bad = torch.nonzero(bad_sequences(values.detach(), batch.mask))[:, 0].tolist()
        if bad:
            raise NonFiniteError(
                f"Worker {worker}, {where}: {name}() returned NaN or infinity for {len(bad)} of "
                f"{len(batch.rows)} sequences.\n  first row: {brief(batch.rows[bad[0]])}",
                (worker,),
            )


def _part(loss: Tensor, share: float) -> tuple[float, float, float, float]:
    """Return a quad for a micro-batch's share of the loss. The shares of a mini-batch add up to 1.

    The quads of all micro-batches therefore add up to the loss of the mini-batch.
    """
    value = float(loss.detach())
    return value, share, value, value
