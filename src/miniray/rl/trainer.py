"""``PPOTrainer`` and ``GRPOTrainer``.

A step, which is an epoch of ``BaseTrainer``, is one call to every worker. The driver combines their
metrics, adapts the KL coefficient and writes the run directory. It receives weights only to save
them.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import miniray
from miniray.checks import check_choice, check_int, show_options
from miniray.data.plan.shard import split_evenly
from miniray.errors import NoTokensError
from miniray.rl.calls import Setup, Worker
from miniray.rl.checkpoint_parts import (
    OptimizerPart,
    ReferencePart,
    RunStatePart,
    SourcePart,
)
from miniray.rl.config import (
    PROMPTS_PER_STEP,
    AdaptiveKL,
    Algorithm,
    GRPOConfig,
    PPOConfig,
    Sampling,
)
from miniray.rl.gradient_group import GradientGroup, GradientWorkers
from miniray.rl.metrics import pool, record
from miniray.rl.options import check_trainer_kwargs, get_hints, split_trainer_kwargs
from miniray.rl.rollouts.sources import check_rows, has_batches, steps_per_pass
from miniray.tracebacks import hides_frames
from miniray.train.parts import TrainerParts
from miniray.train.run.result import TrainResult
from miniray.train.train_kwargs import KwargRules
from miniray.train.trainer import BaseTrainer
from miniray.train.worker_factory import ActorSettings
from miniray.train.workers.group import NO_WORKERS, WorkerGroup
from miniray.train.workers.sync.policy import SyncPolicy

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from miniray.rl.options import RLKwargs


class RLTrainer(BaseTrainer):
    """The base class of ``PPOTrainer`` and ``GRPOTrainer``.

    Args:
        policy: Function that is called in every worker. It returns a policy
            (``miniray.rl.Policy``), a causal language model with Hugging Face's calling convention,
            or (model, tokenizer).
        reward: Function ``reward(row, response)`` that is called in the workers. It returns a
            number, or a dict with ``"reward"`` and further metrics.
        data: A list of rows (dicts); a dataset or loader of ``miniray.data``, of which each worker
            reads its shard; or a function ``make_loader(rank, world_size)`` that is called in every
            worker and returns the loader of that worker.
        config: Options of the algorithm: a ``PPOConfig`` or ``GRPOConfig``.
        sampling: Options for generating responses.
        eval_sampling: Sampling options for evaluation. Default: ``sampling`` with temperature 0.
        tokenizer: Tokenizer for a model that ``policy`` returns: an object, or a function that
            creates it.
        eval_data: Held-out rows for ``evaluate`` and ``eval_every_steps``, in any form of ``data``.
        sync: ``"grad"`` sums gradients, so all workers have the same weights. With ``"weights"``,
            workers train independently, and a parameter server combines their weights every
            ``sync_interval`` steps.
        optimizer: Function that is called with the parameters, or with parameter groups if
            ``critic_lr`` is set, and returns the optimizer. Default: AdamW with ``config.lr``.
        on_error: ``"raise"`` or ``"skip"``, for responses whose reward function fails or hangs or
            whose log-probs are NaN, and for steps without tokens. Skipped items are counted.
        reward_timeout: Limit in seconds for one call of the reward function. ``None`` disables the
            limit and runs the function in the main thread of the worker.
        device, precision: ``"auto"``, ``"cpu"``, ``"cuda"``; ``"fp32"``, or ``"bf16"`` autocast.
        group_backend: ``"gloo"``, or ``"nccl"`` if every worker has its own GPU.
        group_timeout: Limit in seconds for a collective with ``sync="grad"``.
        hang_timeout: With ``sync="grad"``, seconds without progress of any worker after which an
            idle worker that the others wait for is lost. It is the longest time that a policy may
            wait for a generation server, and a reward function without ``reward_timeout`` for its
            result. None: no limit.
        eval_every_steps: Evaluate on ``eval_data`` every N steps. ``eval_interval`` is equivalent,
            because the epochs of other trainers are steps here.
        **options: The options of ``RunOptions``. With ``sync="weights"``, also ``sync_interval``,
            ``sync_strategy``, ``initial_sync`` and the options of the strategy; see
            ``DataParallelTrainer``.

    If a worker raises, the run stops with an error that names the worker. A worker that crashes or
    hangs is replaced within ``max_failures``. With ``sync="grad"``, all workers restart and repeat
    the step, so the result is the same as without the failure.
    """

    config_class: type[Algorithm]
    #: Class of the workers. A subclass of ``RLWorker`` can override any part of a step.
    worker_class: type[Any] = Worker

    def __init__(
        self,
        policy: Callable[[], Any],
        reward: Callable[[Any, Any], Any],
        data: Any,
        *,
        config: Algorithm | None = None,
        sampling: Sampling | None = None,
        eval_sampling: Sampling | None = None,
        tokenizer: Any = None,
        eval_data: Any = None,
        num_workers: int = 1,
        sync: Literal["grad", "weights"] = "grad",
        optimizer: Callable[[Any], Any] | None = None,
        on_error: Literal["raise", "skip"] = "raise",
        reward_timeout: float | None = 60.0,
        device: str = "auto",
        precision: Literal["fp32", "bf16"] = "fp32",
        group_backend: Literal["gloo", "nccl"] = "gloo",
        group_timeout: float = 1800.0,
        hang_timeout: float | None = 300.0,
        eval_every_steps: int | None = None,
        **options: Unpack[RLKwargs],
    ) -> None:
        config = self.config_class() if config is None else config
        if not isinstance(config, self.config_class):
            raise TypeError(
                f"{type(self).__name__} needs a {self.config_class.__name__}, not {config!r}"
            )
        check_choice("group_backend", group_backend, ("gloo", "nccl"))
        setup = Setup(
            policy=policy,
            reward=reward,
            data=data,
            config=config,
            sampling=Sampling() if sampling is None else sampling,
            eval_sampling=eval_sampling,
            num_workers=num_workers,
            tokenizer=tokenizer,
            eval_data=eval_data,
            optimizer=optimizer,
            sync=sync,
            on_error=on_error,
            reward_timeout=reward_timeout,
            device=device,
            precision=precision,
        )
        hints = get_hints(self.config_class)
        check_trainer_kwargs(type(self), sync, options, hints)
        run_options, sync_options = split_trainer_kwargs(options)
        if eval_every_steps is not None:
            if run_options.get("eval_interval"):
                raise ValueError("pass either eval_every_steps or eval_interval, not both")
            check_int("eval_every_steps", eval_every_steps, 1, " or None")
            run_options["eval_interval"] = eval_every_steps
        num_workers = check_int("num_workers", num_workers, 1)
        prompts = config.prompts_per_step
        if prompts is None and not has_batches(data):
            prompts = PROMPTS_PER_STEP
        if prompts is not None and prompts < num_workers:
            raise ValueError(
                f"prompts_per_step={prompts} must be at least num_workers={num_workers}, so that "
                "every worker has a prompt in each step"
            )
        if sync_options.pop("mode", "sync") != "sync":
            raise ValueError(
                'mode="async" isn\'t supported for reinforcement learning, because workers share '
                'the KL coefficient of each step. To wait less, use sync="weights" with a longer '
                "sync_interval."
            )
        self._has_eval_data = eval_data is not None
        if run_options.get("eval_interval") and not self._has_eval_data:
            raise ValueError("eval_interval requires eval_data")
        max_failures = check_int("max_failures", run_options.get("max_failures", 0), 0)
        self.sync: SyncPolicy | GradientGroup
        group_class: Callable[..., WorkerGroup] = WorkerGroup
        if sync == "grad":
            self.sync = GradientGroup(
                group_backend,
                group_timeout,
                hang_timeout=hang_timeout,
                get_run_dir=lambda: self.session.directory.path,
                can_restart=max_failures > 0,
            )
            group_class = partial(GradientWorkers, gradients=self.sync)
        else:
            self.sync = SyncPolicy(num_workers, **sync_options)
        # Only replacements need the reference model again.
        can_replace = max_failures > 0 and config.kl.coef > 0
        self._reference = ReferencePart(self._get_group, keep=can_replace)
        parts = TrainerParts(
            kind="rl",
            unit="step",
            kwargs=KwargRules(worker_methods=(), hints=hints),
            actors=ActorSettings(
                uses_torch=device != "cpu", preloaded=("torch._dynamo", "miniray.rl.worker")
            ),
            setups=(self.sync, self._reference),
            group_class=group_class,
            sync=self.sync,
            find_step_problem=lambda worker_class, group: None,  # each epoch is a step
        )
        super().__init__(num_workers, worker=self.worker_class, _parts=parts, **run_options)
        self.config = config
        self.sampling = setup.sampling
        self._setup = setup
        self._setup_ref: Any = None
        kl = config.kl
        self._adaptive = None if kl.target is None else AdaptiveKL(kl.coef, kl.target, kl.horizon)
        self._run_state = RunStatePart(sync, self.options.seed, self._adaptive)
        register = self.checkpointer.register
        if isinstance(self.sync, SyncPolicy):
            missing = self.sync.load_missing_state
            register("sync", self.sync, in_workers=True, on_missing=missing)
        register("rl", self._run_state)
        register("source", SourcePart(self._get_group), in_workers=True)
        register("reference", self._reference, in_workers=True)
        if sync == "grad":  # the optimizers are equal: one is enough for any number of workers
            register("optimizer", OptimizerPart(self._get_group), in_workers=True)

    # -- the run -----------------------------------------------------------------------------------

    @hides_frames
    def train(
        self,
        epochs: int | None = None,
        *,
        steps: int | None = None,
        resume: bool | str | Path | None = None,
        **kwargs: Any,
    ) -> TrainResult:
        """Train for ``steps`` and return the result of the run.

        Args:
            epochs: Not supported, because the length of a run is its number of steps. The error
                reports the number of steps of one pass over the prompts.
            steps: Number of steps to train. Without ``resume``, in addition to those already
                trained; with ``resume``, the total of the run.
            resume: See ``BaseTrainer.train``.
            **kwargs: Passed to hooks, and to ``create_worker`` of a subclass, if they accept them.

        Raises:
            TypeError: ``steps`` is missing, ``epochs`` is set, or nothing accepts a name in
                ``kwargs``.
        """
        if steps is None or epochs is not None:
            raise TypeError(
                f"{type(self).__name__}.train() counts steps: pass train(steps=...). "
                f"{self._describe_pass()}"
            )
        return super().train(steps, resume=resume, **kwargs)

    def _describe_pass(self) -> str:
        data = self._setup.data
        if has_batches(data):
            return "One pass over the prompts takes one step per batch of a worker's loader."
        steps = steps_per_pass(data, self.config.prompts_per_step)
        return f"One pass over the {len(data)} prompts takes {steps} step{'s' * (steps > 1)}."

    def create_worker(self, worker_id: int, **kwargs: Any) -> Any:
        """Create an actor of ``worker_class`` with the arguments of the trainer."""
        if self._setup_ref is None:  # store the rows of a list once in shared memory
            self._setup_ref = miniray.put(self._setup)
        return self._factory.get_class().remote(worker_id, self._setup_ref)

    def train_epoch(self, epoch: int, **kwargs: Any) -> dict[str, Any]:
        """Train one step on all workers, and return their combined metrics."""
        began = time.perf_counter()
        kl_coef = self.config.kl.coef if self._adaptive is None else self._adaptive.coefficient
        budget = self._get_group().budget
        failures = budget.failures
        made = self.call_workers(
            "train_epoch", epoch, epoch=epoch, seed=self._run_state.seed, kl_coef=kl_coef
        )
        pooled = pool(made)
        line: dict[str, Any] = {"step": epoch + 1, **record(pooled)}
        if line["counts"]["tokens"] == 0 and self._setup.on_error != "skip":
            raise NoTokensError(
                f"Step {epoch} has no tokens to train on: all prompts were skipped "
                f"(max_prompt_tokens={self.sampling.max_prompt_tokens}), or all responses are "
                'empty. Set on_error="skip" to continue with the next step.',
                step=epoch,
            )
        line["step_seconds"] = time.perf_counter() - began
        line["tokens_per_second"] = line["counts"]["tokens"] / line["step_seconds"]
        if budget.failures > failures:
            line["restarts"] = budget.failures - failures
        if self.config.kl.coef > 0:
            line["kl_coef"] = kl_coef
        if self._adaptive is not None and "kl" in pooled:
            self._adaptive.update(line["kl"], line["counts"]["sequences"])
        if isinstance(self.sync, SyncPolicy) and self.sync.is_due(epoch):
            self.sync.sync(epoch)
        return line

    def _finish_epoch(self, epoch: int, result: dict[str, Any]) -> None:
        if isinstance(self.sync, SyncPolicy):
            result["synced"] = self.sync.settle(epoch)
        self.state.report_step(epoch + 1)
        before = set(result)
        super()._finish_epoch(epoch, result)
        scores = {name: value for name, value in result.items() if name not in before}
        if scores:
            self._hooks.emit("on_evaluate_end", epoch + 1, scores)

    def call_workers(
        self, method: str, /, *args: Any, epoch: int | None = None, **kwargs: Any
    ) -> list[Any]:
        group = self._get_group()
        if not isinstance(group, GradientWorkers):
            return super().call_workers(method, *args, epoch=epoch, **kwargs)
        is_step = method == "train_epoch" and epoch is not None
        step = epoch + 1 if is_step and epoch is not None else self.state.step
        return group.call_and_keep(method, lambda _: args, kwargs, epoch, step)

    def get_sync_stats(self) -> dict[str, Any]:
        """Return the statistics of the parameter server, or {} with ``sync="grad"``."""
        return self.sync.get_stats()

    def model_weights(self) -> Any:
        """Return the trained weights, which are those of worker 0."""
        return self.sync.get_weights()

    @hides_frames
    def evaluate(self, data: Any = None, **kwargs: Any) -> dict[str, Any]:
        """Evaluate each held-out prompt once, and return the mean reward and other metrics.

        Args:
            data: Rows to use instead of ``eval_data``. The driver sends them to the workers.
            **kwargs: Ignored.
        """
        if self._group is None:
            raise RuntimeError(NO_WORKERS)
        if data is not None:
            check_rows("data", data)
        elif not self._has_eval_data:
            raise ValueError("evaluate() needs data: pass data=, or eval_data= to the trainer")
        count = self.num_workers

        def arguments(i: int) -> tuple[Any, ...]:
            if data is None:
                return (i, count)
            low, high = split_evenly(len(data), i, count)
            return (i, count, [data[k] for k in range(low, high)], low)

        if isinstance(self._group, GradientWorkers):  # a policy may change its random state
            made = self._group.call_and_keep("evaluate", arguments, {}, None, self.state.step)
        else:
            made = self._group.call("evaluate", arguments, {})
        scores = record(pool(made))
        for name in ("counts", "timing", "range"):
            scores.pop(name)
        if "reward" not in scores:
            raise ValueError(
                "the evaluation has no rewards: all prompts were skipped, or all rewards failed"
            )
        return scores

    # -- the run directory and the end ------------------------------------------------------------

    def load_checkpoint(self, path: str | Path = "latest") -> int:
        """Restore a checkpoint, including the seed of its run; see ``BaseTrainer``."""
        epoch = super().load_checkpoint(path)
        if self._checkpoints.loaded is not None:  # the run is described before workers exist
            self._run_state.continue_run(self._checkpoints.loaded["rl"])
        return epoch

    def _describe(self) -> dict[str, Any]:
        return {
            **super()._describe(),
            "unit": self._parts.unit,
            "sync": self._setup.sync,
            "seed": self._run_state.seed,
            "algorithm": dataclasses.asdict(self.config),
            "sampling": dataclasses.asdict(self.sampling),
        }

    def shutdown(self) -> None:
        """Stop the workers. Safe to call twice."""
        super().shutdown()
        self.sync.stop()
        self._reference.stop()
        self._setup_ref = None


show_options(RLTrainer, hidden=("worker",))


class PPOTrainer(RLTrainer):
    """Train a policy with proximal policy optimization (PPO); see ``RLTrainer``.

    If ``policy`` returns a model, a value head is added to its last hidden state. To use a separate
    critic, return ``CausalLM(model, tokenizer, critic=critic)``. PPO is described in
    https://arxiv.org/abs/1707.06347.
    """

    config_class = PPOConfig


class GRPOTrainer(RLTrainer):
    """Train a policy with group relative policy optimization (GRPO); see ``RLTrainer``.

    GRPO compares the rewards of the responses to each prompt. It is described in
    https://arxiv.org/abs/2402.03300.
    """

    config_class = GRPOConfig
