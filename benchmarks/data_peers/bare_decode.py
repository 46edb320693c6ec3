"""No loader: decode a rank's images, which are in memory, one after the other."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from data_peers.common import Batch, Run, rows_of


class Loader:
    def __init__(self, run: Run) -> None:
        self._run = run
        self._rows = list(itertools.islice(rows_of(run.files), run.rank, None, run.world_size))

    def __iter__(self) -> Iterator[Batch]:
        size = self._run.batch_size
        for start in range(0, len(self._rows), size):
            numbers, images = zip(*self._rows[start : start + size], strict=True)
            yield list(numbers), self._run.images(images)
