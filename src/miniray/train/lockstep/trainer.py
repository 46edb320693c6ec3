"""``LockstepTrainer``: base of the trainers whose workers step together.

If a rank raises, dies, hangs or leaves the common path, all ranks are stopped at once and the run
ends with one error: that of this rank, with epoch and step. Errors of other ranks about lost
connections aren't shown.

With ``max_failures``, a rank that died or hung costs the epoch it was in: all ranks restart with
the state of the end of the last epoch. If a rank is lost before the first epoch or between two
epochs, while it is set up, in an evaluation, a checkpoint or a ``call_workers``, that call is
repeated. An exception of user code isn't repeated: it would be raised again.
"""

from __future__ import annotations

import json
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import miniray
from miniray.checks import check_int
from miniray.core import session
from miniray.train.callbacks import Checkpoint
from miniray.train.lockstep.group import TRAIN_EPOCH, LockstepGroup
from miniray.train.lockstep.logs import LogMerger
from miniray.train.lockstep.options import check_engine, check_optional_int, check_options
from miniray.train.lockstep.rank import RankActor
from miniray.train.lockstep.schedule import Action, StepSchedule
from miniray.train.lockstep.snapshot import Keep, RankSnapshots
from miniray.train.lockstep.status import LogWindow
from miniray.train.run.checkpointer import Part
from miniray.train.trainer import BaseTrainer
from miniray.train.workers.budget import FailureBudget
from miniray.train.workers.context import PROGRESS

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from miniray.train.lockstep.loop import EpochReport
    from miniray.train.options import RunKwargs


class LockstepTrainer(BaseTrainer, ABC):
    """A trainer whose workers step together. ``DDPTrainer`` documents the arguments."""

    _kind = "ranks"
    _counts_steps = True
    #: Not ``train_epoch``, which is called with the epoch only.
    _kwargs_methods: Sequence[str] = ("__init__", "setup", "load_data_shard", "evaluate")
    _process_set_up = "miniray.train.workers.process:set_up_rank"
    _wrapper = RankActor

    def __init__(
        self,
        num_workers: int,
        *,
        worker: Any = None,
        clip_norm: float | None = None,
        on_nonfinite: str = "error",
        group_backend: str = "auto",
        hang_timeout: float | None = 60.0,
        timeout: float = 600.0,
        log_every: int = 10,
        eval_every_steps: int | None = None,
        limit_train_batches: int | None = None,
        limit_val_batches: int | None = None,
        overfit_batches: int | None = None,
        **options: Unpack[RunKwargs],
    ) -> None:
        check_options(
            clip_norm=clip_norm,
            hang_timeout=hang_timeout,
            timeout=timeout,
            on_nonfinite=on_nonfinite,
            group_backend=group_backend,
        )
        self._log_every = check_int("log_every", log_every, 1)
        self._eval_every_steps = check_optional_int("eval_every_steps", eval_every_steps)
        overfit_batches = check_optional_int("overfit_batches", overfit_batches)
        if overfit_batches is not None and limit_train_batches is not None:
            raise ValueError("pass either overfit_batches or limit_train_batches, not both")
        self._limits = {
            "limit_train_batches": check_optional_int("limit_train_batches", limit_train_batches),
            "limit_val_batches": check_optional_int("limit_val_batches", limit_val_batches),
            "overfit_batches": overfit_batches,
        }
        super().__init__(num_workers, worker=worker, **options)
        shared = Part(self._collect_shared, self._load_shared)
        self.checkpointer.register(self._kind, shared, in_workers=True)
        self.clip_norm = clip_norm
        self._on_nonfinite, self._group_backend = on_nonfinite, group_backend
        self._hang_timeout = math.inf if hang_timeout is None else hang_timeout
        self._timeout = timeout
        unseeded = random.SystemRandom().getrandbits(48)
        self._order_seed = unseeded if self.options.seed is None else self.options.seed
        self._budget = FailureBudget(self.options.max_failures)
        self._logs = LogMerger(self.num_workers)
        self._has_requested_pause = False

    # -- methods of subclasses --------------------------------------------------------------------

    @abstractmethod
    def _prepare_ranks(self, group: LockstepGroup) -> tuple[Sequence[Mapping[str, Any]], Any]:
        """See ``LockstepGroup.prepare``."""

    @abstractmethod
    def _summarize(self, reports: Sequence[EpochReport]) -> dict[str, Any]:
        """Return the result of an epoch from the reports of the ranks."""

    @abstractmethod
    def _merge_weights(self, parts: Sequence[Any]) -> Any:
        """Return the whole weights from the ranks' ``gather_weights``."""

    @abstractmethod
    def _merge_shared(self, parts: Sequence[Any]) -> Any:
        """Return the state that all ranks share from their ``gather_shared``."""

    def _describe_part(self, rank: int) -> str | None:
        """Return what part of the model is lost with a rank; None if all ranks hold the same."""
        del rank
        return None

    # -- calls ------------------------------------------------------------------------------------

    @property
    def failures(self) -> int:
        """How many losses of ranks have been counted."""
        return self._budget.failures

    def train_epoch(self, epoch: int, **kwargs: Any) -> dict[str, Any]:
        """Train an epoch on all ranks together, and aggregate what they report.

        If the run ends inside the epoch, the result is of the steps so far, and
        ``state.step_in_epoch`` is their number.
        """
        group, before = self._get_ranks(), self.failures
        while True:
            attempt = self._create_attempt(epoch, self._find_pause())
            reports: list[EpochReport] = group.run(attempt, epoch=epoch)
            self.state.report_step(reports[0].step, reports[0].step_in_epoch)
            self._logs.add(group.read_logs())
            self._logs.add(window for report in reports for window in report.logs)
            if not reports[0].step_in_epoch:
                self._logs.complete()
            self._log_steps(at_once=True)
            result = {"step": self.state.step, **self._summarize(reports)}
            if not reports[0].step_in_epoch:
                break
            self._has_requested_pause = False
            self._act_inside_epoch(result)
            if self.should_stop or self._target.is_reached(self.state):
                break
        if self.failures > before:
            result["restarts"] = self.failures - before
        return result

    def _create_attempt(self, epoch: int, until: int | None) -> Callable[[], list[EpochReport]]:
        """Return a function that lets all ranks train to ``until``, or the end of the epoch."""
        return partial(
            self._get_ranks().call_ranks,
            TRAIN_EPOCH,
            lambda _: (epoch, until, self._target),
            epoch=epoch,
            reports_progress=True,
        )

    # -- inside an epoch --------------------------------------------------------------------------

    def _find_pause(self) -> int | None:
        """Return the next step at which the driver acts; None if that is the end of the epoch."""
        step = self.state.step
        every = [self._eval_every_steps, *(c.every_steps for c in self._get_checkpoint_callbacks())]
        pauses = [step - step % n + n for n in every if n]
        if self._target.steps is not None:
            pauses.append(self._target.steps)
        if not pauses:
            return None
        steps = self._get_ranks().steps_per_epoch
        assert steps is not None  # see _check_target
        end = step - self.state.step_in_epoch + steps
        return min(pauses) if min(pauses) < end else None

    def _check_target(self) -> None:
        options = {
            "train(steps=...)": self._target.steps,
            "eval_every_steps": self._eval_every_steps,
            "Checkpoint(every_steps=...)": self._find_checkpoint_steps(),
        }
        asked = [name for name, value in options.items() if value is not None]
        if asked and self._get_ranks().steps_per_epoch is None:
            raise TypeError(
                f"{', '.join(asked)} needs workers with training_step(batch, batch_idx) and a "
                "train_loader that has a length. With train_epoch, the steps are the workers' own"
            )

    def _get_checkpoint_callbacks(self) -> list[Checkpoint]:
        return [callback for callback in self.callbacks if isinstance(callback, Checkpoint)]

    def _act_inside_epoch(self, result: dict[str, Any]) -> None:
        """Evaluate and write a checkpoint if they are due after a step inside an epoch.

        Args:
            result: The metrics of the epoch up to this step.
        """
        self.state.part_metrics = {**result, **self._evaluate_if_due({})}
        for callback in self._get_checkpoint_callbacks():
            callback.save_if_due(self)

    def _evaluate_if_due(self, scores: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return and log the scores of ``eval_every_steps``; {} if none are due at this step.

        ``scores`` of an evaluation at the same step are used if there are any.
        """
        step = self.state.step
        if not self._eval_every_steps or step % self._eval_every_steps:
            return {}
        scores = dict(scores) or self._evaluate_for_record()
        self._write_step({"step": step, "epoch": self.epoch, **scores})
        self._emit("on_evaluate_end", step, scores)
        return scores

    def _finish_epoch(self, epoch: int, result: dict[str, Any]) -> None:
        before = set(result)
        super()._finish_epoch(epoch, result)
        scores = {name: value for name, value in result.items() if name not in before}
        result.update(self._evaluate_if_due(scores))

    def _on_poll(self, windows: list[LogWindow]) -> None:
        """Log what ranks have reported, and ask them to pause if a checkpoint is due."""
        self._logs.add(windows)
        self._log_steps()
        is_due = self.should_stop or any(
            callback.is_time_due() for callback in self._get_checkpoint_callbacks()
        )
        if is_due and not self._has_requested_pause:
            self._has_requested_pause = True
            self._get_ranks().request(Action.STOP)

    def _log_steps(self, *, at_once: bool = False) -> None:
        for record in self._logs.take_records(at_once=at_once):
            self._write_step(record)
            self._emit("on_step_end", record["step"], record)

    def call_workers(
        self, method: str, /, *args: Any, epoch: int | None = None, **kwargs: Any
    ) -> list[Any]:
        return self._get_ranks().call(method, lambda _: args, kwargs, epoch, keep=Keep.ALL)

    def model_weights(self) -> Any:
        """Return the whole trained weights, whichever ranks hold them."""
        return self._merge_weights(self._get_ranks().call("gather_weights"))

    def _get_ranks(self) -> LockstepGroup:
        """Return the ranks. Raise ``RuntimeError`` if they haven't started."""
        group: Any = self._get_group()
        ranks: LockstepGroup = group
        return ranks

    def _epoch_for_errors(self) -> int | None:
        """Return the current epoch, or else the last one; None before the first."""
        epoch = self.epoch - 1 if self._target.is_reached(self.state) else self.epoch
        return epoch if epoch >= 0 else None

    # -- ranks ------------------------------------------------------------------------------------

    def _start_engine(self) -> None:
        super()._start_engine()
        check_engine(type(self).__name__, self.num_workers)

    def _make_group(self, **options: Any) -> Any:
        return LockstepGroup(
            count=options["count"],
            create=options["create"],
            required=options["required"],
            prepare=self._prepare_ranks,
            snapshots=RankSnapshots(self._merge_weights, self._merge_shared),
            budget=self._budget,
            name=self._kind,
            backend=self._group_backend,
            timeout=self._timeout,
            hang_timeout=self._hang_timeout,
            call_timeout=options["timeout"],
            run_dir=self.session.directory.path,
            shows_progress=self.options.progress,
            describe_part=self._describe_part,
            on_event=options["on_event"],
            on_replaced=self._call_on_replaced,
            on_poll=self._on_poll,
        )

    def _set_up_all(self) -> None:
        # A checkpoint that is loaded in a moment replaces the initial state.
        keep = Keep.ALL if self._loaded is None else Keep.NOTHING
        self._get_ranks().join(keep=keep)

    def _call_on_replaced(self, rank: int) -> None:
        self._logs.clear()
        self._has_requested_pause = False
        self.session.directory.truncate_steps(self.state.step)
        for callback in self.callbacks:
            callback.on_worker_replaced(self, rank)

    def _run_facts(self) -> dict[str, Any]:
        """Return the fields of ``RunFacts``."""
        return {
            "seed": self._order_seed,
            "own_process": session.engine().capabilities.processes,
            "clip_norm": self.clip_norm,
            "on_nonfinite": self._on_nonfinite,
            "step_schedule": StepSchedule(log_every=self._log_every),
            "limit_train_batches": (
                self._limits["overfit_batches"] or self._limits["limit_train_batches"]
            ),
            "limit_val_batches": self._limits["limit_val_batches"],
            "overfits": self._limits["overfit_batches"] is not None,
            "target": self._target,
            "position": {
                "step": self.state.step,
                "epoch": self.epoch,
                "step_in_epoch": self.state.step_in_epoch,
            },
        }

    def _describe(self) -> dict[str, Any]:
        limits = {name: value for name, value in self._limits.items() if value is not None}
        return {**super()._describe(), **limits}

    def _get_worker_env(self) -> dict[str, str]:
        target = {"epochs": self._target.epochs, "total_steps": self._target.steps}
        return {PROGRESS: json.dumps({"global_step": self.state.step, **target})}

    # -- state ------------------------------------------------------------------------------------

    def _get_shared_weights(self) -> list[Any]:
        return [self.model_weights()]

    def _collect_shared(self) -> Any:
        """Return the state that all ranks share, merged."""
        return self._merge_shared(self._get_ranks().call("gather_shared"))

    def _load_shared(self, shared: Any) -> None:
        shared = miniray.put(shared)
        self._get_ranks().call("load_shared", lambda _: (shared,), keep=Keep.ALL)

    def _restore(self, loaded: dict[str, Any]) -> None:
        # The parts are restored one by one. Ranks that restart meanwhile have all of them.
        states = loaded["workers"]["states"]
        self._get_ranks().snapshots.set(loaded["weights"][0], loaded[self._kind], states)
        super()._restore(loaded)

    # -- the end ----------------------------------------------------------------------------------

    def _abort(self, error: BaseException) -> None:
        if self._group is not None:
            self._get_ranks().abandon()
        super()._abort(error)

    def shutdown(self) -> None:
        group = None if self._group is None else self._get_ranks()
        if group is not None:
            group.leave()
        super().shutdown()
        if group is not None:
            group.close()
