"""Mosaic Streaming: rows converted to MDS shards, StreamingDataset with its own shuffle."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import shutil
import sys
import types
from collections.abc import Iterator
from typing import Any

from data_peers.common import Batch, Run, rows_of


def _replace_torchvision() -> None:
    """Let Mosaic be imported without torchvision, which only its image datasets use."""
    if importlib.util.find_spec("torchvision") is not None:
        return
    for name in ("", ".datasets", ".transforms", ".transforms.functional"):
        module: Any = types.ModuleType(f"torchvision{name}")
        module.__path__ = []
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        module.VisionDataset, module.to_tensor = type("VisionDataset", (), {}), None
        sys.modules[module.__name__] = module


_replace_torchvision()


def prepare(run: Run) -> None:
    from streaming import MDSWriter

    out = run.scratch / "mosaic"
    shutil.rmtree(out, ignore_errors=True)
    with MDSWriter(out=str(out), columns={"number": "int", "image": "bytes"}) as writer:
        for number, image in rows_of(run.files):
            writer.write({"number": number, "image": image})


class Loader:
    def __init__(self, run: Run) -> None:
        os.environ.update(
            RANK=str(run.rank),
            LOCAL_RANK=str(run.rank),
            WORLD_SIZE=str(run.world_size),
            LOCAL_WORLD_SIZE=str(run.world_size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(run.port),
        )
        from streaming import StreamingDataLoader, StreamingDataset

        self._rows = StreamingDataset(
            local=str(run.scratch / "mosaic"),
            batch_size=run.batch_size,
            shuffle=True,
            shuffle_seed=run.seed,
        )

        def collate(batch: list[dict[str, Any]]) -> Batch:
            return [row["number"] for row in batch], run.images(row["image"] for row in batch)

        self._loader = StreamingDataLoader(
            self._rows, batch_size=run.batch_size, collate_fn=collate
        )
        # It counts the rows of a batch itself, which it can only do for tensors and dicts of them.
        self._loader._get_batch_size = lambda batch: len(batch[0])
        if run.resumed_ranks:
            self._loader.load_state_dict(run.state)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._loader)

    def state(self) -> Any:
        return self._loader.state_dict()
