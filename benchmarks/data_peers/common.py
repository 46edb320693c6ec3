"""The measuring code that every loader of ``benchmarks/data.py`` runs under, the same for all.

A peer is a module beside this one. It has ``Loader(run)``, whose iterator gives one epoch as
batches of (row numbers, images), images as bytes or, where ``run.decoded`` is set, as arrays; and,
where it applies:

- ``prepare(run)``: what a user does once before the first training (conversion, cache).
- ``Loader.state()`` and ``run.state``: its own means to go on in mid-epoch. None where it has none.
- ``drive(run, meet)``: for a peer that starts its ranks itself.

What is imported here counts in every loader's time to its first batch, so it is little: numpy and
Pillow are imported when something is decoded.
"""

from __future__ import annotations

import io
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
    stop_after: int | None = None  # batches; the state is kept then
    resume: bool = False

    @property
    def scratch(self) -> Path:
        """Where the loader may keep what it prepares."""
        from pathlib import Path

        return Path(self.folder)

    @property
    def state_file(self) -> Path:
        return self.scratch / f"state-{self.loader}-{self.rank}.pickle"

    @property
    def state(self) -> Any:
        """What ``Loader.state()`` gave when the run before this one stopped; None for a new run."""
        import pickle

        return pickle.loads(self.state_file.read_bytes()) if self.resume else None

    def images(self, encoded: Iterable[bytes]) -> list[Any]:
        """As bytes or decoded, as this measurement wants them."""
        return [decode(image) for image in encoded] if self.decoded else list(encoded)


def decode(data: bytes) -> np.ndarray:
    """JPEG to 224 x 224 x 3."""
    import numpy as np
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR))


def measure(loader: Any, run: Run, meet: Callable[[], None]) -> dict[str, Any]:
    """One epoch, or the part of it up to ``run.stop_after``. ``meet`` waits for the other ranks."""
    meet()
    begin, cpu = time.monotonic(), time.process_time()
    first = None
    ids: list[int] = []
    touched = 0
    for number, (numbers, images) in enumerate(_batches(loader), start=1):
        if first is None:
            first = time.monotonic()
        ids.extend(numbers)
        touched += sum(int(image[0].sum()) if run.decoded else image[0] for image in images)
        if number == run.stop_after:
            import pickle

            run.state_file.write_bytes(pickle.dumps(loader.state()))
            break
    end = time.monotonic()
    return {
        # A loader that deals rows out as they are asked for may leave a slow rank without any.
        "first_batch": None if first is None else first - run.started,
        "begin": begin,
        "end": end,
        "cpu": time.process_time() - cpu,
        "ids": [int(number) for number in ids],
        "touched": touched,
    }


def _batches(loader: Any) -> Iterator[Batch]:
    return iter(loader)


def geoguessr_row(row: dict[str, Any]) -> tuple[int, bytes]:
    """(number, encoded image) of a row as parquet has it."""
    return row["extra_info"]["index"], row["images"][0]["bytes"]


def rows_of(files: Iterable[str], batch_size: int = 256) -> Iterator[tuple[int, bytes]]:
    """All rows, for peers that convert them to a format of their own."""
    import pyarrow.parquet as pq

    for path in files:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size, columns=["images", "extra_info"]):
                yield from map(geoguessr_row, batch.to_pylist())


def pairs_to_batch(run: Run) -> Callable[[list[tuple[int, bytes]]], Batch]:
    """A collate function for rows that are (number, encoded image)."""

    def collate(pairs: list[tuple[int, bytes]]) -> Batch:
        return [number for number, _ in pairs], run.images(image for _, image in pairs)

    return collate
