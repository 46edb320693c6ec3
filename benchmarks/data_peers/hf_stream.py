"""Hugging Face datasets, streaming: shuffle buffer of 1000, split_dataset_by_node."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from data_peers.common import Batch, Run, geoguessr_row


class Loader:
    def __init__(self, run: Run) -> None:
        from datasets import load_dataset
        from datasets.distributed import split_dataset_by_node

        rows = load_dataset("parquet", data_files=run.files, split="train", streaming=True)
        rows = rows.select_columns(["images", "extra_info"])
        rows = rows.shuffle(seed=run.seed, buffer_size=1000)
        self._rows = split_dataset_by_node(rows, run.rank, run.world_size)
        self._run = run
        if run.resumed_ranks:
            self._rows.load_state_dict(run.state)

    def __iter__(self) -> Iterator[Batch]:
        pending: list[dict[str, Any]] = []
        for row in self._rows:
            pending.append(row)
            if len(pending) == self._run.batch_size:
                yield self._batch(pending)
                pending = []
        if pending:
            yield self._batch(pending)

    def _batch(self, rows: list[dict[str, Any]]) -> Batch:
        numbers, images = zip(*map(geoguessr_row, rows), strict=True)
        return list(numbers), self._run.images(images)

    def state(self) -> Any:
        return self._rows.state_dict()
