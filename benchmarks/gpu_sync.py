"""Measure the parameter sync of workers that share one GPU.

``python benchmarks/gpu_sync.py`` prints a table and writes ``results/gpu_sync.json``. It needs a
GPU with room for all models. A sync moves the model of every worker to the host and the combined
weights back to all; beside it stands what plain copies of as many bytes take in one process.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click
import common

import miniray
from miniray.ps import create_parameter_server


@miniray.remote
class Holder:
    """A model on the GPU, as many tensors as layers."""

    def __init__(self, seed: int, nbytes: int, tensors: int) -> None:
        import torch

        torch.manual_seed(seed)
        count = nbytes // 4 // tensors
        self.weights = [torch.randn(count, device="cuda") for _ in range(tensors)]

    def get_weights(self) -> Any:
        return self.weights

    def set_weights(self, weights: Any) -> None:
        for mine, new in zip(self.weights, weights, strict=True):
            mine.copy_(new)

    def first(self) -> float:
        return float(self.weights[0][0])

    def copy_seconds(self) -> dict[str, float]:
        """The same bytes to pinned memory and back, once each way, without anything else."""
        import torch

        pinned = [torch.empty(w.shape, pin_memory=True) for w in self.weights]
        found = {}
        for name, pairs in (("to host", zip(pinned, self.weights, strict=True)),
                            ("to GPU", zip(self.weights, pinned, strict=True))):  # fmt: skip
            torch.cuda.synchronize()
            started = time.perf_counter()
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            found[name] = time.perf_counter() - started
        return found


def measure(workers: int, nbytes: int, tensors: int, syncs: int) -> dict[str, Any]:
    """Samples of one number of workers."""
    with miniray.init(backend="local"):
        holders = [Holder.remote(i, nbytes, tensors) for i in range(workers)]
        server = create_parameter_server("average")
        expected = sum(miniray.get([h.first.remote() for h in holders])) / workers
        seconds = []
        for number in range(syncs + 1):
            started = time.perf_counter()
            miniray.get(server.sync_from_workers.remote(holders))
            if number:  # the first one makes the segments and pins the memory
                seconds.append(time.perf_counter() - started)
        firsts = miniray.get([h.first.remote() for h in holders])
        if max(abs(x - expected) for x in firsts) > 1e-5:
            raise RuntimeError(f"synced to {firsts}, expected {expected}")
        stats = miniray.get(server.get_stats.remote())
        copies = miniray.get(holders[0].copy_seconds.remote())
        keys = ("collect_seconds", "combine_seconds", "distribute_seconds")
        return {
            "workers": workers,
            "seconds": seconds,
            "copies": copies,
            "parts": {key: stats[key] for key in keys if key in stats},
        }


@click.command()
@click.option("--megabytes", default=1000, show_default=True, help="weights of one worker")
@click.option("--tensors", default=100, show_default=True)
@click.option("--syncs", default=5, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=common.RESULTS / "gpu_sync.json")
def main(megabytes: int, tensors: int, syncs: int, out: Path) -> None:
    """Sync models of 1 GB that live on one GPU."""
    import torch

    if not torch.cuda.is_available():
        raise click.ClickException("this benchmark needs a GPU, and torch sees none")
    nbytes = megabytes * 1_000_000
    results = [measure(workers, nbytes, tensors, syncs) for workers in (2, 4)]
    lines = []
    for result in results:
        workers, seconds = result["workers"], common.median(result["seconds"])
        moved = 2 * workers * nbytes
        plain = workers * sum(result["copies"].values())
        lines.append(
            common.Line(
                f"{workers} workers",
                [
                    common.human(seconds, "s"),
                    f"{moved / seconds / 1e9:.1f} GB/s",
                    f"{moved / plain / 1e9:.1f} GB/s",
                    f"{plain / seconds:.2f}",
                ],
            )
        )
    columns = ["a sync", "moved", "plain copies, one after the other", "of plain"]
    common.print_table(f"{megabytes} MB a worker on one GPU", columns, lines)
    record = {
        "benchmark": "gpu_sync",
        "time": common.stamp(),
        "machine": {**common.machine(), "gpu": torch.cuda.get_device_name()},
        "versions": common.versions("miniray", "torch"),
        "megabytes": megabytes,
        "tensors": tensors,
        "results": results,
        "markdown": common.markdown_table(columns, lines),
    }
    common.write_json(out, record)


if __name__ == "__main__":
    main()
