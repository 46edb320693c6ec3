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
from miniray.train.results import TrainResult, aggregate
from miniray.train.rundir import RunDirectory

__all__ = [
    "BaseTrainer",
    "CSVLogger",
    "Callback",
    "Checkpoint",
    "CheckpointInfo",
    "CheckpointStore",
    "DataParallelTrainer",
    "EarlyStopping",
    "LRSchedule",
    "RunDirectory",
    "TensorBoard",
    "TrainResult",
    "aggregate",
    "load_model",
    "save_model",
]
