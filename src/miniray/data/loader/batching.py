"""Group rows of similar length into batches of as many rows as a number of tokens allows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from miniray.data.loader.blocks import BlockBuffer
from miniray.data.loader.columns import NameRow, RowId, is_record_batch, to_rows
from miniray.data.locations import Int64s
from miniray.data.plan.permutation import Permutation, derive_key
from miniray.errors import RowError

if TYPE_CHECKING:
    from miniray.data.dataset import Dataset


class TokenBatches:
    """Cuts chunks of rows into batches of at most ``tokens`` after padding to the longest row.

    The rows of a chunk are sorted by length, cut into batches, and these come in random order.
    ``length`` is a column with the number of tokens or the tokens, or a function of a row.
    """

    def __init__(self, tokens: int, length: str | Callable[[Any], int], chunk_rows: int) -> None:
        self._tokens, self._length, self.chunk_rows = tokens, length, chunk_rows

    def create_buffer(self, dataset: Dataset) -> BlockBuffer:
        """Return a buffer for the columns from which lengths are found."""
        columns = [self._length] if isinstance(self._length, str) else None
        return BlockBuffer(dataset.sources, dataset.memory_budget // 2, columns)

    def read(self, dataset: Dataset, positions: Int64s, buffer: BlockBuffer) -> list[list[int]]:
        """Return the batches of the chunk at ``positions``, whose lengths are read."""
        return self.cut(dataset, buffer.read_rows(dataset.locate(positions)), positions)

    def cut(self, dataset: Dataset, rows: Any, positions: Int64s) -> list[list[int]]:
        """Return the batches of a chunk as indices into its rows."""

        def name_row(index: int) -> RowId:
            return dataset.name_positions(positions[index : index + 1])[0]

        lengths = self._find_lengths(rows, name_row)
        longest = int(np.argmax(lengths))
        if lengths[longest] > self._tokens:
            file, row = name_row(longest)
            raise RowError(
                f"{file}, row {row} has {lengths[longest]} tokens, but a batch can have at most"
                f" {self._tokens}. Filter or truncate such rows, or use larger batches.",
                file,
                row,
            )
        batches: list[list[int]] = []
        # Ascending, so that the newest row is the longest.
        for i in sorted(range(len(lengths)), key=lengths.__getitem__):
            if batches and (len(batches[-1]) + 1) * lengths[i] <= self._tokens:
                batches[-1].append(i)
            else:
                batches.append([i])
        seed = dataset.seed or 0
        key = derive_key(seed, "tokens", dataset.epoch, int(positions[0]), len(positions))
        order = Permutation(len(batches), key).map_positions(np.arange(len(batches)))
        return [batches[i] for i in order.tolist()]

    def _find_lengths(self, rows: Any, name_row: NameRow) -> list[int]:
        if isinstance(self._length, str) and is_record_batch(rows):
            rows = rows.select([self._length])
        lengths = []
        for i, row in enumerate(to_rows(rows, name_row)):
            try:
                lengths.append(self._find_length(row))
            except Exception as error:  # user code can raise anything
                file, number = name_row(i)
                raise RowError(
                    f"{file}, row {number}: length= raised {type(error).__name__}: {error}",
                    file,
                    number,
                ) from error
        return lengths

    def _find_length(self, row: Any) -> int:
        if not isinstance(self._length, str):
            return int(self._length(row))
        value = row[self._length]
        return len(value) if hasattr(value, "__len__") else int(value)
