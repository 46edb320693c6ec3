"""Ray Data: read_parquet, files and a buffer of 1000 rows shuffled, streaming_split to actors."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from data_peers.common import Batch, Run, geoguessr_row, measure


class Loader:
    def __init__(self, run: Run, shard: Any) -> None:
        self._run, self._shard = run, shard

    def __iter__(self) -> Iterator[Batch]:
        batches = self._shard.iter_batches(
            batch_size=self._run.batch_size,
            batch_format="pyarrow",
            local_shuffle_buffer_size=1000,
            local_shuffle_seed=self._run.seed,
        )
        for batch in batches:
            numbers, images = zip(*map(geoguessr_row, batch.to_pylist()), strict=True)
            yield list(numbers), self._run.images(images)


def drive(run: Run, meet: Callable[[], None]) -> list[dict[str, Any]]:
    import ray

    path = os.pathsep.join([str(Path(__file__).resolve().parent.parent), *sys.path])
    ray.init(
        num_cpus=run.world_size + 2,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": path}},
    )
    ray.data.DataContext.get_current().enable_progress_bars = False

    class Rank:
        def __init__(self, run: Run, shard: Any) -> None:
            self._run, self._loader = run, Loader(run, shard)

        def ready(self) -> None:
            """Return when the actor is running."""

        def epoch(self) -> dict[str, Any]:
            return measure(lambda: self._loader, self._run, lambda: None)

    try:
        rows = ray.data.read_parquet(run.files, columns=["images", "extra_info"], shuffle="files")
        shards = rows.streaming_split(run.world_size, equal=False)
        actors = [
            ray.remote(Rank).remote(replace(run, rank=rank), shard)
            for rank, shard in enumerate(shards)
        ]
        ray.get([actor.ready.remote() for actor in actors])
        meet()
        return ray.get([actor.epoch.remote() for actor in actors])  # type: ignore[no-any-return]
    finally:
        ray.shutdown()
