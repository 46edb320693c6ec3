"""A pass over parquet files that is stopped in the middle and goes on with fewer workers.

Three workers read their own rows, decode photos late, and stop after a few steps. Two others go on
from the state that one of the three has saved. Together they have seen every photo exactly once.

    python examples/data_elastic.py [--photos 1000]
"""

import argparse
import io
import json
import tempfile
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

import miniray
from miniray.data import DataLoader, ParquetDataset


def write_photos(folder, count):
    """``count`` small JPEG photos in four files."""
    random = np.random.default_rng(0)
    for part, ids in enumerate(np.array_split(np.arange(count), 4)):
        photos = []
        for _ in ids:
            buffer = io.BytesIO()
            pixels = random.integers(0, 255, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).resize((64, 64)).save(buffer, "JPEG")
            photos.append(buffer.getvalue())
        table = pa.table({"id": ids, "photo": photos})
        pq.write_table(table, folder / f"photos-{part}.parquet", row_group_size=32)


def decode(row):
    with Image.open(io.BytesIO(row["photo"])) as photo:
        return {"id": row["id"], "pixels": np.asarray(photo)}


@miniray.remote
class Reader:
    def __init__(self, dataset, rank, world_size, state=None):
        self.loader = DataLoader(dataset.shard(rank, world_size), 16, transform=decode)
        if state is not None:
            self.loader.load_state_dict(json.loads(state))

    def read(self, steps=None):
        """Ids of the photos of some steps, or of all that are left; and the state after them."""
        seen = []
        for step, batch in enumerate(self.loader, 1):
            assert batch["pixels"].shape[1:] == (64, 64, 3)
            seen += batch["id"].tolist()
            if step == steps:
                break
        return seen, json.dumps(self.loader.state_dict())

    def memory(self):
        return psutil.Process().memory_full_info().uss


def run(dataset, world_size, state=None, steps=None):
    readers = [Reader.remote(dataset, rank, world_size, state) for rank in range(world_size)]
    results = miniray.get([reader.read.remote(steps) for reader in readers])
    largest = max(miniray.get([reader.memory.remote() for reader in readers]))
    rows = [len(seen) for seen, _ in results]
    print(f"{world_size} workers read {rows} photos, the largest has {largest / 1e6:.0f} MB")
    for reader in readers:
        miniray.kill(reader)
    return [row for seen, _ in results for row in seen], results[0][1]


def main(count):
    with tempfile.TemporaryDirectory() as folder:
        write_photos(Path(folder), count)
        dataset = ParquetDataset(folder, shuffle=True, seed=1)
        with miniray.init(num_workers=3):
            first, state = run(dataset, 3, steps=max(1, count // 100))
            second, _ = run(dataset, 2, state=state)
    print(f"state: {len(state)} bytes")
    print(f"every photo exactly once: {sorted(first + second) == list(range(count))}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--photos", type=int, default=1000)
    main(parser.parse_args().photos)
