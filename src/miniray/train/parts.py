"""``TrainerParts``: how a class of trainers differs from ``BaseTrainer``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from miniray.train.run.result import TrainResult
from miniray.train.run.state import TrainState
from miniray.train.steps import FindStepProblem, StepOptions
from miniray.train.train_kwargs import KwargRules
from miniray.train.worker_factory import ActorSettings
from miniray.train.workers.checkpoint_parts import WeightSync, WorkerCheckpoints
from miniray.train.workers.group import WorkerGroup, WorkerSetup


def find_step_problem(worker_class: Any, group: Any) -> str | None:
    """Return what a trainer of workers with ``train_epoch`` lacks to count steps."""
    del worker_class, group
    return (
        "workers that train step by step: with train_epoch, the steps are the workers' own. Pass "
        "epochs, or use DDPTrainer with training_step or DataParallelTrainer with train_steps"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainerParts:
    """The parts that ``BaseTrainer`` gets from a class of trainers, such as ``DDPTrainer``.

    Attributes:
        kind: Trainers of one kind can load each other's checkpoints.
        unit: Unit of the progress bar. ``"step"``: each epoch is one step.
        kwargs: Which keyword arguments ``train()`` accepts.
        actors: How the processes of workers are set up.
        setups: Prepare each worker, in this order.
        group_class: The class of the workers' group.
        sync: Keeps the weights of the workers equal.
        checkpoints: The state of the workers in checkpoints. By default, ``WorkerCheckpoints``.
        step_options: Options of trainers that count steps.
        find_step_problem: Returns why the trainer counts no steps.
        check_validation: Validates on a few batches before the first step, with the group.
        get_result: Returns the class of the result of a run, and its further fields.
    """

    kind: str = "workers"
    unit: Literal["epoch", "step"] = "epoch"
    kwargs: KwargRules = dataclasses.field(default_factory=KwargRules)
    actors: ActorSettings = dataclasses.field(default_factory=ActorSettings)
    setups: Sequence[WorkerSetup] = ()
    group_class: Callable[..., WorkerGroup] = WorkerGroup
    sync: WeightSync = dataclasses.field(default_factory=WeightSync)
    checkpoints: WorkerCheckpoints | None = None
    step_options: StepOptions = dataclasses.field(default_factory=StepOptions)
    find_step_problem: FindStepProblem = find_step_problem
    check_validation: Callable[[Any], None] = lambda group: None
    get_result: Callable[[], tuple[type[TrainResult], Mapping[str, Any]]] = lambda: (
        TrainResult,
        {},
    )

    def create_result(
        self, state: TrainState, wall_time: float, run_dir: Path, checkpoint: Path | None
    ) -> TrainResult:
        """Return the result of a run at ``state``."""
        result_class, fields = self.get_result()
        self.sync.pause()  # after an early stop, asynchronous workers may be an epoch ahead
        return result_class(
            history=state.history,
            epochs=state.epoch,
            unit=self.unit,
            wall_time=wall_time,
            sync=self.sync.get_stats(),
            run_dir=run_dir,
            checkpoint=checkpoint,
            **fields,
        )
