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
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import miniray
from miniray.checks import check_choice
from miniray.core import session
from miniray.errors import CheckpointError, WeightsDivergedError
from miniray.tracebacks import hides_frames
from miniray.train.lockstep.group import LockstepGroup
from miniray.train.lockstep.health.failure import Divergence, find_divergence
from miniray.train.lockstep.options import (
    check_engine,
    check_options,
    check_snapshot_every,
)
from miniray.train.lockstep.parallelism import Parallelism, RunSettings
from miniray.train.lockstep.rank import RankActor
from miniray.train.lockstep.ranks import TRAIN_EPOCH
from miniray.train.lockstep.schedule import Action, StepSchedule
from miniray.train.lockstep.snapshots.memory import CheckpointMemory, StepSnapshots
from miniray.train.lockstep.snapshots.state import Keep, RankSnapshots, share_positions
from miniray.train.options import warn
from miniray.train.run.checkpointer import Part
from miniray.train.run.checkpoints.format import LateState
from miniray.train.run.step_log import LogWindow
from miniray.train.steps import StepActions, StepOptions
from miniray.train.trainer import BaseTrainer
from miniray.train.workers.budget import FailureBudget, WorldSize

if TYPE_CHECKING:
    from pathlib import Path

    from typing_extensions import Unpack

    from miniray.train.lockstep.replica import EpochReport
    from miniray.train.lockstep.snapshots.arena import Snapshot
    from miniray.train.options import RunKwargs


class LockstepTrainer(BaseTrainer):
    """A trainer whose workers step together. ``DDPTrainer`` documents the arguments."""

    _kind = "ranks"
    _counts_steps = True
    #: Not ``train_epoch``, which is called with the epoch only.
    _kwargs_methods: Sequence[str] = ("__init__", "setup", "load_data_shard", "evaluate")

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
        self._on_divergence = on_divergence
        step_options = StepOptions(
            log_every=log_every,
            eval_every_steps=eval_every_steps,
            sanity_batches=sanity_batches,
            limit_train_batches=limit_train_batches,
            limit_val_batches=limit_val_batches,
            overfit_batches=overfit_batches,
        )
        super().__init__(num_workers, worker=worker, **options)
        shared = Part(self._collect_shared, self._load_shared)
        self.checkpointer.register(self._kind, shared, in_workers=True)
        self.clip_norm = clip_norm
        self._parallelism = parallelism
        self._factory.wrapper, self._factory.uses_torch = RankActor, True
        self._factory.preloaded = parallelism.modules
        self._factory.set_up = "miniray.train.workers.process:set_up_rank"
        self._get_result_fields = parallelism.get_result
        self._weights.get_shared = lambda: [self.model_weights()]
        self._on_nonfinite, self._group_backend = on_nonfinite, group_backend
        self._hang_timeout = math.inf if hang_timeout is None else hang_timeout
        self._timeout = timeout
        unseeded = random.SystemRandom().getrandbits(48)
        self._order_seed = unseeded if self.options.seed is None else self.options.seed
        self._budget, self._world = FailureBudget(self.options.max_failures), WorldSize()
        self._steps = StepActions(
            step_options,
            self.state,
            self.callbacks,
            self.num_workers,
            evaluate=self._evaluate_for_record,
            write=self.loggers.log_step,
            emit=self._emit,
        )
        self._checkpoint_memory = CheckpointMemory()
        self._has_requested_pause = False
        self._schedule_steps: int | None = None  # for which the ranks created their schedulers

    def _allow_fewer_workers(self, min_workers: int) -> None:
        """Let the run continue on fewer workers; see ``min_workers`` of ``DDPTrainer``.

        Each worker that may be dropped is lost twice at most before that.
        """
        default = 2 * (self.num_workers - min_workers)
        self._budget = FailureBudget(self.options.max_failures or default)
        self._world = WorldSize(self.num_workers, min_workers, self._factory.count_room)

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

    def _check_target(self) -> None:
        requested = self._steps.list_requested(self._target)
        if requested and not self._get_ranks().knows_steps:
            raise TypeError(
                f"{', '.join(requested)} needs workers with training_step(batch, batch_idx) and a "
                "train_loader that has a length. With train_epoch, the steps are the workers' own"
            )

    def _start_workers(self) -> None:
        is_new = self._group is None
        if is_new:
            self._schedule_steps = None
        super()._start_workers()
        if is_new:  # ranks that restart keep the schedule, also if their number changes
            epoch_steps = self._get_ranks().steps_per_epoch
            self._schedule_steps = self._target.count_steps(self.state, epoch_steps)
        if not self.state.step and not self._target.is_reached(self.state):
            self._check_validation()

    def _check_validation(self) -> None:
        """Validate on a few batches, so that an error doesn't wait for the first evaluation."""
        group, batches = self._get_ranks(), self._steps.options.sanity_limit
        if not batches or not self._parallelism.can_validate:
            return
        attempt = partial(
            group.call_ranks, "check_validation", lambda _: (batches,), reports_progress=True
        )
        group.run(attempt, keep=Keep.NOTHING)

    def _finish_epoch(self, epoch: int, result: dict[str, Any]) -> None:
        before = set(result)
        super()._finish_epoch(epoch, result)
        scores = {name: value for name, value in result.items() if name not in before}
        result.update(self._steps.evaluate_if_due(scores))

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
        group: Any = self._get_group()
        ranks: LockstepGroup = group
        return ranks

    def _epoch_for_errors(self) -> int | None:
        """Return the current epoch, or else the last one; None before the first."""
        epoch = self.epoch - 1 if self._target.is_reached(self.state) else self.epoch
        return epoch if epoch >= 0 else None

    # -- ranks ------------------------------------------------------------------------------------

    def _create_group(self) -> Any:
        check_engine(type(self).__name__, self.num_workers)
        parallelism, on_event = self._parallelism, self.session.append_event
        return LockstepGroup(
            count=self.num_workers,
            create=self._create,
            required=self._find_required(),
            prepare=self._prepare_ranks,
            snapshots=RankSnapshots(parallelism.merge_weights, parallelism.merge_shared),
            step_snapshots=StepSnapshots(self._choose_snapshots(), on_event),
            budget=self._budget,
            name=self._kind,
            backend=self._group_backend,
            timeout=self._timeout,
            hang_timeout=self._hang_timeout,
            call_timeout=self.options.worker_timeout,
            run_dir=self.session.directory.path,
            shows_progress=self.options.progress,
            describe_part=parallelism.describe_part,
            # A checkpoint that is loaded in a moment replaces the initial state.
            keep_initial=Keep.ALL if self._loaded is None else Keep.NOTHING,
            on_event=on_event,
            on_restored=self._return_to_step,
            on_replaced=self._call_on_replaced,
            on_poll=self._on_poll,
            get_epochs=lambda: self._target.epochs,
            on_resized=self._on_resized,
            world=self._world,
        )

    def _choose_snapshots(self) -> int | Literal["auto"] | None:
        """Return ``snapshot_every``; None if ranks can't be lost or share no memory."""
        can = session.engine().capabilities
        is_possible = self._budget.max_failures > 0 and can.processes and can.shared_memory
        return self._snapshot_every if is_possible else None

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
        text = f"training continues on {group.count} ranks instead of {before} at step {step}"
        if size is not None:
            text += f"; the global batch size is {size} instead of {size // group.count * before}"
        event = {"event": "world_size_changed", "from": before, "to": group.count, "step": step}
        self.session.append_event({**event, "global_batch_size": size, "message": text})

    def _call_on_replaced(self, rank: int) -> None:
        for callback in self.callbacks:
            callback.on_worker_replaced(self, rank)

    def _prepare_ranks(self, group: LockstepGroup) -> tuple[Sequence[Mapping[str, Any]], Any]:
        facts = {
            "seed": self._order_seed,
            "own_process": session.engine().capabilities.processes,
            "clip_norm": self.clip_norm,
            "on_nonfinite": self._on_nonfinite,
            "step_schedule": StepSchedule(log_every=self._steps.options.log_every),
            "limit_train_batches": self._steps.options.train_limit,
            "limit_val_batches": self._steps.options.limit_val_batches,
            "overfits": self._steps.options.overfits,
            "target": self._target,
            "position": {
                "step": self.state.step,
                "epoch": self.epoch,
                "step_in_epoch": self.state.step_in_epoch,
            },
            "schedule_steps": self._schedule_steps,
        }
        evaluates = type(self).evaluate is LockstepTrainer.evaluate
        interval = self.options.eval_interval if evaluates else 0
        loaded = (self._loaded or {}).get(self._kind)
        settings = RunSettings(facts, interval, loaded, self._kwargs)
        return self._parallelism.prepare(group, settings)

    def _describe(self) -> dict[str, Any]:
        described = {**super()._describe(), **self._parallelism.describe()}
        limits = self._steps.options.describe_limits()
        return {**described, "clip_norm": self.clip_norm, **limits}

    # -- checkpoints ------------------------------------------------------------------------------

    def save_checkpoint(self, epoch: int | None = None, *, background: bool = False) -> Path | None:
        """Write a checkpoint as ``BaseTrainer`` does, if all replicas have the same weights.

        Raises:
            WeightsDivergedError: They differ. With ``on_divergence="warn"``, warn and return None.
        """
        found = self._find_divergence() if self._group is not None else None
        if found is None:
            return super().save_checkpoint(epoch, background=background)
        step, name = self.state.step, found.parameters[0]
        message = found.describe(step)
        event = {"event": "weights_diverged", "rank": found.rank, "parameter": name, "step": step}
        self.session.append_event({**event, "message": message})
        if self._on_divergence == "error":
            raise WeightsDivergedError(message, rank=found.rank, entry=name, step=step)
        warn(message)
        return None

    def _find_divergence(self) -> Divergence | None:
        """Compare the weights of ranks that should hold the same."""
        group = self._get_ranks()
        replicas = [r for r in self._parallelism.list_replicas(group.count) if len(r) > 1]
        return find_divergence(group.call("get_checksums"), replicas) if replicas else None

    # -- state ------------------------------------------------------------------------------------

    def _collect_shared(self) -> Any:
        """Return the state that all ranks share, merged."""
        return self._parallelism.merge_shared(self._get_ranks().call("gather_shared"))

    def _keep_state(self) -> LateState | None:
        """Copy the ranks' state to shared memory, from which a thread writes a checkpoint.

        If ranks share no memory, each writes its part itself, unless one has the whole model.
        """
        self.checkpointer.wait()  # it may be reading the memory
        group, memory = self._get_ranks(), self._checkpoint_memory
        can, names = session.engine().capabilities, self._names_of_ranks
        if not can.processes:
            return None
        if not can.shared_memory:
            is_sharded = self._parallelism.is_sharded
            return LateState(names, self._save_shards, at_once=True) if is_sharded else None
        if not group.run(partial(group.keep_state, memory), keep=Keep.NOTHING):
            return None

        def read(directory: Path) -> tuple[Mapping[str, Any], Sequence[str]]:
            del directory
            return self._name_parts(*self._convert(memory.read())), ()

        return LateState(names, read)

    def _save_shards(self, directory: Path) -> tuple[Mapping[str, Any], Sequence[str]]:
        """Let the ranks write their parts to a directory that all of them see."""
        group = self._get_ranks()
        found = group.run(partial(group.save_shards, directory), keep=Keep.NOTHING)
        saved, own = [shards for shards, _ in found], [state for _, state in found]
        for shards in saved:
            if shards.problem is not None:
                raise CheckpointError(shards.problem, entry=str(directory))
        files = [shards.file for shards in saved if shards.file is not None]
        for rank, shards in enumerate(saved):
            if shards.file is not None and not (directory / shards.file).is_file():
                raise CheckpointError(
                    f"rank {rank} has written {shards.file}, which the driver doesn't see. The run "
                    "directory must be on a file system that all machines share",
                    entry=str(directory / shards.file),
                )
        local = [shards.state["local"] for shards in saved]
        weights, shared = self._parallelism.merge_local(saved[0].state["shared"], local)
        return self._name_parts(weights, shared, own), files

    @property
    def _names_of_ranks(self) -> tuple[str, ...]:
        """The parts of checkpoints that ranks hold."""
        return "weights", "workers", self._kind

    def _name_parts(self, weights: Any, shared: Any, own: Sequence[Any]) -> dict[str, Any]:
        workers = {"count": len(own), "states": list(own)}
        return dict(zip(self._names_of_ranks, ([weights], workers, shared), strict=True))

    def _convert(self, snapshot: Snapshot) -> tuple[Any, Any, Sequence[Any]]:
        """Return the whole weights, the shared state and the ranks' states of a snapshot."""
        own = snapshot.own
        local = [state["local"] for state in own]
        weights, shared = self._parallelism.merge_local(snapshot.shared, local)
        if own[0]["weights"] is not None:  # the worker's own
            weights = own[0]["weights"]
        return weights, shared, [state["state"] for state in own]

    def _load_shared(self, shared: Any) -> None:
        shared = miniray.put(shared)
        self._get_ranks().call("load_shared", lambda _: (shared,), keep=Keep.ALL)

    def _restore(self, loaded: dict[str, Any]) -> None:
        # The parts are restored one by one. If ranks restart in between, they get all parts.
        group, states = self._get_ranks(), loaded["workers"]["states"]
        if loaded["workers"]["count"] != group.count:
            states = share_positions(states, group.count)
            loaded = {**loaded, "workers": {**loaded["workers"], "states": states}}
        step = loaded["state"]["step"]
        group.snapshots.set(step, loaded["weights"][0], loaded[self._kind], states)
        group.step_snapshots.clear()
        super()._restore(loaded)

    # -- the end ----------------------------------------------------------------------------------

    def _stop(self) -> None:
        if self._group is not None and self.session.signals.is_overdue:
            with self.session.printing_errors("the newest snapshot is not in a checkpoint of"):
                self._save_newest_snapshot()
        super()._stop()

    def _save_newest_snapshot(self) -> None:
        """Write a checkpoint of the newest snapshot: ranks didn't reach the end of their step."""
        group = self._get_ranks()
        group.stop()
        group.take_newest_snapshot()
        if group.snapshots.is_empty:
            return
        weights, shared, own = group.snapshots.get_parts(self._convert)
        position = shared["position"]
        self.state.epoch, self.state.step = position["epoch"], position["step"]
        self.state.step_in_epoch = position["step_in_epoch"]
        self.checkpointer.wait()
        if self.state.step and not self.checkpointer.is_saved(self.state):
            parts = self._name_parts(weights, shared, own)
            self.checkpointer.save(self.state, late=LateState(tuple(parts), lambda _: (parts, ())))

    def shutdown(self) -> None:
        group = None if self._group is None else self._get_ranks()
        if group is not None:
            group.leave()
        super().shutdown()
        if group is not None:
            group.close()
            group.step_snapshots.close()
        self._checkpoint_memory.close()
