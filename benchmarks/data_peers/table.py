"""A pyarrow table in each rank's memory behind torch's DataLoader and DistributedSampler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from data_peers.common import Batch, Run, geoguessr_row, pairs_to_batch


class Loader:
    def __init__(self, run: Run) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq
        from torch.utils.data import DataLoader, Dataset, DistributedSampler

        columns = ["images", "extra_info"]
        table = pa.concat_tables([pq.read_table(path, columns=columns) for path in run.files])

        class Rows(Dataset):  # type: ignore[type-arg]
            def __len__(self) -> int:
                return int(table.num_rows)

            def __getitem__(self, index: int) -> tuple[int, bytes]:
                return geoguessr_row(table.slice(index, 1).to_pylist()[0])

        rows = Rows()
        sampler: Any = DistributedSampler(
            rows, run.world_size, run.rank, shuffle=True, seed=run.seed
        )
        self._loader = DataLoader(
            rows, batch_size=run.batch_size, sampler=sampler, collate_fn=pairs_to_batch(run)
        )

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._loader)
