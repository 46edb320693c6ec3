"""A worker with its own DataLoader: rows become what a model takes, late and under a budget.

    python recipes/geoguessr/worker_with_dataloader.py [--backend local|ray] [--workers 2]

The driver asks for an epoch and gets a few numbers back; no row passes through it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import checks
import numpy as np
import psutil

import miniray

SIDE = 64


@miniray.remote
class DataLoaderWorker:
    def __init__(
        self,
        worker_id: int,
        num_workers: int,
        files: list[str],
        batch_size: int = 16,
        budget: str = "64MB",
    ) -> None:
        from byte_tokenizer import ByteTokenizer
        from geoguessr_dataset_distributed import GeoguessrRLHFDatasetDistributed

        config = {**checks.CONFIG, "shuffle": True, "seed": 0, "memory_budget": budget}
        self._dataset = GeoguessrRLHFDatasetDistributed(
            files, ByteTokenizer(), config, rank=worker_id, world_size=num_workers
        )
        self._loader = self._dataset.loader(batch_size, transform=self._model_inputs)

    def _model_inputs(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Text to token ids, image bytes to pixels: for the batches next in line only."""
        import torch

        found = self._dataset.encode(row)
        (image,) = found.pop("multi_modal_data")["image"]
        pixels = np.asarray(image.convert("RGB").resize((SIDE, SIDE)), dtype=np.float32) / 255
        found["pixels"] = torch.from_numpy(pixels).permute(2, 0, 1)
        return found

    def run_epoch(self, epoch: int) -> dict[str, Any]:
        """One pass, as a training step would take it. Sums and counts go back, never rows."""
        self._loader.set_epoch(epoch)
        start = time.monotonic()
        rows = tokens = 0
        brightness = 0.0
        numbers: list[int] = []
        for batch in self._loader:
            rows += len(batch["index"])
            tokens += int(batch["attention_mask"].sum())
            brightness += float(batch["pixels"].mean(dim=(1, 2, 3)).sum())
            numbers.extend(batch["index"].tolist())
        return {
            "rows": rows,
            "tokens": tokens,
            "brightness_sum": brightness,
            "seconds": time.monotonic() - start,
            "own_mb": psutil.Process().memory_full_info().uss / 1e6,
            "numbers": numbers,
        }

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: under 1 KB."""
        return self._loader.state_dict()


def run_epochs(files: list[str], workers: int, epochs: int = 2) -> list[str]:
    """Epochs on ``workers`` actors; every row exactly once in each. The engine must be running."""
    actors = [
        DataLoaderWorker.remote(rank, workers, files)  # type: ignore[attr-defined]
        for rank in range(workers)
    ]
    lines = []
    try:
        orders = []
        for epoch in range(epochs):
            results = miniray.get([actor.run_epoch.remote(epoch) for actor in actors])
            total = sum(result["rows"] for result in results)
            checks.compare([result["numbers"] for result in results], total)
            orders.append([number for result in results for number in result["numbers"]])
            # A mean over all rows: of sums and counts, not of the workers' means.
            brightness = sum(result["brightness_sum"] for result in results) / total
            slowest = max(result["seconds"] for result in results)
            memory = max(result["own_mb"] for result in results)
            lines.append(
                f"epoch {epoch}: {total} rows once each, {total / slowest:,.0f} rows/s with pixels,"
                f" mean brightness {brightness:.3f}, largest worker {memory:.0f} MB"
            )
        assert len({tuple(order) for order in orders}) == epochs, "epochs had the same order"
        return lines
    finally:
        for actor in actors:
            miniray.kill(actor)


if __name__ == "__main__":
    checks.on_an_engine(run_epochs, 2, __doc__)()
