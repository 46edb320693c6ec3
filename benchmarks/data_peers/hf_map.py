"""Hugging Face datasets, map style: a cache on disk, DistributedSampler, StatefulDataLoader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from data_peers.common import Batch, Run, geoguessr_row


def _open(run: Run) -> Any:
    from datasets import load_dataset

    cache = str(run.scratch / "hf-cache")
    rows = load_dataset("parquet", data_files=run.files, split="train", cache_dir=cache)
    return rows.select_columns(["images", "extra_info"])


def prepare(run: Run) -> None:
    _open(run)


class Loader:
    def __init__(self, run: Run) -> None:
        from torch.utils.data import DistributedSampler
        from torchdata.stateful_dataloader import StatefulDataLoader

        rows = _open(run)
        sampler: Any = DistributedSampler(
            rows, run.world_size, run.rank, shuffle=True, seed=run.seed
        )

        def collate(batch: list[dict[str, Any]]) -> Batch:
            numbers, images = zip(*map(geoguessr_row, batch), strict=True)
            return list(numbers), run.images(images)

        self._loader = StatefulDataLoader(
            rows, batch_size=run.batch_size, sampler=sampler, collate_fn=collate
        )
        if run.resumed_ranks:
            self._loader.load_state_dict(run.state)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._loader)

    def state(self) -> Any:
        return self._loader.state_dict()
