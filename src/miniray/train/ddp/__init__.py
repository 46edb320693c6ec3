"""``DDPTrainer``: gradients averaged in every step, with whole or sharded copies of the model."""

from miniray.train.ddp.trainer import DDPTrainer

__all__ = ["DDPTrainer"]
