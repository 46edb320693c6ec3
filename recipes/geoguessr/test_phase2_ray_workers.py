"""Phase 2: the same dataset inside actors, on miniray's own engine or on Ray.

    python recipes/geoguessr/test_phase2_ray_workers.py [--backend local|ray|inline] [--workers 4]

Also by pytest. Each worker opens its own shard; counts, ids and figures come back to the driver.
"""

from __future__ import annotations

import os
from typing import Any

import checks
import psutil

import miniray


@miniray.remote
class DataWorker:
    """A worker with its own shard. ``rank`` and ``world_size`` are all it is told."""

    def __init__(self, rank: int, world_size: int, files: list[str], budget: str = "64MB") -> None:
        from byte_tokenizer import ByteTokenizer
        from geoguessr_dataset_distributed import GeoguessrRLHFDatasetDistributed

        self._before = psutil.Process().memory_full_info().uss
        self._dataset = GeoguessrRLHFDatasetDistributed(
            files,
            ByteTokenizer(),
            {**checks.CONFIG, "memory_budget": budget},
            rank=rank,
            world_size=world_size,
        )
        self._rank = rank

    def get_sample_count(self) -> int:
        return len(self._dataset)

    def get_first_sample_info(self) -> dict[str, Any]:
        """Of the first row: id, number, what the model would get; id None for an empty shard."""
        if not len(self._dataset):
            return {"rank": self._rank, "row_id": None}
        row = self._dataset[0]
        return {
            "rank": self._rank,
            "row_id": self._dataset.row_ids[0],
            "index": row["index"],
            "data_source": row["data_source"],
            "prompt_tokens": len(row["raw_prompt_ids"]),
            "images": len(row["multi_modal_data"]["image"]),
            "place": row["place"].tolist(),
        }

    def get_row_ids(self) -> list[tuple[str, int]]:
        return list(self._dataset.row_ids)

    def read_all(self) -> dict[str, Any]:
        """Read every row; numbers seen, and memory before and after in MB."""
        numbers = [row["index"] for row in self._dataset]
        after = psutil.Process().memory_full_info().uss
        return {
            "numbers": numbers,
            "pid": os.getpid(),
            "before_mb": self._before / 1e6,
            "after_mb": after / 1e6,
        }


def check_workers(files: list[str], workers: int, budget_mb: int = 64) -> list[str]:
    """Counts, ids and memory of ``workers`` actors. The engine must be running."""
    actors = [
        DataWorker.remote(rank, workers, files, f"{budget_mb}MB")  # type: ignore[attr-defined]
        for rank in range(workers)
    ]
    try:
        counts = miniray.get([actor.get_sample_count.remote() for actor in actors])
        ids = miniray.get([actor.get_row_ids.remote() for actor in actors])
        checks.compare(ids, sum(counts))
        first = miniray.get([actor.get_first_sample_info.remote() for actor in actors])
        for info, own in zip(first, ids, strict=True):
            assert not own or tuple(info["row_id"]) == tuple(own[0]), (info, own[0])
        read = miniray.get([actor.read_all.remote() for actor in actors])
        checks.compare([worker["numbers"] for worker in read], sum(counts))
        grown = [worker["after_mb"] - worker["before_mb"] for worker in read]
        if len({worker["pid"] for worker in read}) == workers:  # not in the driver's own process
            limit = budget_mb + 100
            assert max(grown) <= limit, f"a worker grew by {max(grown):.0f} MB, limit {limit}"
        return [
            f"counts {counts}, {sum(counts)} rows, all ids disjoint",
            f"first rows {[info.get('index') for info in first]}",
            "memory of a worker, own: "
            + ", ".join(f"{w['before_mb']:.0f} → {w['after_mb']:.0f} MB" for w in read),
        ]
    finally:
        for actor in actors:
            miniray.kill(actor)


def test_phase2(files: list[str]) -> None:
    miniray.init(num_workers=2)
    try:
        check_workers(files, 2)
    finally:
        miniray.shutdown()


if __name__ == "__main__":
    checks.on_an_engine(check_workers, 4, __doc__)()
