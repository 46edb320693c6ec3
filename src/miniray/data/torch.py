"""The same plan for torch's own loader: Lightning, Accelerate, plain DDP.

- ``TorchDataset`` and ``ShardSampler``: map style, in place of ``DistributedSampler``.
- ``TorchIterableDataset``: for loaders with worker processes, which share the rank's rows.
- ``LightningLoader``: our own loader in the hands of a trainer that counts its batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.utils.data as torch_data

from miniray.checks import suggest_options
from miniray.data.dataset import ROWS_AT_A_TIME, Dataset, checked_indices
from miniray.data.loader.loader import DataLoader
from miniray.data.plan.shard import find_rank


@suggest_options()
class TorchDataset(torch_data.Dataset[Any]):  # type: ignore[misc]
    """All rows of a dataset in map style, in the order of the data and whatever its rank is.

    Which rank gets which of them when is the sampler's business (``ShardSampler``).
    """

    def __init__(self, dataset: Dataset, transform: Any = None) -> None:
        self.dataset = dataset.shard(0, 1)
        self.transform = transform

    def __len__(self) -> int:
        return self.dataset.distinct_rows

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        asked = checked_indices(indices, len(self))
        rows = self.dataset.rows_at(self.dataset.places_of_ordinals(asked))
        return rows if self.transform is None else [self.transform(row) for row in rows]


@suggest_options()
class ShardSampler(torch_data.Sampler[int]):  # type: ignore[misc]
    """In place of ``DistributedSampler``: a rank's rows, exactly once, resumable on other ranks.

    ``data`` is a ``TorchDataset``. As with torch's, call ``set_epoch`` for each epoch. By default,
    rank and world size are those of the process group, or else those that miniray's trainers and
    torchrun set in the environment. State and epochs are
    as of a dataset of ``miniray.data``; ``batch_size`` must be the loader's for the state to speak
    for other ranks, and ``state_dict(batches=...)`` says how many batches the training loop has
    had: a loader with workers asks for indices ahead of time.
    """

    def __init__(
        self,
        data: TorchDataset,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        batch_size: int = 1,
    ) -> None:
        rank, world_size = _process_group(rank, world_size)
        self._shard = data.dataset.shard(rank, world_size)
        self._batch_size = batch_size

    @property
    def epoch(self) -> int:
        """The epoch under way, from 0."""
        return self._shard.epoch

    def __len__(self) -> int:
        return len(self._shard)

    def __iter__(self) -> Iterator[int]:
        shard = self._shard
        count = len(shard)
        for start in range(0, count, 4096):
            index = range(start, min(count, start + 4096))
            yield from shard.ordinals(shard.positions(index))

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; nothing happens where that is the current one."""
        self._shard.set_epoch(int(epoch))

    def state_dict(self, batches: int) -> dict[str, Any]:
        """The state after the loop has had so many batches since the epoch was begun or loaded."""
        self._shard.record(batches * self._batch_size)
        return self._shard.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a ``state_dict``, also one taken on another number of ranks."""
        self._shard.load_state_dict(state)


@suggest_options()
class TorchIterableDataset(torch_data.IterableDataset[Any]):  # type: ignore[misc]
    """A rank's rows in order, split over the worker processes of a torch ``DataLoader``.

    Each worker reads a contiguous part of the rank's rows. Without workers an epoch follows the
    other; with them call ``set_epoch`` for each, as with torch's samplers. State is exact without
    workers; with ``torchdata.StatefulDataLoader`` it is, with the same number of workers.
    """

    def __init__(self, dataset: Dataset, transform: Any = None) -> None:
        self.dataset = dataset
        self.transform = transform
        self._taken = 0
        self._skip = 0
        # How often ``set_epoch`` was called, and with what: persistent workers were made before.
        self._calls = 0
        self._last_call = torch.zeros(2, dtype=torch.int64).share_memory_()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._last_call.share_memory_()

    @property
    def is_sharded(self) -> bool:
        """Whether the dataset was created with ``rank`` and ``world_size``, or sharded since."""
        return self.dataset.is_sharded

    @property
    def has_started(self) -> bool:
        """Whether iteration has started in this process."""
        return self.dataset.has_started

    def shard(self, rank: int, world_size: int) -> TorchIterableDataset:
        """Return the same dataset with the rows of a different rank."""
        return TorchIterableDataset(self.dataset.shard(rank, world_size), self.transform)

    def __len__(self) -> int:
        return len(self.dataset)

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; nothing happens where that is the current one."""
        self.dataset.set_epoch(epoch)
        self._calls += 1
        self._last_call.copy_(torch.tensor([self._calls, epoch]))

    def __iter__(self) -> Iterator[Any]:
        info = torch_data.get_worker_info()
        calls, epoch = self._last_call.tolist()
        if info is None:
            self.dataset.restart()
        elif calls != self._calls:
            self._calls = calls
            self.dataset.set_epoch(epoch)
        count = len(self.dataset)
        number, workers = (0, 1) if info is None else (info.id, info.num_workers)
        start = count * number // workers + self._skip
        stop = count * (number + 1) // workers
        self._taken, self._skip = self._skip, 0
        for begin in range(start, stop, ROWS_AT_A_TIME):
            index = range(begin, min(stop, begin + ROWS_AT_A_TIME))
            for row in self.dataset.rows_at(self.dataset.places(index)):
                self._taken += 1
                if info is None:
                    self.dataset.record(self._taken, complete=self._taken == count)
                yield row if self.transform is None else self.transform(row)
        self._taken = 0
        if info is None:
            self.dataset.finish_epoch()

    def state_dict(self) -> dict[str, Any]:
        """How far the epoch is; inside a worker process of a loader, how far that worker is."""
        info = torch_data.get_worker_info()
        if info is None:
            return self.dataset.state_dict()
        return {"worker": info.id, "workers": info.num_workers, "taken": self._taken}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a ``state_dict``; ``ValueError`` for one of another worker."""
        info = torch_data.get_worker_info()
        if info is None:
            self.dataset.load_state_dict(state)
            return
        if (state["worker"], state["workers"]) != (info.id, info.num_workers):
            raise ValueError(
                f"the state is of worker {state['worker']} of {state['workers']}, and this is"
                f" {info.id} of {info.num_workers}: resume with as many worker processes"
            )
        self._skip = int(state["taken"])


@suggest_options()
class LightningLoader:
    """A ``miniray.data.DataLoader`` for Lightning, which then resumes in mid-epoch exactly.

    Lightning keeps the loader's state in its checkpoints, and goes on counting the batches of the
    epoch where it left off. So ``len`` is of the whole epoch here, with those delivered before a
    state was loaded, where that of the loader is of what is left. On another number of ranks the
    next epoch has another length: set ``Trainer(reload_dataloaders_every_n_epochs=1)``.
    """

    def __init__(self, loader: DataLoader) -> None:
        self.loader = loader
        self._before = (loader.epoch, 0)  # batches of that epoch in earlier runs
        self._delivered = (loader.epoch, 0)  # and those of this one with them

    def _earlier(self) -> int:
        epoch, count = self._before
        return count if epoch == self.loader.epoch else 0

    def __len__(self) -> int:
        return self._earlier() + len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.loader)
        return self._counted(batches, self.loader.epoch, self._earlier())

    def _counted(self, batches: Iterator[Any], epoch: int, earlier: int) -> Iterator[Any]:
        for number, batch in enumerate(batches, earlier + 1):
            self._delivered = epoch, number
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """The loader's, with the number of batches that the epoch has had."""
        state = self.loader.state_dict()
        epoch, count = self._delivered
        return {**state, "batches": count if epoch == state["epoch"] else 0}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a ``state_dict``, also one taken on another number of ranks."""
        self.loader.load_state_dict(state)
        self._before = self._delivered = int(state["epoch"]), int(state["batches"])


def _process_group(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if (rank is None) != (world_size is None):
        raise ValueError("give both rank and world_size, or none of them")
    if rank is not None and world_size is not None:
        return rank, world_size
    found = find_rank()
    if found is not None:
        return found
    raise ValueError(
        "there is no process group to ask for the rank: call init_process_group first, or pass rank"
        " and world_size"
    )
