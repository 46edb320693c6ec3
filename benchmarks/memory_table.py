"""Measure the memory of a batch of 8192 image prompts: one driver or 64 loaders.

    python benchmarks/memory_table.py [--quick] [--scratch DIR] [--json PATH] [--markdown]

A prompt's image becomes pixel values for the model, 1600 x 1600 x 3 floats: about 30 MB, from 30 KB
of JPEG. All figures come from bytes that were really there:

- a row: bytes of the encoded row in the files, and of the array the worker makes of it.
- one driver: a process that makes processed rows, has four batches under way (two loader threads
  with two each, torch's default), cuts a batch into a part for each worker and pickles it, at a
  size this machine can hold. Its memory at the highest, in batches, and the bytes it sends are
  then scaled to the batch.
- worker-local: the real loaders of all workers, one after the other, each in a fresh process. A
  worker goes through its share of the batch in micro-batches under its memory budget. The first
  ``--processed`` rows, more than are in memory at once, are made pixels of; the rest of the
  share is only read, by a loader that goes on from the first one's state. A node is the sum of its
  8 workers, with their interpreters. What reaches the driver is a count a worker.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import pickle
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import numpy as np
import psutil
from common import Line

from data import rows_in

BUDGET = "256MB"
GB, MB = 1e9, 1e6


def pixel_values(encoded: bytes, side: int) -> np.ndarray:
    """What a processor makes of an image: resized, scaled to floats, channels first."""
    from PIL import Image

    with Image.open(io.BytesIO(encoded)) as image:
        pixels = np.asarray(image.convert("RGB").resize((side, side)), dtype=np.float32)
    pixels *= 1 / 255
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


# -- worker-local ---------------------------------------------------------------------------------


def run_loader(files: list[str], settings: dict[str, Any]) -> dict[str, Any]:
    """One worker's share of one batch, in this process."""
    from miniray.data import DataLoader, ParquetDataset

    side, share = settings["side"], settings["share"]

    def inputs(row: dict[str, Any]) -> dict[str, Any]:
        encoded = row["images"][0]["bytes"]
        return {"index": row["extra_info"]["index"], "pixels": pixel_values(encoded, side)}

    dataset = ParquetDataset(
        files,
        rank=settings["rank"],
        world_size=settings["workers"],
        shuffle=True,
        seed=0,
        memory_budget=BUDGET,
    )
    loader = DataLoader(dataset, settings["micro_batch"], transform=inputs, prefetch=1)
    numbers: list[int] = []
    highest = 0.0
    bytes_a_row = 0
    for batch in loader:
        numbers.extend(int(number) for number in batch["index"])
        bytes_a_row = batch["pixels"][0].nbytes
        highest = max(highest, memory_of(os.getpid())[0])
        if len(numbers) >= min(share, settings["processed"]):
            break
    rest = DataLoader(dataset, settings["micro_batch"])
    rest.load_state_dict(loader.state_dict())
    loader.close()
    for batch in rest:
        if len(numbers) >= share:
            break
        numbers.extend(int(row["index"]) for row in batch["extra_info"])
    rest.close()
    return {"numbers": numbers[:share], "row": bytes_a_row, "uss": highest / MB}


def worker_local(files: list[str], sizes: argparse.Namespace, say: Callable[[str], None]) -> Any:
    """(memory of each worker in MB, bytes of a processed row, bytes that reached the driver)."""
    memory, seen, row = [], [], 0
    answered = 0
    share = sizes.batch // sizes.workers
    for rank in range(sizes.workers):
        settings = {
            "rank": rank,
            "workers": sizes.workers,
            "share": share,
            "side": sizes.side,
            "micro_batch": sizes.micro_batch,
            "processed": sizes.processed,
        }
        answer, highest = measured("--run-loader", [files, settings])
        numbers = answer.pop("numbers")  # to check the rows; a training sends none of them
        answered += len(json.dumps(answer))
        memory.append(max(highest / MB, answer["uss"]))
        seen += numbers
        row = answer["row"]
        if (rank + 1) % 8 == 0:
            say(f"loaders {rank + 1}/{sizes.workers}: the largest has {max(memory):.0f} MB")
    if not len(seen) == len(set(seen)) == share * sizes.workers:
        raise RuntimeError(f"{len(set(seen))} different rows of {len(seen)}, not {sizes.batch}")
    return memory, row, answered


# -- one driver -----------------------------------------------------------------------------------


def run_driver(files: list[str], settings: dict[str, Any]) -> dict[str, Any]:
    """Batches made and sent out by one process, as a single controller does; a few of them."""
    import pyarrow.parquet as pq

    side, batch_size = settings["side"], settings["batch"]
    table = pq.read_table(files[0], columns=["images"]).slice(0, batch_size)
    encoded = [row["images"][0]["bytes"] for row in table.to_pylist()]
    pixel_values(encoded[0], side)
    before = memory_of(os.getpid())[0]
    ready: queue.Queue[list[np.ndarray]] = queue.Queue(maxsize=3)  # and one being made

    def make() -> None:
        for _ in range(6):
            ready.put([pixel_values(encoded[i % len(encoded)], side) for i in range(batch_size)])

    maker = threading.Thread(target=make)
    maker.start()
    sent = 0
    for _ in range(6):
        batch = ready.get()
        part = max(1, batch_size // settings["workers"])
        parts = [batch[start : start + part] for start in range(0, batch_size, part)]
        messages = [pickle.dumps(rows, protocol=5) for rows in parts]
        sent = sum(map(len, messages))
        while maker.is_alive() and not ready.full():
            time.sleep(0.05)  # the workers compute; the loader gets ahead meanwhile
    maker.join()
    return {"sent": sent, "rows": batch_size, "before": before}


def one_driver(files: list[str], sizes: argparse.Namespace) -> tuple[float, float]:
    """(memory of the driver in batches, bytes sent in batches), at a size that fits here."""
    settings = {"side": 224, "batch": sizes.driver_batch, "workers": 8}
    answer, highest = measured("--run-driver", [files, settings])
    batch = answer["rows"] * 224 * 224 * 3 * 4
    return (highest - answer["before"]) / batch, answer["sent"] / batch


class MemorySampler:
    """Measures the memory of processes and their children four times per second."""

    def __init__(self, pids: list[int]) -> None:
        self._pids = pids
        self._uss = self._pss = 0.0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> MemorySampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def highest(self) -> dict[str, float]:
        return {"uss": self._uss / MB, "pss": self._pss / MB}

    def _sample(self) -> None:
        while not self._done.wait(0.25):
            pss = 0.0
            for pid in self._pids:
                tree = _tree(pid)
                pss += sum(own_pss for _, own_pss in tree)
                self._uss = max(self._uss, sum(uss for uss, _ in tree))
            self._pss = max(self._pss, pss)


def _tree(pid: int) -> list[tuple[float, float]]:
    """Return (USS, PSS) of a process and its children."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.Error, OSError):
                found.append(memory_of(process.pid))
    return found


def memory_of(pid: int) -> tuple[float, float]:
    """Return (USS, PSS) of a process in bytes."""
    uss = pss = 0.0
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        key, _, rest = line.partition(":")
        if key == "Pss":
            pss = float(rest.split()[0]) * 1024
        elif key.startswith("Private_"):
            uss += float(rest.split()[0]) * 1024
    return uss, pss


def measured(action: str, arguments: list[Any]) -> tuple[dict[str, Any], float]:
    """(answer, highest USS in bytes) of one of the functions above in a process of its own."""
    command = [sys.executable, __file__, action, json.dumps(arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        with MemorySampler([process.pid]) as sampler:
            out, error = process.communicate(timeout=600)
    finally:
        process.kill()
        process.wait()
    if process.returncode:
        raise RuntimeError(f"{action} {arguments[1]} failed:\n{error[-2000:]}")
    answer: dict[str, Any] = json.loads(out)
    return answer, sampler.highest()["uss"] * MB


# -- the table ------------------------------------------------------------------------------------


def encoded_row(files: list[str]) -> float:
    """Bytes of a row in the files."""
    import pyarrow.parquet as pq

    rows = sum(pq.read_metadata(path).num_rows for path in files)
    return sum(Path(path).stat().st_size for path in files) / rows


def summarise(record: dict[str, Any]) -> list[Line]:
    batch, workers, per_node = record["batch"], record["workers"], record["per_node"]
    whole = batch * record["processed_row"]
    driver, network = record["driver_batches"] * whole, record["sent_ratio"] * whole
    nodes = [
        sum(record["worker_mb"][start : start + per_node]) * MB
        for start in range(0, workers, per_node)
    ]
    sharded = driver / workers
    less = driver / max(nodes)
    full = batch >= 8192  # what is wanted is wanted of the whole batch
    return [
        Line("a row in the files", ["", "", f"{record['encoded_row'] / 1e3:.1f} KB"]),
        Line("a row processed", ["", "", f"{record['processed_row'] / MB:.1f} MB"]),
        Line(
            "memory of one machine",
            [_size(driver), _size(sharded * per_node), _size(max(nodes))],
            "16 GB a node" if full else "",
            max(nodes) <= 16 * GB if full else None,
        ),
        Line(
            "memory of a worker",
            ["", _size(sharded), _size(max(record["worker_mb"]) * MB)],
        ),
        Line(
            "less than one driver",
            ["", "", f"{less:,.0f}×"],
            "90×" if full else "",
            less >= 90 if full else None,
        ),
        Line(
            "through the driver, a batch",
            [_size(network), "0", "0"],
            "0",
            True,
        ),
    ]


def _size(amount: float) -> str:
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if amount >= unit:
            return f"{amount / unit:.3g} {name}"
    return f"{amount:.0f} B"


def main() -> None:
    if len(sys.argv) == 3 and sys.argv[1] in ("--run-loader", "--run-driver"):
        work = run_loader if sys.argv[1] == "--run-loader" else run_driver
        print(json.dumps(work(*json.loads(sys.argv[2]))))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="16 workers, a batch of 64")
    parser.add_argument("--batch", type=int, metavar="N")
    parser.add_argument("--workers", type=int, metavar="N")
    parser.add_argument("--side", type=int, default=1600, metavar="PIXELS")
    parser.add_argument("--micro-batch", type=int, default=4, metavar="N")
    parser.add_argument("--processed", type=int, default=16, metavar="N", help="rows of a worker")
    parser.add_argument("--scratch", type=Path, metavar="DIR", help="keep the rows there")
    default = common.RESULTS / "memory_table.json"
    parser.add_argument("--json", type=Path, default=default, metavar="PATH")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    sizes = parser.parse_args()
    sizes.batch = sizes.batch or (64 if sizes.quick else 8192)
    sizes.workers = sizes.workers or (16 if sizes.quick else 64)
    sizes.driver_batch = 64 if sizes.quick else 256
    if sizes.batch % sizes.workers or sizes.workers % 8:
        parser.error("workers must be a multiple of 8, and the batch a multiple of the workers")

    def say(text: str) -> None:
        print(text, flush=True)

    started = common.stamp()
    rows = max(2_000 if sizes.quick else 20_000, sizes.batch)  # as benchmarks/data.py has them
    with rows_in(sizes.scratch, rows, say) as (_, files):
        driver_batches, sent_ratio = one_driver(files, sizes)
        say(f"one driver: {driver_batches:.2f} batches in memory at the highest")
        worker_mb, processed_row, answered = worker_local(files, sizes, say)
        record = {
            "started": started,
            "finished": common.stamp(),
            "machine": common.machine(),
            "versions": common.versions("miniray", "numpy", "pillow", "pyarrow"),
            "batch": sizes.batch,
            "workers": sizes.workers,
            "per_node": 8,
            "side": sizes.side,
            "micro_batch": sizes.micro_batch,
            "processed": sizes.processed,
            "budget": BUDGET,
            "encoded_row": encoded_row(files),
            "processed_row": processed_row,
            "driver_batches": driver_batches,
            "sent_ratio": sent_ratio,
            "worker_mb": worker_mb,
            "control_bytes_to_driver": answered,
        }
    lines = summarise(record)
    columns = ["one driver", "sharded, decoded at once", "miniray"]
    title = f"a batch of {sizes.batch:,} prompts with an image on {sizes.workers} workers"
    if sizes.markdown:
        print(common.markdown_table(columns, lines))
    else:
        common.print_table(title, columns, lines)
    common.write_json(sizes.json, {**record, "table": [vars(line) for line in lines]})
    print(f"all samples: {sizes.json}")


if __name__ == "__main__":
    main()
