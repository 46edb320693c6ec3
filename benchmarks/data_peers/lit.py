"""LitData: rows converted to its chunks, StreamingDataset and StreamingDataLoader."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

from data_peers.common import Batch, Run, rows_of


def _rows_of_file(path: str) -> Iterator[dict[str, Any]]:
    for number, image in rows_of([path]):
        yield {"number": number, "image": image}


def prepare(run: Run) -> None:
    from litdata import optimize

    out = run.scratch / "litdata"
    shutil.rmtree(out, ignore_errors=True)
    optimize(
        fn=_rows_of_file,
        inputs=run.files,
        output_dir=str(out),
        chunk_bytes="64MB",
        num_workers=1,
    )


class Loader:
    def __init__(self, run: Run) -> None:
        os.environ.update(
            RANK=str(run.rank),
            LOCAL_RANK=str(run.rank),
            WORLD_SIZE=str(run.world_size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(run.port),
        )
        import torch.distributed as dist
        from litdata import StreamingDataLoader, StreamingDataset

        # Without a process group every rank would be given the same rows.
        dist.init_process_group("gloo", rank=run.rank, world_size=run.world_size)
        rows = StreamingDataset(
            str(run.scratch / "litdata"), shuffle=True, seed=run.seed, drop_last=False
        )

        def collate(batch: list[dict[str, Any]]) -> Batch:
            return [row["number"] for row in batch], run.images(row["image"] for row in batch)

        self._loader = StreamingDataLoader(
            rows, batch_size=run.batch_size, collate_fn=collate, drop_last=False
        )
        if run.resumed_ranks:
            self._loader.load_state_dict(run.state)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._loader)

    def state(self) -> Any:
        return self._loader.state_dict()
