"""Options that all lock-step trainers share, and their checks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from miniray.checks import check_choice, check_int, check_number
from miniray.core import session
from miniray.errors import CapabilityError
from miniray.train.lockstep.schedule import StepSchedule
from miniray.train.options import check_seconds
from miniray.train.run.state import TrainTarget
from miniray.train.workers.budget import FailureBudget, WorldSize

if TYPE_CHECKING:
    from miniray.train.lockstep.context import RankContext, WorkerTraits
    from miniray.train.worker_factory import WorkerFactory


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Settings of a run that every rank gets; subclasses add those of their trainer.

    ``own_process``: the process belongs to the rank, and ``workers.process`` has set it up.
    ``overfits``: every epoch has the same batches, in order.
    ``target``, ``position``: where the current ``train`` ends, and the ``RankState`` at its start.
    ``schedule_steps``: the steps for which ranks before a restart created their schedulers.
    """

    seed: int = 0
    own_process: bool = True
    clip_norm: float | None = None
    on_nonfinite: str = "error"
    step_schedule: StepSchedule = dataclasses.field(default_factory=StepSchedule)
    limit_train_batches: int | None = None
    limit_val_batches: int | None = None
    overfits: bool = False
    target: TrainTarget = dataclasses.field(default_factory=TrainTarget)
    position: Mapping[str, int] = dataclasses.field(default_factory=dict)
    schedule_steps: int | None = None

    def create_replica(self, user: Any, traits: WorkerTraits, context: RankContext) -> Any:
        """Return the ``Replica`` of a rank that holds ``user``. Called in its process."""
        raise NotImplementedError


#: Why ``on_nonfinite="skip"``, which parameter sync has, is missing here.
_NO_SKIP = (
    "Ranks average their gradients in every step, so none of them can be left out. With "
    'precision="fp16", the gradient scaler skips such steps on all ranks.'
)


def check_options(
    *, clip_norm: Any, hang_timeout: Any, timeout: Any, on_nonfinite: str, group_backend: str
) -> None:
    """Raise ``ValueError`` for invalid options of ``LockstepTrainer``."""
    check_choice("on_nonfinite", on_nonfinite, ("error", "ignore"), {"skip": _NO_SKIP})
    check_choice("group_backend", group_backend, ("auto", "gloo", "nccl"))
    if clip_norm is not None:
        check_number("clip_norm", clip_norm, 0, open_low=True)
    check_seconds("hang_timeout", hang_timeout)
    if timeout is None or check_seconds("timeout", timeout) == math.inf:
        raise ValueError(f"timeout must be a number of seconds > 0, not {timeout!r}")


def check_snapshot_every(value: Any) -> int | Literal["auto"] | None:
    """Return the option ``snapshot_every``. Raise ``ValueError`` if it is invalid."""
    if value is None or value == "auto":
        return value  # type: ignore[no-any-return]
    return check_int("snapshot_every", value, 1, ', "auto" or None')


def check_engine(trainer: str, num_workers: int) -> None:
    """Raise ``CapabilityError`` if the engine has no process for each of the workers."""
    engine = session.engine()
    if num_workers > 1 and not engine.capabilities.processes:
        raise CapabilityError(
            f"{trainer} needs a process for each of its {num_workers} workers, which the "
            f"{engine.name!r} engine does not have; use backend='local' or 'ray', or num_workers=1"
        )


def create_limits(
    factory: WorkerFactory, num_workers: int, min_workers: int | None, max_failures: int
) -> tuple[FailureBudget, WorldSize]:
    """Return what decides how many losses are repaired, and on how many ranks a run continues."""
    if min_workers is None:
        return FailureBudget(max_failures), WorldSize()
    if factory.is_overridden:
        raise ValueError(
            "min_workers needs worker=, because the trainer must know which resources a worker "
            "reserves. Pass them with resources_per_worker="
        )
    # Each worker that may be dropped is lost twice at most before that.
    budget = FailureBudget(max_failures or 2 * (num_workers - min_workers))
    return budget, WorldSize(num_workers, min_workers, factory.count_room)


def find_step_problem(worker_class: Any, group: Any) -> str | None:
    """Return what ranks lack to stop at a step; None if they know the steps of an epoch."""
    del worker_class
    if group is None or group.knows_steps:
        return None
    return (
        "workers with training_step(batch, batch_idx) and a train_loader that has a length. With "
        "train_epoch, the steps are the workers' own"
    )


def choose_backend(wanted: str, facts: Sequence[Mapping[str, Any]]) -> str:
    """Return the backend that the user chose, or NCCL if every rank has its own GPU, else gloo."""
    if wanted != "auto":
        return wanted
    gpus = {(fact["host"], fact["gpu"]) for fact in facts if fact["gpu"] is not None}
    return "nccl" if len(gpus) == len(facts) else "gloo"
