"""The worker of PPO and GRPO: a whole step on its own prompts, in an actor.

::

    loader → rollouts → rewards → log-probs, values → advantages → updates → numbers to the driver

Only these numbers leave it, and its weights when they are synced or saved. With the others it adds
up counts, moments and gradients (``collective``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from miniray import doctor
from miniray.errors import NonFiniteError, NoTokensError
from miniray.rl import advantages as adv
from miniray.rl import losses
from miniray.rl.batch import Generated, Rollouts, Row
from miniray.rl.checks import selected
from miniray.rl.collective import Alone, Collective, Together
from miniray.rl.config import Algorithm, GRPOConfig, PPOConfig
from miniray.rl.metrics import Metrics, Quad
from miniray.rl.policy import CausalLM, as_policy
from miniray.rl.reward import RewardFunction, Scorer, brief
from miniray.rl.sampling import Sampling, row_seed
from miniray.rl.sources import held_out, make_source
from miniray.rl.state import WorkerState
from miniray.rl.update import Updater, bad_sequences, run_policy
from miniray.train import group


@dataclasses.dataclass(frozen=True)
class Setup:
    """What every worker is told; the same for all of them."""

    policy: Callable[[], Any]
    reward: RewardFunction
    data: Any
    config: Algorithm
    sampling: Sampling
    eval_sampling: Sampling
    num_workers: int
    tokenizer: Any = None
    eval_data: Any = None
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None
    sync: str = "grad"
    on_error: str = "raise"
    reward_timeout: float | None = 60.0
    device: str = "auto"
    precision: str = "fp32"


class RLWorker(WorkerState):
    """Lives in an actor; ``worker_id`` is its rank. See the module."""

    def __init__(self, worker_id: int, setup: Setup) -> None:
        self.rank = worker_id
        self.setup = setup
        self.config = setup.config
        cuda = torch.cuda.is_available() if setup.device == "auto" else False
        self.device = torch.device("cuda" if cuda else "cpu")
        if setup.device != "auto":
            self.device = torch.device(setup.device)
        tokenizer = setup.tokenizer
        if callable(tokenizer) and not hasattr(tokenizer, "encode"):
            tokenizer = tokenizer()
        needs_values = isinstance(setup.config, PPOConfig)
        self.policy = as_policy(setup.policy(), tokenizer, needs_values).to(self.device)
        # No dropout, neither in rollouts nor in updates: the ratio of two probabilities under
        # different masks says nothing about the policy.
        self.policy.eval()
        if isinstance(self.policy, CausalLM):
            self.policy.entropy_gradient = setup.config.entropy_coef > 0
        self.reference: Any = None
        self.collective: Collective = Alone(worker_id)
        make = setup.optimizer or self._adamw
        self.optimizer = make([p for p in self.policy.parameters() if p.requires_grad])
        self.source = make_source(
            setup.data, setup.config.prompts_per_step, worker_id, setup.num_workers
        )
        self.scorer = Scorer(
            setup.reward,
            timeout=setup.reward_timeout,
            on_error=setup.on_error,
            where=f"worker {worker_id}",
        )

    def _adamw(self, parameters: Sequence[Any]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=self.config.lr, weight_decay=0.0)

    def join_group(self, spec: group.ProcessGroupSpec) -> None:
        """From now on, add up gradients with the other workers."""
        group.leave()
        group.join(spec, self.rank)
        self.collective = Together()

    # -- a step ------------------------------------------------------------------------------------

    def train_epoch(self, epoch: int, seed: int, kl_coef: float) -> dict[str, Quad]:
        """One step: new rollouts, then learning from them. ``epoch`` is the step's number.

        The driver sends it with the run's seed and the KL coefficient: so all workers agree.
        """
        step, metrics = epoch, Metrics()
        if self.reference is None and self.config.kl.coef > 0:
            self.reference = self._frozen_copy()
        with _phase(metrics, "data"):
            rows = self.source.rows(step, seed)
        with _phase(metrics, "rollout"):
            rollouts = self._rollout(rows, step, seed, metrics)
        with _phase(metrics, "reward"):
            self._reward(rollouts, step, metrics)
        with _phase(metrics, "log_prob"):
            self._look_back(rollouts, step, metrics)
        with _phase(metrics, "update"):
            self._advantages(rollouts, kl_coef, step, metrics)
            updater = Updater(
                self.policy,
                self.optimizer,
                self.config,
                self.collective,
                self._precision,
                device=self.device,
                on_error=self.setup.on_error,
            )
            made = updater.update(rollouts, kl_coef, step, seed, self._temperature())
        self._describe(rollouts, metrics)
        told = {**metrics.export(), **made.export()}
        doctor.step(told["loss"][0] if "loss" in told else None, len(rows), epoch=step)
        return told

    def _rollout(self, rows: Sequence[Row], step: int, seed: int, metrics: Metrics) -> Rollouts:
        first = self.collective.offset(len(rows))
        numbered = [(first + i, row) for i, row in enumerate(rows)]
        kept = [(i, row) for i, row in numbered if self._fits(row)]
        metrics.total("prompts", len(rows))
        metrics.total("filtered_prompts", len(rows) - len(kept))
        repeats = self.config.rollouts
        # One object for all rollouts of a prompt: what it carries is there once.
        repeated = [row for _, row in kept for _ in range(repeats)]
        groups = [i for i, _ in kept for _ in range(repeats)]
        ids = [i * repeats + k for i, _ in kept for k in range(repeats)]
        seeds = [row_seed(seed, step, i) for i in ids]
        made = self._generate(repeated, seeds, self.setup.sampling)
        rollouts = Rollouts(repeated, ids, groups, made)
        metrics.total("empty_responses", int((~rollouts.mask.any(-1)).sum()))
        return rollouts

    def _fits(self, row: Row) -> bool:
        limit = self.setup.sampling.max_prompt_tokens
        if limit is None or not hasattr(self.policy, "encode"):
            return True
        return bool(len(self.policy.encode(row)) <= limit)

    def _reward(self, rollouts: Rollouts, step: int, metrics: Metrics) -> None:
        names = [f"step {step}, sequence {i}" for i in rollouts.ids.tolist()]
        scores = self.scorer.score(rollouts.rows, rollouts.texts, names)
        _tell(scores, metrics)
        there = torch.tensor([score is not None for score in scores], dtype=torch.bool)
        rollouts.rewards[there] = torch.tensor([s["reward"] for s in scores if s is not None])
        rollouts.keep(there)

    def _look_back(self, rollouts: Rollouts, step: int, metrics: Metrics) -> None:
        """Log-probs of what was sampled, now and under the reference, and values."""
        config = self.config
        with_values = isinstance(config, PPOConfig)
        several = config.epochs * config.mini_batches > 1
        # One update and nothing to skip: the update's own pass gives the old log-probs too.
        old_wanted = several or with_values or self.setup.on_error == "skip"
        for batch in self._batches(rollouts):
            if not bool(batch.mask.any()):
                continue  # empty responses
            with torch.no_grad(), self._precision():
                if old_wanted:
                    logp, _, values = run_policy(self.policy, batch, with_values)
                    rollouts.put("old_logp", batch, logp)
                    if values is not None:
                        rollouts.put("values", batch, values)
                if self.reference is not None:
                    rollouts.put("ref_logp", batch, run_policy(self.reference, batch, False)[0])
        bad = torch.zeros(len(rollouts), dtype=torch.bool)
        for name in ("old_logp", "values", "ref_logp"):
            if name in rollouts.tokens:
                bad |= bad_sequences(rollouts.tokens[name], rollouts.mask)
        if bool(bad.any()) and self.setup.on_error != "skip":
            at = int(torch.nonzero(bad)[0, 0])
            raise NonFiniteError(
                f"worker {self.rank}, step {step}: log-probs or values are NaN or infinite for "
                f"{int(bad.sum())} of {len(bad)} sequences\n"
                f"  first: sequence {int(rollouts.ids[at])}, row: {brief(rollouts.rows[at])}"
            )
        metrics.total("skipped_nonfinite", int(bad.sum()))
        rollouts.keep(~bad)

    def _batches(self, rollouts: Rollouts) -> Iterator[Any]:
        return rollouts.micro_batches(
            self.config.micro_batch_tokens, device=self.device, temperature=self._temperature()
        )

    def _advantages(self, rollouts: Rollouts, kl_coef: float, step: int, metrics: Metrics) -> None:
        config, mask = self.config, rollouts.mask
        tokens = float(self.collective.sum(mask.sum().double(), f"tokens of step {step}"))
        if tokens == 0 and self.setup.on_error != "skip":
            raise NoTokensError(
                f"step {step} has no token to learn from on any worker: all prompts were left out "
                f"(max_prompt_tokens={self.setup.sampling.max_prompt_tokens}), or all responses "
                'are empty; on_error="skip" goes on to the next step'
            )
        distance = None
        if "old_logp" in rollouts.tokens and "ref_logp" in rollouts.tokens:
            old, reference = rollouts.tokens["old_logp"], rollouts.tokens["ref_logp"]
            distance = selected(losses.kl(old, reference, config.kl.kind), mask)
            if bool(mask.any()):
                metrics.merge("kl", _quad(distance[mask]))
        if isinstance(config, PPOConfig):
            rewards = _on_last_token(rollouts.rewards, mask)
            if distance is not None and config.kl.place == "reward":
                rewards = rewards - kl_coef * distance
            values = rollouts.tokens.get("values", torch.zeros(mask.shape))
            made, returns = adv.gae(rewards, values, mask, config.gamma, config.lam)
            if config.whiten:
                stats = self.collective.sum(adv.moments(made, mask), f"moments of step {step}")
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

    def _describe(self, rollouts: Rollouts, metrics: Metrics) -> None:
        metrics.total("sequences", len(rollouts))
        metrics.total("tokens", int(rollouts.mask.sum()))
        metrics.extend("response_tokens", rollouts.mask.sum(-1).tolist())

    # -- evaluation --------------------------------------------------------------------------------

    def evaluate(
        self, shard_id: int, num_shards: int, data: Sequence[Row] | None = None, first: int = 0
    ) -> dict[str, Quad]:
        """Rewards on held-out prompts, each exactly once.

        Of this worker's part of the trainer's ``eval_data``, or of ``data``, numbered from
        ``first``.
        """
        if data is None:
            numbered = held_out(self.setup.eval_data, shard_id, num_shards)
        else:
            numbered = enumerate(data, first)
        metrics = Metrics()
        while chunk := list(itertools.islice(numbered, self.config.prompts_per_step)):
            self._evaluate(chunk, metrics)
        return metrics.export()

    def _evaluate(self, numbered: Sequence[tuple[int, Row]], metrics: Metrics) -> None:
        kept = [(i, row) for i, row in numbered if self._fits(row)]
        metrics.total("filtered_prompts", len(numbered) - len(kept))
        rows, seeds = [row for _, row in kept], [row_seed(i) for i, _ in kept]
        made = self._generate(rows, seeds, self.setup.eval_sampling)
        names = [f"evaluation, row {i}" for i, _ in kept]
        scores = self.scorer.score(rows, made.texts, names)
        metrics.extend("response_tokens", [len(r) for r in made.responses])
        _tell(scores, metrics)

    # -- parts -------------------------------------------------------------------------------------

    def _generate(self, rows: Sequence[Row], seeds: Sequence[int], sampling: Sampling) -> Generated:
        if not rows:
            return Generated([], [], [])
        with torch.no_grad(), self._precision():
            made: Generated = self.policy.generate(rows, seeds, sampling)
        return made

    def _temperature(self) -> float:
        return self.setup.sampling.temperature or 1.0  # of the most likely token there is none

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        wanted = self.setup.precision == "bf16"
        context: contextlib.AbstractContextManager[Any] = torch.autocast(
            self.device.type, dtype=torch.bfloat16, enabled=wanted
        )
        return context


@contextlib.contextmanager
def _phase(metrics: Metrics, name: str) -> Iterator[None]:
    """A part of the step: timed, and shown by the doctor while it lasts."""
    began = time.perf_counter()
    with doctor.phase(name):
        yield
    metrics.add(f"{name}_seconds", time.perf_counter() - began)


def _tell(scores: Sequence[dict[str, float] | None], metrics: Metrics) -> None:
    """Keep what the reward function told, and count what it failed for."""
    told = [score for score in scores if score is not None]
    metrics.total("skipped_rewards", len(scores) - len(told))
    for name in dict.fromkeys(name for score in told for name in score):
        metrics.extend(name, [score[name] for score in told if name in score])


def _on_last_token(rewards: Tensor, mask: Tensor) -> Tensor:
    """The reward on the last token of the policy's own; nowhere where there is none."""
    numbered = mask.long().cumsum(-1)
    last = mask & (numbered == numbered[:, -1:]) if mask.shape[1] else mask
    return rewards[:, None] * last


def _flat(rewards: Tensor, groups: Tensor) -> list[float]:
    """For each prompt 1 if its rewards are all equal, so that there is nothing to learn from it."""
    ids, index = torch.unique(groups, return_inverse=True)
    low, high = (
        torch.zeros(len(ids)).scatter_reduce_(0, index, rewards, kind, include_self=False)
        for kind in ("amin", "amax")
    )
    flat: list[float] = (low == high).double().tolist()
    return flat


def _quad(values: Tensor) -> Quad:
    return (
        float(values.double().sum()),
        float(values.numel()),
        float(values.min()),
        float(values.max()),
    )
