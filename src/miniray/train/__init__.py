"""Training on top of actors: trainers, checkpoints, the run directory, callbacks."""

from miniray.train.base import BaseTrainer
from miniray.train.callbacks import (
    Callback,
    Checkpoint,
    CSVLogger,
    EarlyStopping,
    LRSchedule,
    TensorBoard,
)
from miniray.train.checkpoint import CheckpointInfo, CheckpointStore, load_model, save_model
from miniray.train.data_parallel import DataParallelTrainer
from miniray.train.ddp import DDPTrainer
from miniray.train.parallel.model import ModelParallelTrainer
from miniray.train.parallel.pipeline import PipelineParallelTrainer
from miniray.train.results import TrainResult, aggregate
from miniray.train.rundir import RunDirectory
from miniray.train.torch_worker import TorchWorker

__all__ = [
    "BaseTrainer",
    "CSVLogger",
    "Callback",
    "Checkpoint",
    "CheckpointInfo",
    "CheckpointStore",
    "DDPTrainer",
    "DataParallelTrainer",
    "EarlyStopping",
    "LRSchedule",
    "ModelParallelTrainer",
    "PipelineParallelTrainer",
    "RunDirectory",
    "TensorBoard",
    "TorchWorker",
    "TrainResult",
    "aggregate",
    "load_model",
    "save_model",
]
