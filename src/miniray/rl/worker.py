"""The worker of PPO and GRPO, an actor that runs complete steps on its own prompts.

::

    loader → rollouts → rewards → log-probs, values → advantages → updates → metrics to the driver

The driver receives only metrics, and weights when they are synchronized or saved. Workers sum
counts, moments and gradients among themselves (``collective``).
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from miniray import doctor
from miniray.doctor import recorder
from miniray.rl.calls import OWN_RATE, Setup, Worker
from miniray.rl.collective import Alone, Collective, Together
from miniray.rl.config import PROMPTS_PER_STEP, PPOConfig, Sampling
from miniray.rl.metrics import Metrics, Quad
from miniray.rl.models.generation import row_seed
from miniray.rl.models.policy import CausalLM, as_policy
from miniray.rl.rollouts.batch import Generated, Rollouts
from miniray.rl.rollouts.experience import add_advantages, drop_bad, look_back
from miniray.rl.rollouts.reward import Scorer
from miniray.rl.rollouts.sources import Row, held_out, make_source
from miniray.rl.update import Updater
from miniray.train.lockstep import process_group as group
from miniray.train.lockstep.health.status import EVALUATION, HeartbeatSender


class RLWorker(Worker):
    """The worker of PPO and GRPO. ``worker_id`` is its rank."""

    def __init__(self, worker_id: int, setup: Setup) -> None:
        self.rank = worker_id
        self.setup = setup
        self.config = setup.config
        device = setup.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(device)
        tokenizer = setup.tokenizer
        if callable(tokenizer) and not hasattr(tokenizer, "encode"):
            tokenizer = tokenizer()
        needs_values = isinstance(setup.config, PPOConfig)
        self.policy = as_policy(setup.policy(), tokenizer, needs_values).to(self.device)
        # Disable dropout in rollouts and updates: a ratio of probabilities under different dropout
        # masks would be meaningless.
        self.policy.eval()
        self.reference: Any = None
        self.collective: Collective = Alone(worker_id)
        #: Tells the driver that this worker makes progress, once it is in a process group.
        self.status: HeartbeatSender | None = None
        make = setup.optimizer or self._adamw
        self.optimizer = make(self._trained())
        self.source = make_source(
            setup.data, setup.config.prompts_per_step, worker_id, setup.num_workers
        )
        self.scorer = Scorer(
            setup.reward,
            timeout=setup.reward_timeout,
            on_error=setup.on_error,
            where=f"worker {worker_id}",
            touch=self._touch,
        )

    def _trained(self) -> list[Any]:
        """Return the trainable parameters, in groups if ``critic_lr`` is set.

        The groups keep the order of the parameters, because the state of an optimizer depends on
        it.
        """
        trained = [p for p in self.policy.parameters() if p.requires_grad]
        rate = self.config.critic_lr if isinstance(self.config, PPOConfig) else None
        if rate is None:
            return trained
        if not hasattr(self.policy, "critic_parameters"):
            raise TypeError(
                f"critic_lr requires a policy with critic_parameters(), which "
                f"{type(self.policy).__name__} doesn't have"
            )
        critic = {id(p) for p in self.policy.critic_parameters()}
        if not any(id(p) in critic for p in trained):
            raise ValueError(
                f"critic_lr={rate:g} has no effect: {type(self.policy).__name__}."
                "critic_parameters() returns no trainable parameters"
            )
        return [
            {"params": list(members), **({"lr": rate, OWN_RATE: rate} if of_critic else {})}
            for of_critic, members in itertools.groupby(trained, lambda p: id(p) in critic)
        ]

    def _adamw(self, parameters: Sequence[Any]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=self.config.lr, weight_decay=0.0)

    def join_group(self, spec: group.ProcessGroupSpec) -> None:
        """Join the process group, and sum gradients over its workers from now on."""
        group.leave()
        store = group.join(spec, self.rank)
        self.status = HeartbeatSender(spec, self.rank, store)
        self.collective = Together()

    def _touch(self) -> None:
        if self.status is not None:
            self.status.touch()

    def _enter(self, phase: str, step: int = -1) -> None:
        """Tell the driver what this worker does, so that it is named if it hangs."""
        if self.status is not None:
            self.status.set_phase(phase, step)

    @contextlib.contextmanager
    def _phase(self, name: str, step: int, metrics: Metrics) -> Iterator[None]:
        """Time a phase of a step, and report it to the driver and to the doctor."""
        began = time.perf_counter()
        self._enter(name, step)
        with doctor.phase(name):
            yield
        metrics.add(f"{name}_seconds", time.perf_counter() - began)

    # -- a step ------------------------------------------------------------------------------------

    def train_epoch(self, epoch: int, seed: int, kl_coef: float) -> dict[str, Quad]:
        """Generate rollouts and update the policy with them. ``epoch`` is the number of the step.

        The driver sends the step, the seed and the KL coefficient, so all workers use the same.
        """
        step, metrics = epoch, Metrics()
        recording = recorder.current()
        if recording is not None and not recording.explicit_steps:
            # Set before the first update: an optimizer makes several updates per step, and
            # backward is called on parts of a loss.
            recording.explicit_steps = recording.explicit_losses = True
            recording.begin_steps()
        if self.reference is None and self.config.kl.coef > 0:
            self.reference = self._frozen_copy()
        with self._phase("data", step, metrics):
            rows = self.source.rows(step, seed, self._total)
        with self._phase("rollout", step, metrics):
            rollouts = self._rollout(rows, step, seed, metrics)
        with self._phase("reward", step, metrics):
            self._reward(rollouts, step, metrics)
        with self._phase("log_prob", step, metrics):
            self._look_back(rollouts, step, metrics)
        with self._phase("update", step, metrics):
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
        if (rate := self._get_lr()) is not None:
            metrics.add("lr", rate)
        metrics.total("sequences", len(rollouts))
        metrics.total("tokens", int(rollouts.mask.sum()))
        metrics.extend("response_tokens", rollouts.mask.sum(-1).tolist())
        told = {**metrics.export(), **made.export()}
        if not rows and self.setup.sync == "weights":
            told.pop("skipped_updates", None)  # other workers have the last rows of the epoch
        loss = told["loss"][0] / told["loss"][1] if "loss" in told else None
        doctor.step(loss, len(rows), epoch=step)
        return told

    def _total(self, number: int) -> int:
        return int(self.collective.sum(torch.tensor(int(number)), "workers with prompts left"))

    def _rollout(self, rows: Sequence[Row], step: int, seed: int, metrics: Metrics) -> Rollouts:
        first = self.collective.offset(len(rows))
        numbered = [(first + i, row) for i, row in enumerate(rows)]
        kept = [(i, row) for i, row in numbered if self._fits(row)]
        metrics.total("prompts", len(rows))
        metrics.total("filtered_prompts", len(rows) - len(kept))
        repeats = self.config.rollouts
        # All rollouts of a prompt share its row, so data such as images is stored once.
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
        batches = rollouts.micro_batches(
            self.config.micro_batch_tokens, device=self.device, temperature=self._temperature()
        )
        look_back(rollouts, batches, self.setup, self.policy, self.reference, self._precision)
        drop_bad(rollouts, self.setup.on_error, self.rank, step, metrics)

    def _advantages(self, rollouts: Rollouts, kl_coef: float, step: int, metrics: Metrics) -> None:
        add_advantages(rollouts, self.config, self.collective, kl_coef, step, metrics)

    # -- evaluation --------------------------------------------------------------------------------

    @property
    def sequences_per_step(self) -> int:
        """Approximate number of sequences that this worker processes in a step, at least one."""
        config = self.config
        prompts = config.prompts_per_step or PROMPTS_PER_STEP
        return max(1, prompts * config.rollouts // self.setup.num_workers)

    def evaluate(
        self, shard_id: int, num_shards: int, data: Sequence[Row] | None = None, first: int = 0
    ) -> dict[str, Quad]:
        """Evaluate this worker's held-out prompts once, and return the metrics.

        The prompts are the worker's shard of ``eval_data``, or ``data`` numbered from ``first``.
        """
        if data is None:
            numbered = held_out(self.setup.eval_data, shard_id, num_shards)
        else:
            numbered = enumerate(data, first)
        metrics = Metrics()
        self._enter(EVALUATION)
        while chunk := list(itertools.islice(numbered, self.sequences_per_step)):
            self._evaluate(chunk, metrics)
            self._touch()
        return metrics.export()

    def _evaluate(self, numbered: Sequence[tuple[int, Row]], metrics: Metrics) -> None:
        kept = [(i, row) for i, row in numbered if self._fits(row)]
        metrics.total("filtered_prompts", len(numbered) - len(kept))
        rows, seeds = [row for _, row in kept], [row_seed(i) for i, _ in kept]
        made = self._generate(rows, seeds, self.setup.held_out_sampling)
        names = [f"evaluation, row {i}" for i, _ in kept]
        scores = self.scorer.score(rows, made.texts, names)
        metrics.extend("response_tokens", [len(r) for r in made.responses])
        _tell(scores, metrics)

    # -- parts -------------------------------------------------------------------------------------

    def _get_lr(self) -> float | None:
        """Return the learning rate of the first parameter group, or None if it has none."""
        groups = getattr(self.optimizer, "param_groups", None)
        rate = groups[0].get("lr") if groups else None
        return None if rate is None else float(rate)

    def _generate(self, rows: Sequence[Row], seeds: Sequence[int], sampling: Sampling) -> Generated:
        if not rows:
            return Generated([], [], [])
        with torch.no_grad(), self._precision():
            made: Generated = self.policy.generate(rows, seeds, sampling)
        return made

    def _frozen_copy(self) -> Any:
        policy = self.policy
        critic = policy.critic if isinstance(policy, CausalLM) else None
        if critic is not None:  # as large as the model, and the reference computes no values
            policy.critic = None
        try:
            return copy.deepcopy(policy).requires_grad_(False).eval()
        finally:
            if critic is not None:
                policy.critic = critic

    def _temperature(self) -> float:
        return self.setup.sampling.temperature or 1.0  # greedy decoding has no temperature

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        wanted = self.setup.precision == "bf16"
        context: contextlib.AbstractContextManager[Any] = torch.autocast(
            self.device.type, dtype=torch.bfloat16, enabled=wanted
        )
        return context


def _tell(scores: Sequence[dict[str, float] | None], metrics: Metrics) -> None:
    """Add the results of the reward function to the metrics, and count its failures."""
    told = [score for score in scores if score is not None]
    metrics.total("skipped_rewards", len(scores) - len(told))
    for name in dict.fromkeys(name for score in told for name in score):
        metrics.extend(name, [score[name] for score in told if name in score])
