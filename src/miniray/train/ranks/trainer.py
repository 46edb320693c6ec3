"""``RankTrainer``: what trainers whose workers go in step have in common.

If a rank raises, dies, hangs or leaves the common way, all ranks are ended at once and the run ends
with one error: that rank's, with epoch and step. What the others then say about lost connections is
not shown. With ``max_failures`` a rank that died or hung costs the epoch it was in: all ranks are
started again with the state of the end of the last epoch.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import miniray
from miniray.core import session
from miniray.errors import (
    ActorDiedError,
    CapabilityError,
    MinirayError,
    TaskError,
    WorkerTimeoutError,
)
from miniray.train import resume as resuming
from miniray.train.arguments import check_choices
from miniray.train.base import BaseTrainer
from miniray.train.group import GroupHost
from miniray.train.ranks.calls import StepBar, call_ranks
from miniray.train.ranks.watch import Watch

T = TypeVar("T")

_CHOICES = {"on_nonfinite": ("error", "ignore"), "group_backend": ("auto", "gloo", "nccl")}


class RankTrainer(BaseTrainer, ABC):
    """See the module. A subclass says how ranks are set up and what their state is.

    The arguments are described at ``DDPTrainer``.
    """

    #: What the group of ranks is called in error messages.
    _group_name = "ranks"

    def __init__(
        self,
        num_workers: int,
        *,
        worker: Any = None,
        clip_norm: float | None = None,
        on_nonfinite: str = "error",
        group_backend: str = "auto",
        hang_timeout: float = 60.0,
        timeout: float = 600.0,
        max_failures: int = 0,
        **options: Any,
    ) -> None:
        check_choices(_CHOICES, on_nonfinite=on_nonfinite, group_backend=group_backend)
        if clip_norm is not None and not clip_norm > 0:
            raise ValueError(f"clip_norm must be a number > 0 or None, not {clip_norm!r}")
        for name, limit in (("hang_timeout", hang_timeout), ("timeout", timeout)):
            if not limit > 0:
                raise ValueError(f"{name} must be a number of seconds > 0, not {limit!r}")
        # Failures are counted here: one worker cannot be replaced while the others wait for it.
        super().__init__(num_workers, worker=worker, max_failures=0, **options)
        self.clip_norm = clip_norm
        self.failures = 0
        self._most_failures = max_failures
        self._on_nonfinite, self._group_backend = on_nonfinite, group_backend
        self._hang_timeout, self._timeout = hang_timeout, timeout
        self._order_seed = random.SystemRandom().getrandbits(48) if self._seed is None else None
        self._host: GroupHost | None = None
        self._watch: Watch | None = None
        self._steps: int | None = None
        self._kept: dict[str, Any] | None = None  # the state to start again from
        self._broken = False

    # -- what a subclass says ---------------------------------------------------------------------

    @abstractmethod
    def _summary(self, results: list[Any]) -> dict[str, Any]:
        """The result of an epoch from those of the ranks."""

    @abstractmethod
    def _shared_state(self) -> dict[str, Any]:
        """What all ranks share besides the weights."""

    def _held_by(self, rank: int) -> str | None:
        """What is lost with a rank that no other has; None where all have the same."""
        return None

    # -- an epoch ---------------------------------------------------------------------------------

    def train_epoch(self, epoch: int, **kwargs: Any) -> dict[str, Any]:
        """Train an epoch on all ranks together and aggregate what they report."""
        before = self.failures
        results = self._retried(
            epoch, lambda: self._call_ranks("_rank_epoch", lambda _: (epoch,), epoch, watched=True)
        )
        result = self._summary(results)
        if self.failures > before:
            result["restarts"] = self.failures - before
        self._keep_state()
        return result

    def _epoch_for_errors(self) -> int | None:
        return self.epoch if self.history or self.epoch else None

    def _retried(self, epoch: int | None, attempt: Callable[[], T]) -> T:
        """``attempt()``, again after all ranks were started anew, within ``max_failures``."""
        ready = True
        while True:
            try:
                if not ready:
                    self._start_again(epoch)
                return attempt()
            except (ActorDiedError, WorkerTimeoutError) as error:
                ready = False
                self.failures += 1
                rank, reason = getattr(error, "rank", None), str(error)
                self._on_worker_event(
                    {"event": "worker_failed", "worker": rank, "epoch": epoch, "reason": reason}
                )
                if isinstance(error, TaskError) or self.failures > self._most_failures:
                    raise

    def _on_group_event(self, event: dict[str, Any]) -> None:
        """Nothing: who fails and is started again is said here, of all ranks together."""

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
        arguments: Callable[[int], tuple[Any, ...]] = lambda _: (),
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
        except BaseException as error:
            self._broken = True
            rank, lost = getattr(error, "rank", None), (ActorDiedError, WorkerTimeoutError)
            held = None if rank is None else self._held_by(rank)
            if held is None or not isinstance(error, lost) or isinstance(error, TaskError):
                raise
            told = type(error)(f"{held}: {error}")
            vars(told).update(vars(error))
            raise told from None

    # -- workers ----------------------------------------------------------------------------------

    def _start_engine(self) -> None:
        super()._start_engine()
        engine = session.engine()
        if self.num_workers > 1 and not engine.capabilities.processes:
            raise CapabilityError(
                f"{type(self).__name__} needs a process for each of its {self.num_workers} "
                f"workers, which the {engine.name!r} engine does not have; use backend='local' or "
                "'ray', or num_workers=1"
            )

    def _run_facts(self) -> dict[str, Any]:
        """What every rank is told of the run; see ``RunFacts``."""
        assert self.run is not None
        return {
            "seed": self._order_seed if self._seed is None else self._seed,
            "run_dir": str(self.run.path.absolute()),
            "attempt": self.failures,
            "own_process": session.engine().capabilities.processes,
        }

    def _meet(self, facts: Sequence[Mapping[str, Any]], agreed: Any) -> None:
        """Bring the ranks together, with what they have agreed on, and to the state of the run."""
        assert self.run is not None
        hosts = {fact["host"] for fact in facts}
        self._host = GroupHost(
            self.num_workers,
            backend=choose_backend(self._group_backend, facts),
            name=self._group_name,
            timeout=self._timeout,
            other_machines=len(hosts) > 1 or session.engine().capabilities.multi_node,
        )
        spec = self._host.spec
        self._watch = Watch(self._host, self._hang_timeout, self.run.path)
        joined = self._call_ranks("_rank_join", lambda _: (spec, agreed, len(hosts) == 1))
        self._steps = joined[0]
        if self._kept is not None:
            self._apply(self._kept)
        elif self._loaded is None:
            self._keep_state()

    # -- state ------------------------------------------------------------------------------------

    def _take_up(self, state: dict[str, Any]) -> None:
        def take_up() -> None:
            resuming.apply(self, state)

        self._retried(self._epoch_for_errors(), take_up)

    def _give(self, method: str, values: Mapping[int, Any]) -> None:
        if len(values) == self.num_workers:
            self._call_ranks(method, lambda rank: (values[rank],))
        else:
            super()._give(method, values)

    def _workers_in_sync(self) -> bool:
        return True

    def _extra_state(self) -> dict[str, Any]:
        return {self._group_name: self._shared_state()}

    def _load_extra_state(self, state: Mapping[str, Any]) -> None:
        shared = miniray.put(state[self._group_name])
        self._call_ranks("_rank_load_shared", lambda _: (shared,))
        self._keep_state()

    def _keep_state(self) -> None:
        """Fetch what a restart of the ranks would need, if there may be one."""
        if self._most_failures <= self.failures:
            self._kept = None
            return
        self._kept = {
            "weights": self.model_weights(),
            "shared": self._shared_state(),
            "own": self._call_ranks("get_state"),
        }

    def _apply(self, kept: Mapping[str, Any]) -> None:
        weights, shared = miniray.put(kept["weights"]), miniray.put(kept["shared"])
        self._call_ranks("set_weights", lambda _: (weights,))
        self._call_ranks("_rank_load_shared", lambda _: (shared,))
        self._call_ranks("set_state", lambda rank: (kept["own"][rank],))

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
        leaving = [worker._rank_leave.remote() for worker in self.workers]
        try:
            miniray.get(leaving, timeout=5.0)
        except MinirayError:
            pass  # they are ended in a moment, in the group or not

    def shutdown(self) -> None:
        if self._group is not None and miniray.is_initialized():
            self._leave_group()
        super().shutdown()
        self._close_group()


def choose_backend(wanted: str, facts: Sequence[Mapping[str, Any]]) -> str:
    """NCCL where every rank has a GPU that no other has, else gloo; or what the user wants."""
    if wanted != "auto":
        return wanted
    gpus = {(fact["host"], fact["gpu"]) for fact in facts if fact["gpu"] is not None}
    return "nccl" if len(gpus) == len(facts) else "gloo"
