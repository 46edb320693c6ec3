"""The GeoGuessr rows of one worker, as verl and ``miniray.rl`` take them.

In a miniray or Ray actor, every worker makes its own with its rank::

    GeoguessrRLHFDatasetDistributed("data/train-*", tokenizer, config, rank=2, world_size=64)

In verl it is a ``custom_cls`` (see README.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from miniray.data.rlhf import RLHFDataset
from miniray.errors import DataError


class GeoguessrRLHFDatasetDistributed(RLHFDataset):
    """``RLHFDataset`` whose rows also have ``place``: the true (latitude, longitude) in degrees.

    A row without a true place on Earth is an error with its file and row: its reward would be 0
    whatever the model answers, and nobody would notice.
    """

    def encode(self, row: Mapping[str, Any]) -> dict[str, Any]:
        found = super().encode(row)
        truth = (row.get("reward_model") or {}).get("ground_truth") or {}
        lat, lon = truth.get("lat"), truth.get("lon")
        if lat is None or lon is None or not (abs(lat) <= 90 and abs(lon) <= 180):
            raise DataError(f"the ground truth {truth} is no place on Earth")
        found["place"] = torch.tensor([lat, lon], dtype=torch.float64)
        return found
