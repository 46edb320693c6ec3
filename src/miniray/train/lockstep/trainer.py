"""``LockstepTrainer``: base of the trainers whose workers step together.

If a rank raises, crashes, hangs or makes different collective calls, all ranks are stopped, and the
run ends with the error of this rank, with epoch and step. Errors of other ranks about lost
connections aren't shown.

With ``max_failures``, all ranks restart after one crashed or hung. They continue from the newest
snapshot inside the epoch (``snapshot_every``), or else from the end of the last epoch. If a rank is
lost outside an epoch, for example during setup, an evaluation, a checkpoint or ``call_workers``,
that call is repeated. Exceptions of user code aren't retried, because they would be raised again.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from miniray.checks import check_choice
from miniray.core import session
from miniray.tracebacks import hides_frames
from miniray.train.lockstep.checkpoint import RankCheckpoints
from miniray.train.lockstep.group import LockstepGroup
from miniray.train.lockstep.options import (
    check_engine,
    check_options,
    check_snapshot_every,
    create_limits,
    find_step_problem,
)
from miniray.train.lockstep.parallelism import Parallelism, RunSettings
from miniray.train.lockstep.rank import RankActor
from miniray.train.lockstep.ranks import TRAIN_EPOCH
from miniray.train.lockstep.schedule import Action, StepSchedule
from miniray.train.lockstep.snapshots.memory import StepSnapshots
from miniray.train.lockstep.snapshots.state import Keep, RankSnapshots
from miniray.train.parts import TrainerParts
from miniray.train.run.step_log import LogWindow
from miniray.train.steps import StepOptions
from miniray.train.trainer import BaseTrainer
from miniray.train.worker_factory import ActorSettings
from miniray.train.workers.budget import create_resize_event

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from miniray.train.lockstep.replica import EpochReport
    from miniray.train.options import RunKwargs


class LockstepTrainer(BaseTrainer):
    """A trainer whose workers step together. ``DDPTrainer`` documents the arguments."""

    def __init__(
        self,
        num_workers: int,
        parallelism: Parallelism,
        *,
        worker: Any = None,
        clip_norm: float | None = None,
        on_nonfinite: str = "error",
        group_backend: str = "auto",
        hang_timeout: float | None = 60.0,
        timeout: float = 600.0,
        log_every: int = 10,
        eval_every_steps: int | None = None,
        sanity_batches: int = 2,
        snapshot_every: int | Literal["auto"] | None = "auto",
        limit_train_batches: int | None = None,
        limit_val_batches: int | None = None,
        overfit_batches: int | None = None,
        on_divergence: Literal["error", "warn"] = "error",
        **options: Unpack[RunKwargs],
    ) -> None:
        check_options(
            clip_norm=clip_norm,
            hang_timeout=hang_timeout,
            timeout=timeout,
            on_nonfinite=on_nonfinite,
            group_backend=group_backend,
        )
        self._snapshot_every = check_snapshot_every(snapshot_every)
        check_choice("on_divergence", on_divergence, ("error", "warn"))
        step_options = StepOptions(
            log_every=log_every,
            eval_every_steps=eval_every_steps,
            sanity_batches=sanity_batches,
            limit_train_batches=limit_train_batches,
            limit_val_batches=limit_val_batches,
            overfit_batches=overfit_batches,
        )
        self._rank_checkpoints = RankCheckpoints(self._get_ranks, parallelism, on_divergence)
        parts = TrainerParts(
            kind=parallelism.kind,
            kwargs=parallelism.kwargs,
            actors=ActorSettings(
                wrapper=RankActor,
                uses_torch=True,
                preloaded=parallelism.modules,
                set_up="miniray.train.workers.process:set_up_rank",
            ),
            checkpoints=self._rank_checkpoints,
            step_options=step_options,
            find_step_problem=find_step_problem,
            check_validation=self._check_validation,
            get_result=parallelism.get_result,
        )
        super().__init__(num_workers, worker=worker, _parts=parts, **options)
        self.clip_norm = clip_norm
        self._parallelism = parallelism
        self._on_nonfinite = on_nonfinite
        self._group_options: dict[str, Any] = {
            "backend": group_backend,
            "timeout": timeout,
            "hang_timeout": math.inf if hang_timeout is None else hang_timeout,
        }
        unseeded = random.SystemRandom().getrandbits(48)
        self._order_seed = unseeded if self.options.seed is None else self.options.seed
        self._budget, self._world = create_limits(
            self._factory, self.num_workers, parallelism.min_workers, self.options.max_failures
        )
        self._has_requested_pause = False
        self._schedule_steps: int | None = None  # for which the ranks created their schedulers

    # -- calls ------------------------------------------------------------------------------------

    @property
    def failures(self) -> int:
        """Number of lost ranks so far."""
        return self._budget.failures

    def train_epoch(self, epoch: int, **kwargs: Any) -> dict[str, Any]:
        """Train an epoch on all ranks together, and aggregate what they report.

        If the run ends inside the epoch, the result is of the steps so far, and
        ``state.step_in_epoch`` is their number.
        """
        group, before = self._get_ranks(), self.failures
        epoch_start = self.state.step - self.state.step_in_epoch
        while True:
            if not self.state.step_in_epoch or self.checkpointer.is_saved(self.state):
                group.grow()
            start = time.monotonic()
            attempt = self._create_attempt(epoch)
            reports = group.run(attempt, epoch=epoch, epoch_start=epoch_start)
            self.state.report_step(reports[0].step, reports[0].step_in_epoch)
            windows = [window for report in reports for window in report.logs]
            self._steps.logs.add([*group.read_logs(), *windows])
            if not reports[0].step_in_epoch:
                self._steps.logs.complete()
            self._steps.log(at_once=True)
            self._tune_snapshots(windows)
            result = {"step": self.state.step, **self._parallelism.summarize(reports)}
            if not reports[0].step_in_epoch:
                break
            self._has_requested_pause = False
            if group.step_snapshots.is_pending:
                seconds = time.monotonic() - start
                group.run(partial(group.open_snapshots, seconds), keep=Keep.NOTHING)
            if self.session.signals.number is None:  # else time is short
                self._steps.act(self, result)
            if self.should_stop or self._target.is_reached(self.state):
                break
        if self.failures > before:
            result["restarts"] = self.failures - before
        return result

    def _create_attempt(self, epoch: int) -> Callable[[], list[EpochReport]]:
        """Return a function that lets all ranks train to the next pause or the end of the epoch."""
        group = self._get_ranks()

        def get_arguments(rank: int) -> tuple[Any, ...]:
            del rank
            return epoch, self._find_pause(), group.step_snapshots.every, self._target

        return partial(
            group.call_ranks, TRAIN_EPOCH, get_arguments, epoch=epoch, reports_progress=True
        )

    # -- inside an epoch --------------------------------------------------------------------------

    def _find_pause(self) -> int | None:
        """Return the next step at which the driver acts. Ranks leave it out if it is the last."""
        ranks = self._get_ranks()
        is_pending = ranks.step_snapshots.is_pending and ranks.knows_steps
        return self._steps.find_pause(self._target, None, [1] if is_pending else [])

    def _choose_schedule(self) -> None:
        """Keep the schedule of the run: ranks that restart use it, also on a different number."""
        epoch_steps = self._get_ranks().steps_per_epoch
        self._schedule_steps = self._target.count_steps(self.state, epoch_steps)

    def _check_validation(self, group: LockstepGroup) -> None:
        """Validate on a few batches, so that an error doesn't wait for the first evaluation."""
        batches = self._steps.options.sanity_limit
        if not batches or not self._parallelism.can_validate:
            return
        attempt = partial(
            group.call_ranks, "check_validation", lambda _: (batches,), reports_progress=True
        )
        group.run(attempt, keep=Keep.NOTHING)

    def _on_poll(self, windows: list[LogWindow]) -> None:
        """Log what ranks have reported, and ask them to pause if a checkpoint is due."""
        newest = self._get_ranks().step_snapshots.newest_step
        # Without snapshots, that is the last pause, at which a record ends.
        self._steps.logs.restart_step = math.inf if newest is None else newest
        self._steps.log(windows)
        self._tune_snapshots(windows)
        is_due = self.should_stop or self._steps.is_checkpoint_due()
        if is_due and not self._has_requested_pause:
            self._has_requested_pause = True
            self._get_ranks().request_stop()

    def _tune_snapshots(self, windows: Iterable[LogWindow]) -> None:
        """Choose the interval of snapshots once it is known how long steps take."""
        group = self._get_ranks()
        # Ranks take one request at a time. Without this one, they get it after their next pause.
        every = group.step_snapshots.tune(windows)
        if every is not None and not self._has_requested_pause:
            group.request(Action.INTERVAL, every)

    def call_workers(
        self, method: str, /, *args: Any, epoch: int | None = None, **kwargs: Any
    ) -> list[Any]:
        return self._get_ranks().call(method, lambda _: args, kwargs, epoch, keep=Keep.ALL)

    def model_weights(self) -> Any:
        """Return the whole trained weights, whichever ranks hold them."""
        return self._parallelism.merge_weights(self._get_ranks().call("gather_weights"))

    @hides_frames
    def evaluate(self, data: Any = None, **kwargs: Any) -> dict[str, Any]:
        """Evaluate on all workers, every sample exactly once.

        ``data`` is by default the workers' ``val_loader``, or the option ``val_data``.
        """
        epoch = self._epoch_for_errors()
        return self._parallelism.evaluate(self._get_ranks(), data, kwargs, epoch)

    def _get_ranks(self) -> LockstepGroup:
        """Return the ranks. Raise ``RuntimeError`` if they haven't started."""
        ranks: LockstepGroup = self._get_group()
        return ranks

    def _epoch_for_errors(self) -> int | None:
        """Return the current epoch, or else the last one; None before the first."""
        epoch = self.epoch - 1 if self._target.is_reached(self.state) else self.epoch
        return epoch if epoch >= 0 else None

    # -- ranks ------------------------------------------------------------------------------------

    def _create_group(self) -> Any:
        check_engine(type(self).__name__, self.num_workers)
        self._schedule_steps = None
        parallelism, on_event = self._parallelism, self.session.append_event
        can = session.engine().capabilities
        can_restart = self._budget.max_failures > 0 and can.processes and can.shared_memory
        every = self._snapshot_every if can_restart else None
        return LockstepGroup(
            count=self.num_workers,
            create=self._create,
            required=self._find_required(),
            prepare=self._prepare_ranks,
            snapshots=RankSnapshots(parallelism.merge_weights, parallelism.merge_shared),
            step_snapshots=StepSnapshots(every, on_event),
            budget=self._budget,
            name=parallelism.kind,
            **self._group_options,
            call_timeout=self.options.worker_timeout,
            run_dir=self.session.directory.path,
            shows_progress=self.options.progress,
            describe_part=parallelism.describe_part,
            # A checkpoint that is loaded in a moment replaces the initial state.
            keep_initial=Keep.ALL if self._checkpoints.loaded is None else Keep.NOTHING,
            on_event=on_event,
            on_restored=self._return_to_step,
            on_ready=self._choose_schedule,
            on_replaced=self._hooks.on_worker_replaced,
            on_poll=self._on_poll,
            get_epochs=lambda: self._target.epochs,
            on_resized=self._on_resized,
            world=self._world,
        )

    def _return_to_step(self, step: int | None, windows: list[LogWindow]) -> None:
        """Forget the records of steps that are trained again after a restart.

        Without a snapshot (None), that is after the last step that was reported. ``windows`` are
        those that weren't read before.
        """
        step = self.state.step if step is None else step
        self._steps.logs.add(windows)
        self._steps.logs.restart(step)
        self.session.directory.truncate_steps(step)
        self._has_requested_pause = False  # the request is lost with the ranks

    def _on_resized(self, before: int) -> None:
        """Continue the epoch on a different number of ranks, and report it."""
        group, step = self._get_ranks(), self._get_ranks().snapshots.step
        self._steps.logs.resize(group.count)
        self.session.directory.change_world_size(group.count)
        step = self.state.step if step is None else step
        size: int | None = group.call_ranks("count_global_batch")[0]
        self.session.append_event(create_resize_event(before, group.count, step, size))

    def _prepare_ranks(self, group: LockstepGroup) -> tuple[Sequence[Mapping[str, Any]], Any]:
        options = self._steps.options
        facts = {
            "seed": self._order_seed,
            "own_process": session.engine().capabilities.processes,
            "clip_norm": self.clip_norm,
            "on_nonfinite": self._on_nonfinite,
            "step_schedule": StepSchedule(log_every=options.log_every),
            "limit_train_batches": options.train_limit,
            "limit_val_batches": options.limit_val_batches,
            "overfits": options.overfits,
            "target": self._target,
            "position": self.state.position,
            "schedule_steps": self._schedule_steps,
        }
        evaluates = type(self).evaluate is LockstepTrainer.evaluate
        interval = self.options.eval_interval if evaluates else 0
        loaded = (self._checkpoints.loaded or {}).get(self._parallelism.kind)
        settings = RunSettings(facts, interval, loaded, self._hooks.kwargs)
        return self._parallelism.prepare(group, settings)

    def _describe(self) -> dict[str, Any]:
        described = {**super()._describe(), **self._parallelism.describe()}
        limits = self._steps.options.describe_limits()
        return {**described, "clip_norm": self.clip_norm, **limits}

    # -- the end ----------------------------------------------------------------------------------

    def shutdown(self) -> None:
        group = None if self._group is None else self._get_ranks()
        if group is not None:
            group.leave()
        super().shutdown()
        if group is not None:
            group.close()
            group.step_snapshots.close()
        self._rank_checkpoints.close()
