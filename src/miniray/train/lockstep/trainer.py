"""``RankTrainer``: what trainers whose workers go in step have in common.

If a rank raises, dies, hangs or leaves the common way, all ranks are ended at once and the run ends
with one error: that rank's, with epoch and step. What the others then say about lost connections is
not shown. With ``max_failures`` a rank that died or hung costs the epoch it was in: all ranks are
started again with the state of the end of the last epoch. One that is lost before the first or
between two epochs, when it is set up, in an evaluation, a checkpoint or a ``call_workers``, costs
that call, which is then made again.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import miniray
from miniray.core import session
from miniray.errors import (
    ActorDiedError,
    MinirayError,
    TaskError,
    WorkerTimeoutError,
)
from miniray.train.lockstep.group import RankGroup
from miniray.train.lockstep.monitor import Watch
from miniray.train.lockstep.options import check_engine, check_options, choose_backend
from miniray.train.lockstep.process_group import GroupHost
from miniray.train.lockstep.rank import RankActor
from miniray.train.run.checkpointer import Part
from miniray.train.trainer import BaseTrainer
from miniray.train.workers.group import NO_WORKERS
from miniray.train.workers.nodes import NodeLosses

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from miniray.train.options import RunKwargs

T = TypeVar("T")


class RankTrainer(BaseTrainer, ABC):
    """See the module. A subclass says how ranks are set up and what their state is.

    The arguments are described at ``DDPTrainer``.
    """

    _kind = "ranks"
    _uses_torch = True
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
        **options: Unpack[RunKwargs],
    ) -> None:
        check_options(
            clip_norm=clip_norm,
            hang_timeout=hang_timeout,
            timeout=timeout,
            on_nonfinite=on_nonfinite,
            group_backend=group_backend,
        )
        super().__init__(num_workers, worker=worker, **options)
        shared = Part(self._shared_state, self._load_shared_state)
        self.checkpointer.register(self._kind, shared, in_workers=True)
        self.clip_norm = clip_norm
        self.failures = 0  # counted here: one rank cannot be replaced, the others wait for it
        self._on_nonfinite, self._group_backend = on_nonfinite, group_backend
        self._hang_timeout = math.inf if hang_timeout is None else hang_timeout
        self._timeout = timeout
        unseeded = random.SystemRandom().getrandbits(48)
        self._order_seed = unseeded if self.options.seed is None else self.options.seed
        self._host: GroupHost | None = None
        self._node_losses = NodeLosses()
        self._kept: dict[str, Any] | None = None  # the state to start again from
        self._retrying = False

    # -- what a subclass says ---------------------------------------------------------------------

    @abstractmethod
    def _summary(self, results: list[Any]) -> dict[str, Any]:
        """The result of an epoch from those of the ranks."""

    @abstractmethod
    def _set_up_ranks(self) -> None:
        """Bring new ranks together, by ``_meet``, as soon as nothing can keep one from coming."""

    @abstractmethod
    def _whole_weights(self) -> Any:
        """See ``model_weights``."""

    @abstractmethod
    def _shared_state(self) -> dict[str, Any]:
        """What all ranks share besides the weights."""

    def _held_by(self, rank: int) -> str | None:
        """What is lost with a rank that no other has; None where all have the same."""
        return None

    # -- an epoch ---------------------------------------------------------------------------------

    def train_epoch(self, epoch: int, **kwargs: Any) -> dict[str, Any]:
        """Train an epoch on all ranks together and aggregate what they report."""

        def attempt() -> list[Any]:
            results = self._call_ranks("run_rank_epoch", lambda _: (epoch,), epoch)
            self._keep_state()  # a rank that is lost while it gives its state costs the epoch, too
            return results

        before = self.failures
        result = self._summary(self._retried(attempt))
        if self.failures > before:
            result["restarts"] = self.failures - before
        return result

    def call_workers(
        self, method: str, /, *args: Any, epoch: int | None = None, **kwargs: Any
    ) -> list[Any]:
        def attempt() -> list[Any]:
            results = super(RankTrainer, self).call_workers(method, *args, epoch=epoch, **kwargs)
            self._keep_state()  # with what the call has changed: ranks started again have it too
            return results

        return self._retried(attempt)

    def model_weights(self) -> Any:
        """The trained weights in one piece, whichever ranks hold them."""
        return self._retried(self._whole_weights)

    def save_checkpoint(self, epoch: int | None = None) -> Path:
        save = super().save_checkpoint
        return self._retried(lambda: save(epoch))

    def save_final_model(self, path: str | Path | None = None) -> Path:
        save = super().save_final_model
        return self._retried(lambda: save(path))

    def _evaluated(self, attempt: Callable[[], T]) -> T:
        """``attempt()`` evaluates. What that changes, ranks started again have changed, too."""

        def kept() -> T:
            scores = attempt()
            if "evaluate" not in self._ranks.watched:  # the user's own, which may do anything
                self._keep_state()
            elif self._kept is not None:  # ours draws random numbers
                self._kept["own"] = self._call_ranks("get_state")
            return scores

        return self._retried(kept)

    def _epoch_for_errors(self) -> int | None:
        """The epoch that is on, or the last one; None before the first."""
        epoch = self.epoch if self.epoch < self._end else self.epoch - 1
        return epoch if epoch >= 0 else None

    def _retried(self, attempt: Callable[[], T]) -> T:
        """``attempt()``, again after all ranks were started anew, within ``max_failures``.

        Inside of another one it is made once: that one, then, is made again as a whole. What a
        rank's code raises is not tried again, in ``__init__`` neither: it would come again.
        """
        if self._retrying:
            return attempt()
        epoch, reason = self._epoch_for_errors(), ""
        while True:
            self._retrying, starting = True, bool(reason)
            try:
                if starting:
                    self._start_again(epoch, reason)
                    starting = False
                return attempt()
            except (ActorDiedError, WorkerTimeoutError) as error:
                if isinstance(error, TaskError) or getattr(error, "in_init", False):
                    raise
                same_failure = starting and self._node_losses.explain_failure()
                self.failures += not same_failure
                rank, reason = getattr(error, "rank", None), str(error)
                self.session.append_event(
                    {"event": "worker_failed", "worker": rank, "epoch": epoch, "reason": reason}
                )
                if self.failures > self.options.max_failures:
                    raise
            finally:
                self._retrying = False

    def _start_again(self, epoch: int | None, reason: str) -> None:
        """End all ranks and start them with the state that was kept last."""
        self._ranks.stop()  # whatever they are in
        self._close_host()
        self._node_losses.settle()
        self._ranks.start()
        self._set_up_ranks()
        for worker_id in range(self.num_workers):
            for callback in self.callbacks:
                callback.on_worker_replaced(self, worker_id)
        self.session.append_event({"event": "ranks_restarted", "epoch": epoch, "reason": reason})

    def _call_ranks(
        self,
        method: str,
        arguments: Callable[[int], tuple[Any, ...]] = lambda _: (),
        epoch: int | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Call a method on all ranks; results by rank."""
        return self._ranks.call(method, arguments, kwargs, epoch)

    # -- workers ----------------------------------------------------------------------------------

    def _start_engine(self) -> None:
        super()._start_engine()
        check_engine(type(self).__name__, self.num_workers)

    def _make_group(self, **options: Any) -> RankGroup:
        return RankGroup(
            **options,
            run_dir=self.session.directory.path,
            held_by=self._held_by,
            patience=self._hang_timeout,
            progress=self.options.progress,
        )

    @property
    def _ranks(self) -> RankGroup:
        """The workers; ``RuntimeError`` where there are none."""
        if not isinstance(self._group, RankGroup):
            raise RuntimeError(NO_WORKERS)
        return self._group

    def _set_up_all(self) -> None:
        # Where that was done by starting the ranks again, nothing is left to do.
        self._retried(lambda: None if self._host is not None else self._set_up_ranks())

    def _run_facts(self) -> dict[str, Any]:
        """What every rank is told of the run; see ``RunFacts``."""
        return {
            "seed": self._order_seed,
            "own_process": session.engine().capabilities.processes,
            "clip_norm": self.clip_norm,
            "on_nonfinite": self._on_nonfinite,
        }

    def _meet(self, facts: Sequence[Mapping[str, Any]], agreed: Any) -> None:
        """Bring the ranks together, with what they have agreed on, and to the state of the run."""
        ranks, hosts = self._ranks, {fact["host"] for fact in facts}
        self._host = GroupHost(
            self.num_workers,
            backend=choose_backend(self._group_backend, facts),
            name=self._kind,
            timeout=self._timeout,
            other_machines=len(hosts) > 1 or session.engine().capabilities.multi_node,
        )
        spec = self._host.spec
        ranks.watch = Watch(self._host, self._hang_timeout, ranks.run_dir)
        joined = self._call_ranks("join_group", lambda _: (spec, agreed, len(hosts) == 1))
        ranks.steps, ranks.broken = joined[0], False
        if self._kept is not None:
            self._apply(self._kept)
        elif self._loaded is None:
            self._keep_state()

    # -- state ------------------------------------------------------------------------------------

    def _restore(self, loaded: dict[str, Any]) -> None:
        restore = super()._restore
        self._retried(lambda: restore(loaded))

    def _get_shared_weights(self) -> list[Any]:
        return [self.model_weights()]

    def _load_shared_state(self, state: Mapping[str, Any]) -> None:
        shared = miniray.put(state)
        self._call_ranks("load_shared", lambda _: (shared,))
        self._keep_state()

    def _keep_state(self) -> None:
        """Fetch what a restart of the ranks would need, if there may be one."""
        if self.options.max_failures <= self.failures:
            self._kept = None
            return
        self._kept = {
            "weights": self._whole_weights(),
            "shared": self._shared_state(),
            "own": self._call_ranks("get_state"),
        }

    def _apply(self, kept: Mapping[str, Any]) -> None:
        weights, shared = miniray.put(kept["weights"]), miniray.put(kept["shared"])
        self._call_ranks("set_weights", lambda _: (weights,))
        self._call_ranks("load_shared", lambda _: (shared,))
        self._call_ranks("set_state", lambda rank: (kept["own"][rank],))

    # -- the end ----------------------------------------------------------------------------------

    def _close_host(self) -> None:
        """End the store that the ranks met at, once they are ended."""
        host, self._host = self._host, None
        if host is not None:
            host.close()

    def _abort(self, error: BaseException) -> None:
        if isinstance(self._group, RankGroup):
            self._group.broken = True
        super()._abort(error)

    def _leave_group(self) -> None:
        """Part in peace, where the ranks can. One in this very process can always: it is alone."""
        if self._ranks.broken and session.engine().capabilities.processes:
            return
        leaving = [worker.leave_group.remote() for worker in self.workers]
        try:
            miniray.get(leaving, timeout=5.0)
        except MinirayError:
            pass  # they are ended in a moment, in the group or not

    def shutdown(self) -> None:
        if self._group is not None and miniray.is_initialized():
            self._leave_group()
        super().shutdown()
        self._close_host()
