"""The shape of trainer classes, and their options as type checkers and editors see them."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import sys
import textwrap

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
#: The private methods of ``BaseTrainer`` that other trainers may override: docs/architecture.md.
OVERRIDABLE = {"_describe", "_create_group", "_finish_epoch"}


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


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def list_private_names(cls):
    """Return the private names that a class defines, or assigns to ``self``."""
    names = {name for name in vars(cls) if is_private(name)}
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(cls)))):
        is_assigned = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if is_assigned and isinstance(node.value, ast.Name) and node.value.id == "self":
            names |= {node.attr} if is_private(node.attr) else set()
    return names


def find_shared_names(cls):
    """Return the private names that more than one class of a trainer defines or assigns."""
    owners = [list_private_names(base) for base in cls.__mro__ if base is not object]
    return {name for i, names in enumerate(owners) for name in names & set().union(*owners[:i])}


@pytest.mark.parametrize("trainer", TRAINERS)
def test_only_three_private_methods_are_overridden(trainer):
    assert find_shared_names(trainer) <= OVERRIDABLE


@pytest.mark.parametrize("change", ["def _request_stop(self): ...", "_target = None", "assign"])
def test_a_fourth_private_override_is_found(change, tmp_path, monkeypatch):
    if change == "assign":
        change = "def train_epoch(self, epoch):\n        self._group, self.x = None, 1"
    code = f"from miniray.train import BaseTrainer\n\nclass Changed(BaseTrainer):\n    {change}\n"
    (tmp_path / "changed_trainer.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "changed_trainer", raising=False)
    changed = importlib.import_module("changed_trainer").Changed
    assert len(find_shared_names(changed)) == 1


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
