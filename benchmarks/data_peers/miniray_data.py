"""miniray.data: Parquet files in window order, or in global order through the row cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from data_peers.common import Batch, Run, decode, geoguessr_row
from miniray.data import DataLoader, ParquetDataset


def _decoded(row: dict[str, Any]) -> tuple[int, Any]:
    number, image = geoguessr_row(row)
    return number, decode(image)


def _batch(pairs: list[tuple[int, Any]]) -> Batch:
    return [number for number, _ in pairs], [image for _, image in pairs]


class Loader:
    def __init__(self, run: Run) -> None:
        rows = ParquetDataset(
            run.files,
            columns=["images", "extra_info"],
            rank=run.rank,
            world_size=run.world_size,
            shuffle=run.order,  # type: ignore[arg-type]
            seed=run.seed,
        )
        self._decoded = run.decoded
        # Decoded images stay a list, as with the other loaders.
        late: dict[str, Any] = {"transform": _decoded, "collate_fn": _batch}
        self._loader = DataLoader(rows, run.batch_size, **(late if run.decoded else {}))
        if run.resumed_ranks:
            self._loader.load_state_dict(run.state)

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._loader:
            if self._decoded:
                yield batch
            else:
                numbers = [row["index"] for row in batch["extra_info"]]
                yield numbers, [images[0]["bytes"] for images in batch["images"]]

    def state(self) -> Any:
        return self._loader.state_dict()
