"""Code that measures each loader of ``benchmarks/data.py``.

A peer is a module in this directory. It has ``Loader(run)``, which yields the batches of an epoch
as (row numbers, images). Images are bytes, or arrays if ``run.decoded`` is set. A peer can also
have:

- ``prepare(run)``: conversions that a user runs once before training.
- ``Loader.state()`` and ``run.state``: the loader's own state, if it can resume within an epoch.
- ``drive(run, meet)``: for a peer that starts its ranks itself.

Imports of this module count in the time to the first batch of every loader. So NumPy and Pillow are
imported when an image is decoded.
"""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np

SIDE = 224
Batch = tuple[list[int], list[Any]]


@dataclass
class Run:
    """One rank of one measurement."""

    loader: str
    files: list[str]
    rows: int
    folder: str
    rank: int
    world_size: int
    batch_size: int
    seed: int
    decoded: bool
    started: float  # monotonic, taken before the process was started
    port: int  # for loaders that need a rendezvous
    order: str = ""  # of miniray: "window" or "global"
    stop_after: int | None = None  # batches; then the state is saved
    resumed_ranks: int = 0  # number of ranks whose states to resume from

    @property
    def scratch(self) -> Path:
        """Directory for converted data and states."""
        from pathlib import Path

        return Path(self.folder)

    def find_state_file(self, rank: int) -> Path:
        return self.scratch / f"state-{self.loader}-{rank}.pickle"

    @property
    def state(self) -> Any:
        """State of this rank when the previous run stopped, or None for a new run.

        On a different number of ranks, that of rank 0.
        """
        import pickle

        if not self.resumed_ranks:
            return None
        rank = self.rank if self.resumed_ranks == self.world_size else 0
        return pickle.loads(self.find_state_file(rank).read_bytes())

    def images(self, encoded: Iterable[bytes]) -> list[Any]:
        """Return images as bytes or decoded, as ``decoded`` says."""
        return [decode(image) for image in encoded] if self.decoded else list(encoded)


def decode(data: bytes) -> np.ndarray:
    """JPEG to 224 x 224 x 3."""
    import numpy as np
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR))


class MemoryPeak(threading.Thread):
    """Look at the anonymous memory of this process every 20 ms."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.nbytes = 0

    def run(self) -> None:
        while True:
            self.update()
            time.sleep(0.02)

    def update(self) -> None:
        with open("/proc/self/status", "rb") as status:
            text = status.read()
        start = text.index(b"RssAnon:") + 8
        self.nbytes = max(self.nbytes, 1024 * int(text[start : text.index(b"kB", start)]))


def measure(
    create: Callable[[], Any], run: Run, meet: Callable[[], None], peak: MemoryPeak | None = None
) -> dict[str, Any]:
    """Run an epoch, or ``run.stop_after`` batches. ``meet`` waits for the other ranks."""
    if peak is None:
        peak = MemoryPeak()
        peak.start()
    loader = create()
    meet()
    begin = time.monotonic()
    first, cpu = None, 0.0
    ids: list[int] = []
    touched = 0
    for number, (numbers, images) in enumerate(_batches(loader), start=1):
        if first is None:
            first, cpu = time.monotonic(), _cpu_seconds()
        ids.extend(numbers)
        touched += sum(int(image[0].sum()) if run.decoded else image[0] for image in images)
        if number == run.stop_after:
            import pickle

            run.find_state_file(run.rank).write_bytes(pickle.dumps(loader.state()))
            break
    end = time.monotonic()
    peak.update()
    return {
        # A loader that assigns rows on request can leave a slow rank without any.
        "first_batch": None if first is None else first - run.started,
        "begin": begin,
        "end": end,
        "cpu": _cpu_seconds() - cpu if first is not None else 0.0,
        "anonymous_mb": peak.nbytes / 1e6,
        "ids": [int(number) for number in ids],
        "touched": touched,
    }


def _cpu_seconds() -> float:
    import os

    times = os.times()
    return time.process_time() + times.children_user + times.children_system


def _batches(loader: Any) -> Iterator[Batch]:
    return iter(loader)


def geoguessr_row(row: dict[str, Any]) -> tuple[int, bytes]:
    """Return the number and the encoded image of a row."""
    return row["extra_info"]["index"], row["images"][0]["bytes"]


def rows_of(files: Iterable[str], batch_size: int = 256) -> Iterator[tuple[int, bytes]]:
    """Yield all rows, for peers that convert them to their own format."""
    import pyarrow.parquet as pq

    for path in files:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size, columns=["images", "extra_info"]):
                yield from map(geoguessr_row, batch.to_pylist())


def pairs_to_batch(run: Run) -> Callable[[list[tuple[int, bytes]]], Batch]:
    """Return a collate function for rows that are (number, encoded image)."""

    def collate(pairs: list[tuple[int, bytes]]) -> Batch:
        return [number for number, _ in pairs], run.images(image for _, image in pairs)

    return collate
