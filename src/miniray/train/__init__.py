"""Training on top of actors: trainers, checkpoints, the run directory, callbacks.

Names are imported on first use, because worker processes need few of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from miniray import lazy

if TYPE_CHECKING:
    from miniray.train.callbacks import (
        Callback,
        Checkpoint,
        EarlyStopping,
        LRSchedule,
    )
    from miniray.train.callbacks import TensorBoard as TensorBoard  # deprecated
    from miniray.train.data_parallel import DataParallelTrainer
    from miniray.train.ddp import DDPTrainer
    from miniray.train.parallel.model import ModelParallelTrainer
    from miniray.train.parallel.pipeline import PipelineParallelTrainer
    from miniray.train.run.checkpoints.manifest import CheckpointInfo
    from miniray.train.run.checkpoints.store import CheckpointStore
    from miniray.train.run.directory import RunDirectory
    from miniray.train.run.loggers.base import Logger
    from miniray.train.run.loggers.csv import CSVLogger
    from miniray.train.run.loggers.mlflow import MLflowLogger
    from miniray.train.run.loggers.tensorboard import TensorBoardLogger
    from miniray.train.run.loggers.wandb import WandbLogger
    from miniray.train.run.result import TrainResult
    from miniray.train.run.tensors.modelfile import load_model, save_model
    from miniray.train.torch_worker import TorchWorker
    from miniray.train.trainer import BaseTrainer
    from miniray.train.workers.aggregate import aggregate

_WHERE = {
    "BaseTrainer": ".trainer",
    "CSVLogger": ".run.loggers.csv",
    "Callback": ".callbacks",
    "Checkpoint": ".callbacks",
    "CheckpointInfo": ".run.checkpoints.manifest",
    "CheckpointStore": ".run.checkpoints.store",
    "DDPTrainer": ".ddp",
    "DataParallelTrainer": ".data_parallel",
    "EarlyStopping": ".callbacks",
    "LRSchedule": ".callbacks",
    "Logger": ".run.loggers.base",
    "MLflowLogger": ".run.loggers.mlflow",
    "ModelParallelTrainer": ".parallel.model",
    "PipelineParallelTrainer": ".parallel.pipeline",
    "RunDirectory": ".run.directory",
    "TensorBoard": ".callbacks",
    "TensorBoardLogger": ".run.loggers.tensorboard",
    "TorchWorker": ".torch_worker",
    "TrainResult": ".run.result",
    "WandbLogger": ".run.loggers.wandb",
    "aggregate": ".workers.aggregate",
    "load_model": ".run.tensors.modelfile",
    "save_model": ".run.tensors.modelfile",
}

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
    "Logger",
    "MLflowLogger",
    "ModelParallelTrainer",
    "PipelineParallelTrainer",
    "RunDirectory",
    "TensorBoardLogger",
    "TorchWorker",
    "TrainResult",
    "WandbLogger",
    "aggregate",
    "load_model",
    "save_model",
]

__getattr__, __dir__ = lazy.names(__name__, _WHERE)
