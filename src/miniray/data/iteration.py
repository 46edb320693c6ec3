"""One pass over a loader's batches: takes them from the pipeline and records what was delivered."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from miniray.data.decode import Decoder, is_skipped
from miniray.data.pipeline import Pipeline

if TYPE_CHECKING:
    from miniray.data.loader import DataLoader


class LoaderIterator(Iterator[Any]):
    """One pass over a loader's batches."""

    def __init__(self, loader: DataLoader) -> None:
        self._loader = loader
        dataset = loader.dataset
        dataset.restart()
        plan = loader._plan()
        self._alone = plan.alone
        budget = loader.memory_budget
        cache = dataset.new_cache()
        decoder = Decoder(
            dataset,
            cache,
            transform=loader.transform,
            collate_fn=loader.collate_fn,
            format=loader._format,
            on_error=loader._on_error,
            skipped=loader.skipped,
            pool=loader._process_pool(),
        )
        self._pipeline: Pipeline | None = Pipeline(
            dataset,
            iter(plan),
            cache,
            decoder,
            prefetch=loader.prefetch,
            workers=loader.decode_workers,
            budget=budget // 2,
        )
        self._epoch = dataset.epoch
        self._displaced = False
        # The threads know the pipeline and not this object: once nobody has it, they end.
        self._finalizer = weakref.finalize(self, Pipeline.close, self._pipeline)

    def __iter__(self) -> LoaderIterator:
        return self

    def __next__(self) -> Any:
        while self._pipeline is not None:
            try:
                task = self._pipeline.take()
            except BaseException:
                self.close()
                raise
            if task is None:
                self.close()
                self._finish()
                break
            # A batch less than other ranks: from here on they are apart.
            self._alone = self._alone or is_skipped(task.result)
            self._loader.dataset.record(task.batch.taken, self._alone, task.batch.last)
            if not is_skipped(task.result):
                return task.result
        if self._displaced:
            raise RuntimeError(
                "this loop cannot go on: the loader was iterated again, or had set_epoch or"
                " load_state_dict called, meanwhile. Use loader.shard(rank, world_size) for a"
                " second loader over the same rows"
            )
        raise StopIteration

    def _finish(self) -> None:
        loader = self._loader
        loader.dataset.finish_epoch()
        if loader.skipped.count:
            warnings.warn(
                f"rows skipped by epoch {self._epoch}'s end: {loader.skipped.count},"
                f" {loader.skipped.by_file()}",
                RuntimeWarning,
                stacklevel=3,
            )

    def __len__(self) -> int:
        return len(self._loader)

    def close(self, displaced: bool = False) -> None:
        """End the threads. What was delivered stays delivered.

        ``displaced``: not at the end of the epoch, and unknown to the loop, which must not take it
        for the end.
        """
        self._displaced = displaced and self._pipeline is not None
        self._pipeline = None
        self._finalizer()
