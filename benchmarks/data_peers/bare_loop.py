"""No loader: pyarrow in file order, without shuffling or state. Ranks take row groups in turn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from data_peers.common import Batch, Run, geoguessr_row


class Loader:
    def __init__(self, run: Run) -> None:
        self._run = run

    def __iter__(self) -> Iterator[Batch]:
        run = self._run
        pending: list[dict[str, Any]] = []
        for batch in self._iter_batches():
            pending += batch.to_pylist()
            while len(pending) >= run.batch_size:
                yield self._convert(pending[: run.batch_size])
                del pending[: run.batch_size]
        if pending:
            yield self._convert(pending)

    def _convert(self, rows: list[dict[str, Any]]) -> Batch:
        numbers, images = zip(*map(geoguessr_row, rows), strict=True)
        return list(numbers), self._run.images(images)

    def _iter_batches(self) -> Iterator[Any]:
        """Yield record batches: of whole row groups, or every Nth one if they are too few."""
        import pyarrow.parquet as pq

        run, number = self._run, 0
        is_single = len(run.files) == 1 and pq.read_metadata(run.files[0]).num_row_groups == 1
        for path in run.files:
            with pq.ParquetFile(path) as file:
                for group in range(file.num_row_groups):
                    number += 1
                    if not is_single and number % run.world_size != run.rank:
                        continue
                    batches = file.iter_batches(
                        run.batch_size, row_groups=[group], columns=["images", "extra_info"]
                    )
                    for index, batch in enumerate(batches):
                        if not is_single or index % run.world_size == run.rank:
                            yield batch
