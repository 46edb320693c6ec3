"""``PPOTrainer`` and ``GRPOTrainer``: the driver sees numbers, and weights only to save them.

A step (an epoch, in the words of ``BaseTrainer``) is one call to every worker. The driver combines
their numbers, adapts the KL coefficient, and keeps the run's directory.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import miniray
from miniray.checks import check_choice, check_int, show_options
from miniray.data.plan.shard import split_evenly
from miniray.errors import NoTokensError
from miniray.rl.calls import Setup, Worker
from miniray.rl.checkpoint_parts import OptimizerPart, ReferencePart, SourcePart
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
from miniray.rl.sources import check_rows, has_batches, steps_per_pass
from miniray.tracebacks import hides_frames
from miniray.train.run.checkpointer import Part
from miniray.train.run.result import TrainResult
from miniray.train.trainer import BaseTrainer
from miniray.train.workers.group import NO_WORKERS
from miniray.train.workers.sync import SyncPolicy

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from miniray.rl.options import RLKwargs


class RLTrainer(BaseTrainer):
    """The base class of ``PPOTrainer`` and ``GRPOTrainer``.

    Args:
        policy: called in every worker; returns a policy (``miniray.rl.Policy``), a causal language
            model with Hugging Face's calling convention, or (model, tokenizer).
        reward: ``reward(row, response)`` → a number, or a dict with ``"reward"`` and numbers to
            watch. Called in the workers.
        data: rows (dicts) as a list; a dataset or loader of ``miniray.data``, of which each worker
            reads its own shard; or ``make_loader(rank, world_size)``, called in every worker, which
            returns that worker's own loader.
        config: the algorithm's settings, a ``PPOConfig`` or ``GRPOConfig``.
        sampling: how responses are generated; ``eval_sampling`` how in evaluations (by default the
            same, but always the most likely token).
        tokenizer: goes with a model as ``policy``; an object, or a function that makes it.
        eval_data: held-out rows for ``evaluate`` and ``eval_every_steps``, as for ``data``.
        sync: ``"grad"``: workers sum up gradients and are always equal. ``"weights"``: each learns
            on its own, and a parameter server combines their weights every ``sync_interval`` steps.
        optimizer: called with the parameters, in groups where ``critic_lr`` is set; AdamW with
            ``config.lr`` by default.
        on_error: what to do with a response whose reward function fails or hangs, or whose
            log-probs are NaN, and with a step that has nothing to learn from: ``"raise"``, or
            ``"skip"`` it and count it.
        reward_timeout: seconds the reward function may take for one response. With None it is not
            limited, and runs in the worker's main thread.
        device, precision: ``"auto"``, ``"cpu"``, ``"cuda"``; ``"fp32"``, or ``"bf16"`` autocast.
        group_backend: ``"gloo"``, or ``"nccl"`` where every worker has a GPU of its own.
        group_timeout: seconds workers wait for each other with ``sync="grad"``.
        eval_every_steps: Evaluate on ``eval_data`` after every N steps. ``eval_interval`` is the
            same, because the epochs of other trainers are steps here.
        **options: The options of ``RunOptions``. With ``sync="weights"``, also ``sync_interval``,
            ``sync_strategy``, ``initial_sync`` and the options of the strategy; see
            ``DataParallelTrainer``.

    An exception on one worker ends the run with an error that names the worker. A worker that
    crashes or hangs is replaced within ``max_failures``. With ``sync="grad"``, all workers restart
    then and repeat the step, and the result is the same as without the loss.
    """

    config_class: type[Algorithm]
    #: What runs in the workers; a subclass of ``RLWorker`` may change any part of a step.
    worker_class: type[Any] = Worker
    _unit = "step"
    _kind = "rl"
    _option_hints = _train_hints = get_hints(Algorithm)
    _kwargs_methods = ()  # workers get none of train()'s keyword arguments

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
        check_trainer_kwargs(type(self), sync, options, self._option_hints)
        run_options, sync_options = split_trainer_kwargs(options)
        if eval_every_steps is not None:
            if run_options.get("eval_interval"):
                raise ValueError("pass either eval_every_steps or eval_interval, not both")
            check_int("eval_every_steps", eval_every_steps, 1, " or None")
            run_options["eval_interval"] = eval_every_steps
        super().__init__(num_workers, worker=self.worker_class, **run_options)
        prompts = config.prompts_per_step
        if prompts is None and not has_batches(data):
            prompts = PROMPTS_PER_STEP
        if prompts is not None and prompts < num_workers:
            raise ValueError(
                f"prompts_per_step={prompts} is less than the {num_workers} workers: some would "
                "have nothing to do in any step"
            )
        if sync_options.pop("mode", "sync") != "sync":
            raise ValueError(
                'mode="async" is not for reinforcement learning: workers share the KL coefficient '
                'of each step. sync="weights" with a longer sync_interval waits less'
            )
        self._factory.uses_torch = device != "cpu"
        self._factory.preloaded = ("torch._dynamo", "miniray.rl.worker")
        self._weights.get_shared = self._get_shared_weights
        self._get_result_fields = lambda: (TrainResult, {"sync": self.get_sync_stats()})
        self.config = config
        self.sampling = setup.sampling
        self._has_eval_data = eval_data is not None
        if self.options.eval_interval and not self._has_eval_data:
            raise ValueError("eval_interval needs eval_data to evaluate on")
        # One seed for all: workers must agree on what is random in a step.
        seed = self.options.seed
        self._run_seed = secrets.randbits(62) if seed is None else seed
        self._setup = setup
        self._setup_ref: Any = None
        kl = config.kl
        self._adaptive = None if kl.target is None else AdaptiveKL(kl.coef, kl.target, kl.horizon)
        self.sync: SyncPolicy | GradientGroup
        if sync == "grad":
            can_restart = self.options.max_failures > 0
            gradients = GradientGroup(group_backend, group_timeout, can_restart=can_restart)
            self.sync, self._group_class = gradients, partial(GradientWorkers, gradients=gradients)
        else:
            averaging = SyncPolicy(self.num_workers, **sync_options)
            self.checkpointer.register(
                "sync", averaging, in_workers=True, on_missing=averaging.load_missing_state
            )
            self.sync = averaging
        # Only workers that can be replaced need the reference model again.
        can_replace = self.options.max_failures > 0 and config.kl.coef > 0
        self._reference = ReferencePart(self._get_group, keep=can_replace)
        self._setups += [self.sync, self._reference]
        self.checkpointer.register("rl", Part(self._get_run_state, self._load_run_state))
        self.checkpointer.register("source", SourcePart(self._get_group), in_workers=True)
        self.checkpointer.register("reference", self._reference, in_workers=True)
        if sync == "grad":  # the optimizers are equal: one is enough for any number of workers
            self.checkpointer.register("optimizer", OptimizerPart(self._get_group), in_workers=True)

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
            epochs: Not supported: the length of a run is its number of steps, each of which samples
                new responses. The error says how many steps make one pass over the prompts.
            steps: Number of steps: in addition to those already trained, or with ``resume`` the
                total of the run.
            resume: See ``BaseTrainer.train``.
            **kwargs: Passed to the hooks, and to ``create_worker`` of a subclass, that accept them.

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
        if self._setup_ref is None:  # rows of a list are in shared memory once
            self._setup_ref = miniray.put(self._setup)
        return self._factory.get_class().remote(worker_id, self._setup_ref)

    def train_epoch(self, epoch: int, **kwargs: Any) -> dict[str, Any]:
        """Train a step on all workers, and return their combined metrics."""
        began = time.perf_counter()
        kl_coef = self.config.kl.coef if self._adaptive is None else self._adaptive.coefficient
        budget = self._get_group().budget
        failures = budget.failures
        made = self.call_workers(
            "train_epoch", epoch, epoch=epoch, seed=self._run_seed, kl_coef=kl_coef
        )
        pooled = pool(made)
        line: dict[str, Any] = {"step": epoch + 1, **record(pooled)}
        if line["counts"]["tokens"] == 0 and self._setup.on_error != "skip":
            raise NoTokensError(
                f"step {epoch} has no token to learn from on any worker: all prompts were left out "
                f"(max_prompt_tokens={self.sampling.max_prompt_tokens}), or all responses are "
                'empty; on_error="skip" goes on to the next step',
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
            self._emit("on_evaluate_end", epoch + 1, scores)

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
        """Return the statistics of the parameter server. {} with ``sync="grad"``."""
        return self.sync.get_stats()

    def model_weights(self) -> Any:
        """Return the trained weights: those of worker 0."""
        return self.sync.get_weights()

    @hides_frames
    def evaluate(self, data: Any = None, **kwargs: Any) -> dict[str, Any]:
        """Mean reward (and what else the reward function tells) on held-out prompts, each once.

        ``data``: rows to use instead of the trainer's ``eval_data``; these go through the driver.
        """
        if self._group is None:
            raise RuntimeError(NO_WORKERS)
        if data is not None:
            check_rows("data", data)
        elif not self._has_eval_data:
            raise ValueError("there is no eval_data: give it to the trainer, or data= here")
        count = self.num_workers

        def arguments(i: int) -> tuple[Any, ...]:
            if data is None:
                return (i, count)
            low, high = split_evenly(len(data), i, count)
            return (i, count, [data[k] for k in range(low, high)], low)

        if isinstance(self._group, GradientWorkers):  # a policy may draw random numbers
            made = self._group.call_and_keep("evaluate", arguments, {}, None, self.state.step)
        else:
            made = self._group.call("evaluate", arguments, {})
        scores = record(pool(made))
        for name in ("counts", "timing", "range"):
            scores.pop(name)
        if "reward" not in scores:
            raise ValueError("the evaluation has no reward: no prompt was left, or all failed")
        return scores

    # -- checkpoints ------------------------------------------------------------------------------

    def load_checkpoint(self, path: str | Path = "latest") -> int:
        """Restore a checkpoint; see ``BaseTrainer``. Its seed becomes that of the run."""
        epoch = super().load_checkpoint(path)
        if self._loaded is not None:  # the run is described before workers exist
            self._run_seed = self._loaded["rl"]["seed"]
        return epoch

    def _restore(self, loaded: dict[str, Any]) -> None:
        before, now = loaded["rl"]["sync"], self._setup.sync
        if before != now:
            raise ValueError(
                f"the checkpoint was made with sync={before!r}, this trainer has {now!r}"
            )
        super()._restore(loaded)
        while isinstance(self.sync, GradientGroup) and not self.sync.keep(self.state.step):
            self.checkpointer.restore(loaded, lambda: list(self.workers))

    def _get_run_state(self) -> dict[str, Any]:
        return {
            "sync": self._setup.sync,
            "seed": self._run_seed,
            "kl": None if self._adaptive is None else self._adaptive.state_dict(),
        }

    def _load_run_state(self, state: Mapping[str, Any]) -> None:
        self._run_seed = state["seed"]
        if self._adaptive is not None and state["kl"] is not None:
            self._adaptive.load_state_dict(state["kl"])

    def _get_shared_weights(self) -> list[Any] | None:
        is_shared = self.sync.is_in_sync and not self.state.in_epoch
        return [self.model_weights()] if is_shared else None

    def _describe(self) -> dict[str, Any]:
        return {
            **super()._describe(),
            **self.sync.describe(),
            "unit": self._unit,
            "sync": self._setup.sync,
            "seed": self._run_seed,
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
    """Trains by comparing each response with what the value head expected; see ``RLTrainer``.

    A model as ``policy`` gets a value head on its last hidden state; for a critic of its own,
    return ``CausalLM(model, tokenizer, critic=another)``. The paper:
    https://arxiv.org/abs/1707.06347
    """

    config_class = PPOConfig
    _option_hints = _train_hints = get_hints(PPOConfig)


class GRPOTrainer(RLTrainer):
    """Trains by comparing the responses to each prompt with each other; see ``RLTrainer``.

    The paper: https://arxiv.org/abs/2402.03300
    """

    config_class = GRPOConfig
    _option_hints = _train_hints = get_hints(GRPOConfig)
