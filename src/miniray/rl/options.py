"""Check the options of RL trainers, and name the class that a misplaced option belongs to."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from miniray.checks import check_options, get_options
from miniray.rl.config import Algorithm, KLPenalty, Sampling
from miniray.train.data_parallel import (
    DataParallelTrainer,
    check_trainer_options,
    find_strategies,
)
from miniray.train.options import RunKwargs, RunOptions

if TYPE_CHECKING:
    from miniray.ps import Strategy


class RLKwargs(RunKwargs, total=False):
    """Keyword arguments of RL trainers, besides the parameters in their signature.

    Options that aren't in ``RunKwargs`` need ``sync="weights"``. Pass the options of a custom
    strategy to the strategy: ``sync_strategy=MyStrategy(option=...)``.
    """

    sync_interval: int
    sync_strategy: str | Strategy
    initial_sync: bool
    on_nonfinite: Literal["error", "skip"]
    momentum: float
    decay: float
    trim: float
    lr: float
    beta_1: float
    beta_2: float
    tau: float
    num_byzantine: int
    num_selected: int


#: Options of ``DataParallelTrainer`` that RL trainers have with ``sync="weights"``.
_SYNC_OPTIONS = frozenset(
    ("sync_interval", "sync_strategy", "initial_sync", "on_nonfinite", "staleness_power")
)


def get_hints(config: type[Algorithm]) -> Mapping[str, str]:
    """Return hints by option name, for options that a trainer with this config doesn't have."""
    calls = {
        KLPenalty: f"{config.__name__}(kl=KLPenalty({{}}=...))",
        Sampling: "sampling=Sampling({}=...)",
        config: f"{config.__name__}({{}}=...)",
    }
    fields = {
        field.name: f"Pass {call.format(field.name)}."
        for owner, call in calls.items()
        for field in dataclasses.fields(owner)
    }
    return {
        **fields,
        **dict.fromkeys(("steps", "max_steps", "max_epochs"), "Pass train(steps=...)."),
        "epochs": f"Pass train(steps=...), or {config.__name__}(epochs=...) to use the responses "
        "of a step more than once.",
        "learning_rate": fields["lr"],
        "batch_size": fields["prompts_per_step"],
        "max_tokens": fields["max_new_tokens"],
        "model": "Pass a function that creates the model as policy=.",
        "worker": "Derive from RLWorker and set worker_class in a subclass of the trainer.",
    }


def check_trainer_kwargs(
    trainer: type, sync: str, kwargs: Mapping[str, Any], hints: Mapping[str, str]
) -> None:
    """Raise ``TypeError`` if the trainer doesn't have one of the options with this ``sync``."""
    if sync != "grad":
        strategy = kwargs.get("sync_strategy", "average")
        others = get_options(DataParallelTrainer) - get_options(trainer) - _SYNC_OPTIONS - {"mode"}
        not_here = dict.fromkeys(others, "Pass it to DataParallelTrainer.")
        check_trainer_options(trainer, strategy, kwargs, {**not_here, **hints})
        return
    known = (get_options(trainer) - set(hints)) | {"mode"}
    unknown = [name for name in kwargs if name not in known]
    uses = {**dict.fromkeys(_SYNC_OPTIONS, ""), **find_strategies(unknown)}
    needs_weights = {name: f'It needs sync="weights". {use}'.strip() for name, use in uses.items()}
    check_options(trainer.__name__, unknown, known, {**needs_weights, **hints})


def split_trainer_kwargs(options: Mapping[str, Any]) -> tuple[RunKwargs, dict[str, Any]]:
    """Return the options of ``BaseTrainer`` and those of ``SyncPolicy``."""
    run_options, rest = RunOptions.split(options)
    names = {"sync_interval": "interval", "sync_strategy": "strategy"}
    names |= {name: name for name in ("initial_sync", "mode")}
    sync_options = {new: rest.pop(name) for name, new in names.items() if name in rest}
    sync_options["server_options"] = rest
    return run_options, sync_options  # type: ignore[return-value]
