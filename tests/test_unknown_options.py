"""Public classes name the option, class or call that was probably meant."""

from __future__ import annotations

import inspect
import pickle

import pytest

from miniray.checks import get_options
from miniray.data import (
    ArrowDataset,
    DataLoader,
    IndexedDataset,
    JsonlDataset,
    Mixture,
    ParquetDataset,
    RLHFDataset,
)
from miniray.data.rlhf.config import RLHFConfig
from miniray.data.torch import LightningLoader, ShardSampler, TorchDataset, TorchIterableDataset
from miniray.rl import GRPOConfig, GRPOTrainer, KLPenalty, PPOConfig, PPOTrainer, Sampling
from miniray.train import (
    BaseTrainer,
    Checkpoint,
    CSVLogger,
    DataParallelTrainer,
    DDPTrainer,
    EarlyStopping,
    LRSchedule,
    MLflowLogger,
    ModelParallelTrainer,
    PipelineParallelTrainer,
    TensorBoardLogger,
)

ROWS = [{"prompt": "1+1="}]


def make_dataset():
    return IndexedDataset([{"a": 1}] * 4)


def make_policy():
    raise AssertionError


def reward(row, response):
    return 0.0


#: Classes, and the positional arguments they need.
CLASSES = {
    BaseTrainer: (),
    DataParallelTrainer: (),
    DDPTrainer: (),
    PipelineParallelTrainer: (),
    ModelParallelTrainer: (),
    PPOTrainer: (make_policy, reward, ROWS),
    GRPOTrainer: (make_policy, reward, ROWS),
    PPOConfig: (),
    GRPOConfig: (),
    KLPenalty: (),
    Sampling: (),
    RLHFConfig: (),
    Checkpoint: (),
    EarlyStopping: (),
    LRSchedule: (abs,),
    CSVLogger: (),
    TensorBoardLogger: (),
    MLflowLogger: (),
    DataLoader: (make_dataset(), 2),
    ParquetDataset: ("missing.parquet",),
    JsonlDataset: ("missing.jsonl",),
    ArrowDataset: ({"a": [1]},),
    IndexedDataset: ([{"a": 1}],),
    Mixture: ([(make_dataset(), 1.0)],),
    RLHFDataset: ("missing.parquet", print),
    TorchDataset: (make_dataset(),),
    TorchIterableDataset: (make_dataset(),),
    ShardSampler: (TorchDataset(make_dataset()),),
    LightningLoader: (DataLoader(make_dataset(), 2),),
}

TRAINERS = (BaseTrainer, DataParallelTrainer, DDPTrainer, PipelineParallelTrainer)

#: Options and the classes to which they are passed.
PASSED = {
    "max_epochs": (*TRAINERS, GRPOTrainer, GRPOConfig),
    "max_steps": (DDPTrainer, GRPOTrainer, GRPOConfig),
    "devices": (*TRAINERS, GRPOTrainer),
    "num_worker": TRAINERS,
    "every_n_train_steps": (*TRAINERS, Checkpoint),
    "save_steps": (DDPTrainer, Checkpoint),
    "val_check_interval": (DDPTrainer, DataParallelTrainer),
    "log_every_n_steps": (DDPTrainer, DataParallelTrainer),
    "gradient_accumulation_steps": (DDPTrainer, DataParallelTrainer, PipelineParallelTrainer),
    "max_grad_norm": (DDPTrainer, GRPOTrainer, PPOConfig, GRPOConfig),
    "accumulate": (GRPOTrainer,),
    "batch_size": (GRPOTrainer, ParquetDataset),
    "learning_rate": (DDPTrainer, GRPOTrainer, GRPOConfig),
    "max_tokens": (DDPTrainer, DataLoader, GRPOTrainer, GRPOConfig, Sampling),
    "max_new_tokens": (GRPOTrainer, GRPOConfig),
    "num_workers": (DataLoader, GRPOConfig),
    "shuffle": (DataLoader, ShardSampler, RLHFDataset),
    "num_replicas": (ShardSampler, ParquetDataset),
    "momentum": (DataParallelTrainer, GRPOTrainer),
    "sync_interval": (DDPTrainer, GRPOTrainer),
    "strategy": (DataParallelTrainer, DDPTrainer),
    "bucket_cap_mb": (DataParallelTrainer,),
    "schedule": (ModelParallelTrainer,),
    "worker": (PipelineParallelTrainer, GRPOTrainer),
    "patience": (Checkpoint, DDPTrainer),
    "logger": (DDPTrainer, GRPOTrainer),
    "log_dir": (TensorBoardLogger, DDPTrainer),
    "tracking_uri": (DDPTrainer,),
    "columns": (IndexedDataset, Mixture),
    "gamma": (GRPOConfig,),
    "coef": (GRPOConfig,),
    "xyz": (Checkpoint, LightningLoader),
}


#: Options that are passed to ``train()`` of a trainer.
PASSED_TO_TRAIN = {
    "max_steps": DDPTrainer,
    "gradient_accumulation_steps": DataParallelTrainer,
    "every_n_train_steps": DataParallelTrainer,
}


class Worker:
    """Accepts nothing."""

    def train_epoch(self, epoch):
        return {}

    def get_weights(self):
        return []

    def set_weights(self, weights):
        pass


def get_message(cls: type, name: str) -> str:
    with pytest.raises(TypeError) as caught:
        cls(*CLASSES[cls], **{name: 1})
    return str(caught.value)


def test_messages(golden):
    messages = [get_message(cls, name) for name, owners in PASSED.items() for cls in owners]
    for name, cls in PASSED_TO_TRAIN.items():
        with pytest.raises(TypeError) as caught:
            cls(2, worker=Worker).train(epochs=1, **{name: 1})
        messages.append(str(caught.value))
    golden("unknown_options.txt", "\n".join(messages) + "\n")


@pytest.mark.parametrize("cls", CLASSES)
def test_misspelled_option_names_the_class_and_the_option(cls):
    options = sorted(get_options(cls), key=len)
    if not options:
        pytest.skip("has no options")
    option = options[-1]
    misspelled = option[:-2] + option[-1]
    message = get_message(cls, misspelled)
    assert f"{cls.__name__} has no option {misspelled!r}" in message
    assert repr(option) in message


@pytest.mark.parametrize("cls", [GRPOTrainer, *TRAINERS[2:], PPOConfig, GRPOConfig])
def test_max_grad_norm_names_clip_norm(cls):
    assert "clip_norm" in get_message(cls, "max_grad_norm")


@pytest.mark.parametrize("cls", [ParquetDataset, DDPTrainer, DataParallelTrainer, GRPOTrainer])
def test_error_names_the_subclass(cls):
    sub = type("Mine", (cls,), {})
    with pytest.raises(TypeError, match=r"Mine has no option 'seeed'.*'seed'"):
        sub(*CLASSES[cls], seeed=1)


def test_options_of_a_subclass_are_suggested():
    class Mine(DDPTrainer):
        def __init__(self, hidden=8, **options):
            super().__init__(**options)

    with pytest.raises(TypeError, match=r"Mine has no option 'hiden'.*'hidden'"):
        Mine(hiden=4)


@pytest.mark.parametrize("cls", CLASSES)
def test_signature_shows_the_parameters(cls):
    """``inspect.signature``, and editors with it, see more than ``(*args, **kwargs)``."""
    parameters = inspect.signature(cls).parameters.values()
    assert not any(p.kind is p.VAR_POSITIONAL for p in parameters)
    assert {p.name for p in parameters if p.kind is not p.VAR_KEYWORD} <= get_options(cls)


@pytest.mark.parametrize("cls", [GRPOConfig, PPOConfig, KLPenalty, Sampling, RLHFConfig])
def test_configs_can_be_pickled_and_compared(cls):
    assert pickle.loads(pickle.dumps(cls())) == cls()


def test_objects_of_decorated_classes_can_be_pickled():
    dataset = make_dataset()
    for value in (dataset, TorchDataset(dataset), DataLoader(dataset, 2), Checkpoint(2)):
        assert type(pickle.loads(pickle.dumps(value))) is type(value)
