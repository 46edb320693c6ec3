"""Training on top of actors: trainers, checkpoints, the run directory, callbacks.

What is here is imported when it is first used: a worker's process needs little of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from miniray import lazy

if TYPE_CHECKING:
    from miniray.train.averaging import aggregate
    from miniray.train.base import BaseTrainer
    from miniray.train.callbacks import (
        Callback,
        Checkpoint,
        CSVLogger,
        EarlyStopping,
        LRSchedule,
        TensorBoard,
    )
    from miniray.train.checkpoint import CheckpointInfo, CheckpointStore
    from miniray.train.data_parallel import DataParallelTrainer
    from miniray.train.ddp import DDPTrainer
    from miniray.train.modelfile import load_model, save_model
    from miniray.train.parallel.model import ModelParallelTrainer
    from miniray.train.parallel.pipeline import PipelineParallelTrainer
    from miniray.train.results import TrainResult
    from miniray.train.rundir import RunDirectory
    from miniray.train.torch_worker import TorchWorker

_WHERE = {
    "BaseTrainer": ".base",
    "CSVLogger": ".callbacks",
    "Callback": ".callbacks",
    "Checkpoint": ".callbacks",
    "CheckpointInfo": ".checkpoint",
    "CheckpointStore": ".checkpoint",
    "DDPTrainer": ".ddp",
    "DataParallelTrainer": ".data_parallel",
    "EarlyStopping": ".callbacks",
    "LRSchedule": ".callbacks",
    "ModelParallelTrainer": ".parallel.model",
    "PipelineParallelTrainer": ".parallel.pipeline",
    "RunDirectory": ".rundir",
    "TensorBoard": ".callbacks",
    "TorchWorker": ".torch_worker",
    "TrainResult": ".results",
    "aggregate": ".averaging",
    "load_model": ".modelfile",
    "save_model": ".modelfile",
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

__getattr__, __dir__ = lazy.names(__name__, _WHERE)
