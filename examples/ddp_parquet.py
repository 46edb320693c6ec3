"""Train with DDP on Parquet files. Each rank reads its own rows of the files.

python examples/ddp_parquet.py                    # 2 workers, files in a temporary directory
python examples/ddp_parquet.py --workers 4
python examples/ddp_parquet.py --files my_files/  # columns: features, label
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.nn import functional

from miniray.data import ParquetDataset
from miniray.train import Checkpoint, DDPTrainer

FEATURES = 8


def write_files(folder, files=4, rows=500):
    """Write rows whose label says whether the sum of their features is positive."""
    rng = np.random.default_rng(0)
    for number in range(files):
        features = rng.normal(size=(rows, FEATURES)).astype("float32")
        labels = (features.sum(1) > 0).astype("int64")
        # Lists of a fixed length become tensors.
        column = pa.FixedSizeListArray.from_arrays(features.ravel(), FEATURES)
        table = pa.table({"features": column, "label": labels})
        pq.write_table(table, folder / f"part-{number}.parquet")


class Classifier:
    def __init__(self, worker_id):
        self.model = torch.nn.Linear(FEATURES, 2)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)

    def training_step(self, batch, batch_idx):
        logits = self.model(batch["features"])
        accuracy = (logits.argmax(1) == batch["label"]).float().mean()
        return {"loss": functional.cross_entropy(logits, batch["label"]), "accuracy": accuracy}

    validation_step = training_step


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2, help="number of workers")
    parser.add_argument("--files", type=Path, help="directory with Parquet files")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.files or Path(temporary)
        if arguments.files is None:
            write_files(folder)
        with DDPTrainer(
            arguments.workers,
            worker=Classifier,
            data=ParquetDataset(folder, shuffle=True, seed=0),
            val_data=ParquetDataset(folder),
            batch_size=25,
            seed=0,
            eval_interval=1,
            callbacks=[Checkpoint(every_steps=10)],
        ) as trainer:
            result = trainer.train(epochs=3)
            print(f"Rows per epoch: {result['num_samples']}")
            print(f"Accuracy: {result['val_accuracy']:.1%}")
            print("Checkpoint:", result.checkpoint)
