"""``DDPTrainer``: gradients averaged over all workers in every step, by torch's own DDP.

If a rank raises, dies, hangs or leaves the common way, all ranks are ended at once and the run ends
with one error: that rank's, with epoch and step. What the others then say about lost connections is
not shown. With ``max_failures`` a rank that died or hung costs the epoch it was in: all ranks are
started again with the state of the end of the last epoch.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import miniray
from miniray.core import session
from miniray.core.remote import adapting
from miniray.errors import (
    ActorDiedError,
    CapabilityError,
    MinirayError,
    TaskError,
    WorkerTimeoutError,
)
from miniray.train import ddp_setup as setup
from miniray.train.base import BaseTrainer
from miniray.train.ddp_calls import StepBar, call_ranks
from miniray.train.ddp_watch import Watch
from miniray.train.ddp_worker import rank_spec
from miniray.train.group import GroupHost
from miniray.train.results import aggregate

T = TypeVar("T")


class DDPTrainer(BaseTrainer):
    """Trains one model on several workers with gradients averaged in every step.

    The worker has ``self.model``, ``self.optimizer``, ``self.train_loader`` and a
    ``training_step(batch, batch_idx)`` that returns the loss (a mean over the batch) or a dict with
    it; with ``self.val_loader`` and ``validation_step`` it can be evaluated. Or it is a worker of
    the parameter-server trainer, with ``train_epoch`` and ``self.model``: then the model's backward
    pass averages gradients, and nothing else changes.

    Args:
        num_workers: how many. ``batch_size`` of the loader is per worker.
        worker: a class, decorated with ``@miniray.remote`` or not; or override ``create_worker``.
        uneven: what to do when samples do not divide by workers. ``"join"``: every sample once,
            weighted so that each counts the same; workers that run out early keep the others
            company (``DDP.join``). ``"pad"``: some samples twice. ``"drop"``: some not at all.
            ``"error"``: refuse to begin.
        accumulate: micro-batches in an optimizer step.
        precision: ``"fp32"``, ``"bf16"`` or ``"fp16"`` (with a gradient scaler).
        clip_norm: largest norm of the gradients of all parameters together.
        compile: ``torch.compile`` the model: True, a backend's name, or a dict of its options.
        on_nonfinite: ``"error"``: a loss that is NaN or infinite ends the run; or ``"ignore"``.
        models: attributes of the worker to average gradients of; for loops of one's own.
        group_backend: ``"gloo"``, ``"nccl"``, or ``"auto"``: NCCL where each worker has a GPU of
            its own, else gloo.
        hang_timeout: seconds in which no rank moves and the one that is waited for is idle; then
            the run ends and says which, and where.
        timeout: seconds the ranks wait for one another in a collective or barrier at most.
        max_failures: how often the ranks are started again after one died or hung. Then the state
            of the run is kept on the driver after each epoch.
        find_unused_parameters, bucket_cap_mb, broadcast_buffers, gradient_as_bucket_view,
            static_graph: go to DistributedDataParallel.

    All other arguments are those of ``BaseTrainer``.
    """

    def __init__(
        self,
        num_workers: int = 4,
        *,
        worker: Any = None,
        uneven: str = "join",
        accumulate: int = 1,
        precision: str = "fp32",
        clip_norm: float | None = None,
        compile: bool | str | Mapping[str, Any] = False,
        on_nonfinite: str = "error",
        models: Sequence[str] = ("model",),
        group_backend: str = "auto",
        hang_timeout: float = 60.0,
        timeout: float = 600.0,
        max_failures: int = 0,
        **kwargs: Any,
    ) -> None:
        names = inspect.signature(BaseTrainer.__init__).parameters
        ddp_options = {k: kwargs.pop(k) for k in setup.DDP_OPTIONS if k in kwargs}
        unknown = [name for name in kwargs if name not in names]
        if unknown:
            raise TypeError(f"DDPTrainer() does not know {', '.join(unknown)}")
        setup.check_arguments(
            uneven=uneven,
            precision=precision,
            on_nonfinite=on_nonfinite,
            group_backend=group_backend,
            accumulate=accumulate,
            clip_norm=clip_norm,
            hang_timeout=hang_timeout,
            timeout=timeout,
            models=models,
        )
        if inspect.isclass(worker):
            worker = miniray.remote(worker)
        # Failures are counted here: one worker cannot be replaced while the others wait for it.
        super().__init__(num_workers, worker=worker, max_failures=0, **kwargs)
        self.uneven, self.accumulate, self.precision = uneven, accumulate, precision
        self.clip_norm = clip_norm
        self.failures = 0
        self._most_failures = max_failures
        self._compile, self._on_nonfinite, self._models = compile, on_nonfinite, tuple(models)
        self._group_backend, self._ddp_options = group_backend, ddp_options
        self._hang_timeout, self._timeout = hang_timeout, timeout
        self._shuffle_seed = random.SystemRandom().getrandbits(48) if self._seed is None else None
        self._host: GroupHost | None = None
        self._watch: Watch | None = None
        self._steps: int | None = None
        self._kept: dict[str, Any] | None = None  # the state to start again from
        self._broken = False

    # -- an epoch ---------------------------------------------------------------------------------

    def train_epoch(self, epoch: int, **kwargs: Any) -> dict[str, Any]:
        """Train an epoch on all ranks together and aggregate what they report."""
        before = self.failures
        results = self._retried(
            epoch, lambda: self._call_ranks("_ddp_epoch", lambda _: (epoch,), epoch, watched=True)
        )
        result = aggregate(results)
        if self.failures > before:
            result["restarts"] = self.failures - before
        self._keep_state()
        return result

    def evaluate(self, data: Any = None, **kwargs: Any) -> dict[str, Any]:
        """Evaluate on all workers, every sample exactly once; see ``miniray.train.evaluate``.

        No collective is called, so workers may have different numbers of samples, or none.
        """
        if self._group is None:
            raise RuntimeError("there are no workers before train()")
        epoch = self.epoch if self.history or self.epoch else None
        # Not super() inside of the lambda: it would not know where it is.
        evaluate = super().evaluate
        return self._retried(epoch, lambda: evaluate(data, **kwargs))

    def _retried(self, epoch: int | None, attempt: Callable[[], T]) -> T:
        """``attempt()``, again after all ranks were started anew, within ``max_failures``."""
        while True:
            try:
                return attempt()
            except (ActorDiedError, WorkerTimeoutError) as error:
                self.failures += 1
                rank, reason = getattr(error, "rank", None), str(error)
                self._on_worker_event(
                    {"event": "worker_failed", "worker": rank, "epoch": epoch, "reason": reason}
                )
                if isinstance(error, TaskError) or self.failures > self._most_failures:
                    raise
                self._start_again(epoch)

    def _start_again(self, epoch: int | None) -> None:
        """End all ranks and start them with the state that was kept last."""
        assert self._group is not None
        self._end_ranks()
        self._group.start()
        self._set_up_all()
        for worker_id in range(self.num_workers):
            for callback in self.callbacks:
                callback.on_worker_replaced(self, worker_id)
        self._on_worker_event({"event": "ranks_restarted", "epoch": epoch})

    def _call_ranks(
        self,
        method: str,
        arguments: Callable[[int], tuple[Any, ...]],
        epoch: int | None = None,
        *,
        kwargs: Mapping[str, Any] | None = None,
        watched: bool = False,
    ) -> list[Any]:
        """Call a method on all ranks; after an error they are of no use any more."""
        assert self._group is not None
        try:
            return call_ranks(
                self._group,
                method,
                arguments,
                kwargs or {},
                epoch=epoch,
                limit=self._worker_timeout,
                watch=self._watch if watched else None,
                bar=StepBar(epoch or 0, self._steps, watched and self._progress),
            )
        except BaseException:
            self._broken = True
            raise

    # -- workers ----------------------------------------------------------------------------------

    def _start_engine(self) -> None:
        super()._start_engine()
        engine = session.engine()
        if self.num_workers > 1 and not engine.capabilities.processes:
            raise CapabilityError(
                f"DDPTrainer needs a process for each of its {self.num_workers} workers, which the "
                f"{engine.name!r} engine does not have; use backend='local' or 'ray', or "
                "num_workers=1"
            )

    def _create(self, worker_id: int) -> Any:
        with adapting(rank_spec):
            return super()._create(worker_id)

    def _set_up_all(self) -> None:
        """Data, then what all must agree on, then the group: in this order nobody can hang."""
        assert self._group is not None
        group = self._group
        self._broken = False
        if not group.has("training_step") and not group.has("train_epoch"):
            raise TypeError(
                f"worker class {self.workers[0]._info.class_name} has neither "
                "training_step(batch, batch_idx) nor train_epoch(epoch)"
            )
        if group.has("load_data_shard"):
            count = self.num_workers
            self._call_ranks("load_data_shard", lambda i: (i, count), kwargs=self._kwargs)
        settings = self._rank_settings()
        facts = self._call_ranks("_ddp_prepare", lambda i: (i, self.num_workers, settings))
        if not facts[0]["steps"]:
            setup.refuse_step_options(self)
        counts = setup.agree(facts, self.accumulate, self.uneven)
        hosts = [fact["host"] for fact in facts]
        self._host = GroupHost(
            self.num_workers,
            backend=setup.choose_backend(self._group_backend, facts),
            name="ddp",
            timeout=self._timeout,
            other_machines=len(set(hosts)) > 1 or session.engine().capabilities.multi_node,
        )
        spec = self._host.spec
        assert self.run is not None
        self._watch = Watch(self._host, self._hang_timeout, self.run.path)
        joined = self._call_ranks("_ddp_join", lambda _: (spec, counts, len(set(hosts)) == 1))
        self._steps = joined[0]
        if self._kept is not None:
            self._apply(self._kept)
        elif self._loaded is None:
            self._keep_state()

    def _rank_settings(self) -> Any:
        from miniray.train.ddp_loop import StepOptions
        from miniray.train.ddp_rank import RankSettings

        assert self.run is not None
        return RankSettings(
            steps=StepOptions(
                accumulate=self.accumulate,
                precision=self.precision,
                clip_norm=self.clip_norm,
                on_nonfinite=self._on_nonfinite,
                find_unused_parameters=bool(self._ddp_options.get("find_unused_parameters")),
            ),
            models=self._models,
            uneven=self.uneven,
            seed=self._shuffle_seed if self._seed is None else self._seed,  # type: ignore[arg-type]
            compile=self._compile,
            ddp_options=self._ddp_options,
            run_dir=str(self.run.path.absolute()),
            attempt=self.failures,
            own_process=session.engine().capabilities.processes,
        )

    # -- state ------------------------------------------------------------------------------------

    def _workers_in_sync(self) -> bool:
        return True

    def _extra_state(self) -> dict[str, Any]:
        return {"ddp": miniray.get(self.workers[0]._ddp_shared_state.remote())}

    def _load_extra_state(self, state: Mapping[str, Any]) -> None:
        shared = miniray.put(state["ddp"])
        self._call_ranks("_ddp_load_shared", lambda _: (shared,))
        self._keep_state()

    def _keep_state(self) -> None:
        """Fetch what a restart of the ranks would need, if there may be one."""
        if self._most_failures <= self.failures:
            self._kept = None
            return
        assert self._group is not None
        self._kept = {
            "weights": self.model_weights(),
            "shared": miniray.get(self.workers[0]._ddp_shared_state.remote()),
            "own": miniray.get([worker.get_state.remote() for worker in self.workers]),
        }

    def _apply(self, kept: Mapping[str, Any]) -> None:
        weights, shared = miniray.put(kept["weights"]), miniray.put(kept["shared"])
        self._call_ranks("set_weights", lambda _: (weights,))
        self._call_ranks("_ddp_load_shared", lambda _: (shared,))
        self._call_ranks("set_state", lambda rank: (kept["own"][rank],))

    def _describe(self) -> dict[str, Any]:
        return {
            **super()._describe(),
            "uneven": self.uneven,
            "accumulate": self.accumulate,
            "precision": self.precision,
            "clip_norm": self.clip_norm,
            "ddp_options": dict(self._ddp_options),
        }

    # -- the end ----------------------------------------------------------------------------------

    def _end_ranks(self) -> None:
        """End the ranks' processes, whatever they are in, and the store they met at."""
        assert self._group is not None
        self._group.stop()
        self._close_group()

    def _close_group(self) -> None:
        host, self._host, self._watch = self._host, None, None
        if host is not None:
            host.close()

    def _abort(self, error: BaseException) -> None:
        self._broken = True
        super()._abort(error)

    def _leave_group(self) -> None:
        """Part in peace, where the ranks can. One in this very process can always: it is alone."""
        if self._broken and session.engine().capabilities.processes:
            return
        leaving = [worker._ddp_leave.remote() for worker in self.workers]
        try:
            miniray.get(leaving, timeout=5.0)
        except MinirayError:
            pass  # they are ended in a moment, in the group or not

    def shutdown(self) -> None:
        if self._group is not None and miniray.is_initialized():
            self._leave_group()
        super().shutdown()
        self._close_group()
