"""The shape of trainer classes, and their options as type checkers and editors see them."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

from miniray.ps import register_strategy
from miniray.ps.strategies import base
from miniray.rl import GRPOTrainer, PPOTrainer
from miniray.train import (
    BaseTrainer,
    DataParallelTrainer,
    DDPTrainer,
    ModelParallelTrainer,
    PipelineParallelTrainer,
)
from miniray.train.options import RunKwargs, RunOptions

TRAINERS = [
    *(BaseTrainer, DataParallelTrainer, DDPTrainer, PipelineParallelTrainer),
    *(ModelParallelTrainer, PPOTrainer, GRPOTrainer),
]
OPTIONS = {field.name for field in dataclasses.fields(RunOptions)}


def test_keyword_arguments_for_checkers_are_the_options():
    assert set(RunKwargs.__annotations__) == OPTIONS


@pytest.mark.parametrize("trainer", [t for t in TRAINERS if t is not DataParallelTrainer])
def test_editors_see_all_options(trainer):
    """At run time; ``tests/typing`` checks what type checkers see."""
    parameters = inspect.signature(trainer).parameters
    assert set(parameters) >= OPTIONS
    assert parameters["keep_last"].default == 3


def test_data_parallel_trainer_accepts_options_of_strategies():
    kinds = [p.kind for p in inspect.signature(DataParallelTrainer).parameters.values()]
    assert inspect.Parameter.VAR_KEYWORD in kinds


@pytest.mark.parametrize("trainer", TRAINERS)
def test_trainers_are_at_most_three_classes_deep(trainer):
    assert len(trainer.__mro__) - 1 <= 3  # without object


@pytest.mark.parametrize(
    "create",
    [
        lambda name, **options: DataParallelTrainer(2, sync_strategy=name, **options),
        lambda name, **options: PPOTrainer(
            int, int, [{}] * 8, sync="weights", sync_strategy=name, **options
        ),
    ],
)
def test_strategy_with_the_name_of_a_trainer_option_raises(create, monkeypatch):
    monkeypatch.setattr(base, "_strategies", dict(base._strategies))

    @register_strategy("seeded")
    class Seeded(base.Strategy):
        def __init__(self, *, seed=0):
            self.seed = seed

        def combine(self, workers, weights, current):
            return workers[0]

    with pytest.raises(TypeError, match=r"'seeded'.*'seed'"):
        create("seeded", seed=1)
