"""``DDPTrainer``: data parallelism with replicated or sharded models."""

from miniray.train.ddp.trainer import DDPTrainer

__all__ = ["DDPTrainer"]
