"""Prompts for reinforcement learning: verl's rows and configuration keys."""

from miniray.data.rlhf.config import RLHFConfig
from miniray.data.rlhf.dataset import RLHFDataset, collate_fn

__all__ = ["RLHFConfig", "RLHFDataset", "collate_fn"]
