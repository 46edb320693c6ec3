"""Datasets and samplers for torch's loader: Lightning, Accelerate, plain DDP.

- ``TorchDataset`` and ``ShardSampler``: map style, in place of ``DistributedSampler``.
- ``TorchIterableDataset``: for loaders with worker processes, which divide the rank's rows.
- ``LightningLoader``: a loader of ``miniray.data`` for a trainer that counts its batches.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.utils.data as torch_data

from miniray.checks import suggest_options
from miniray.data.dataset import Dataset, check_indices
from miniray.data.loader.loader import DataLoader
from miniray.data.plan.shard import find_rank

_ROWS_AT_A_TIME = 256


@suggest_options()
class TorchDataset(torch_data.Dataset[Any]):  # type: ignore[misc]
    """All selected rows of a dataset in map style, in data order.

    ``ShardSampler`` assigns them to ranks.
    """

    def __init__(self, dataset: Dataset, transform: Any = None) -> None:
        self.dataset = dataset.shard(0, 1)
        self.transform = transform
        #: Set by worker processes of loaders.
        self._has_workers = torch.zeros(1, dtype=torch.bool).share_memory_()
        self._has_warned = False

    def __len__(self) -> int:
        return self.dataset.distinct_rows

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        if torch_data.get_worker_info() is not None:
            self._has_workers[0] = True
        rows = self.dataset.read_ordinals(check_indices(indices, len(self)))
        return rows if self.transform is None else [self.transform(row) for row in rows]

    def warn_if_ahead(self) -> None:
        """Warn if loader workers have requested indices ahead of the training loop."""
        module = str(sys._getframe(2).f_globals.get("__name__"))
        if self._has_workers[0] and not self._has_warned and not module.startswith("torchdata"):
            self._has_warned = True
            warnings.warn(
                "The loader has workers, which request indices ahead, so the state of the sampler"
                " is ahead of the training loop. Use torchdata.StatefulDataLoader, or"
                " num_workers=0.",
                RuntimeWarning,
                stacklevel=3,
            )


@suggest_options()
class ShardSampler(torch_data.Sampler[int]):  # type: ignore[misc]
    """A rank's rows, exactly once, resumable on any number of ranks, instead of a sampler of torch.

    Follows the ``Stateful`` protocol of torchdata. With ``torchdata.StatefulDataLoader``, the state
    is exact for any number of loader workers. A ``torch.utils.data.DataLoader`` with workers
    requests indices ahead, so the state is exact only with ``num_workers=0``. As with
    ``DistributedSampler``, call ``set_epoch`` for each epoch; a pass to the end starts the next
    epoch.

    Args:
        data: Dataset in map style.
        rank: Rank of this process; defaults to that of the process group, or else of the run in
            the environment that miniray's trainers and torchrun set.
        world_size: Number of ranks, with the same defaults.
    """

    def __init__(
        self, data: TorchDataset, *, rank: int | None = None, world_size: int | None = None
    ) -> None:
        rank, world_size = _find_process_group(rank, world_size)
        self._data = data
        self._shard = data.dataset.shard(rank, world_size)

    @property
    def epoch(self) -> int:
        """Current epoch, from 0."""
        return self._shard.epoch

    def __len__(self) -> int:
        return len(self._shard)

    def __iter__(self) -> Iterator[int]:
        shard = self._shard
        shard.start_pass()
        count = len(shard)
        for start in range(0, count, 4096):
            indices = np.arange(start, min(count, start + 4096))
            ordinals = shard.find_ordinals(shard.find_positions(indices)).tolist()
            for number, ordinal in enumerate(ordinals, start + 1):
                # The shares of other ranks can be one row longer.
                shard.record_taken(number + (number == count), complete=number == count)
                yield ordinal
        shard.finish_epoch()

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch, unless it is the current one or its state was loaded."""
        self._shard.set_epoch(int(epoch))

    def state_dict(self) -> dict[str, Any]:
        """Return the progress of the epoch: the indices that were requested so far."""
        self._data.warn_if_ahead()
        return self._shard.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a ``state_dict`` that was saved on any number of ranks."""
        self._shard.load_state_dict(state)


@suggest_options()
class TorchIterableDataset(torch_data.IterableDataset[Any]):  # type: ignore[misc]
    """A rank's rows in order, divided among the worker processes of a torch ``DataLoader``.

    Each worker reads a contiguous part of the rank's rows. Without workers, a pass to the end
    starts the next epoch; with workers, call ``set_epoch`` for each epoch. The state is exact
    without workers, and with the same number of workers of ``torchdata.StatefulDataLoader``.
    """

    def __init__(self, dataset: Dataset, transform: Any = None) -> None:
        self.dataset = dataset
        self.transform = transform
        self._taken = 0
        self._skip = 0
        # Number of calls of ``set_epoch`` and the last epoch, for persistent workers.
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
        """Go to the start of an epoch, unless it is the current one or its state was loaded."""
        self.dataset.set_epoch(epoch)
        self._calls += 1
        self._last_call.copy_(torch.tensor([self._calls, epoch]))

    def __iter__(self) -> Iterator[Any]:
        info = torch_data.get_worker_info()
        calls, epoch = self._last_call.tolist()
        if info is None:
            self.dataset.start_pass()
        elif calls != self._calls:
            self._calls = calls
            self.dataset.set_epoch(epoch)
        count = len(self.dataset)
        number, workers = (0, 1) if info is None else (info.id, info.num_workers)
        start = count * number // workers + self._skip
        stop = count * (number + 1) // workers
        self._taken, self._skip = self._skip, 0
        for begin in range(start, stop, _ROWS_AT_A_TIME):
            for row in self.dataset[begin : min(stop, begin + _ROWS_AT_A_TIME)]:
                self._taken += 1
                if info is None:
                    self.dataset.record_taken(self._taken, complete=self._taken == count)
                yield row if self.transform is None else self.transform(row)
        self._taken = 0
        if info is None:
            self.dataset.finish_epoch()

    def state_dict(self) -> dict[str, Any]:
        """Return the progress of the epoch, or of a worker in a worker process of a loader."""
        info = torch_data.get_worker_info()
        if info is None:
            return self.dataset.state_dict()
        return {"worker": info.id, "workers": info.num_workers, "taken": self._taken}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a ``state_dict``. Raises ``ValueError`` for that of a different worker."""
        info = torch_data.get_worker_info()
        if info is None:
            self.dataset.load_state_dict(state)
            return
        if (state["worker"], state["workers"]) != (info.id, info.num_workers):
            raise ValueError(
                f"The state is of worker {state['worker']} of {state['workers']}, but this is"
                f" worker {info.id} of {info.num_workers}. Resume with the same number of workers."
            )
        self._skip = int(state["taken"])


@suggest_options()
class LightningLoader:
    """A ``miniray.data.DataLoader`` for Lightning, which then resumes exactly within an epoch.

    Lightning saves the loader's state in its checkpoints and continues to count the batches of the
    epoch. So ``len`` is that of the whole epoch, including batches that were delivered before a
    state was loaded. On a different number of ranks, the next epoch has a different length: set
    ``Trainer(reload_dataloaders_every_n_epochs=1)``.
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
        """Return the state of the loader, with the number of batches of the epoch so far."""
        state = self.loader.state_dict()
        epoch, count = self._delivered
        return {**state, "batches": count if epoch == state["epoch"] else 0}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a ``state_dict`` that was saved on any number of ranks."""
        self.loader.load_state_dict(state)
        self._before = self._delivered = int(state["epoch"]), int(state["batches"])


def _find_process_group(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if (rank is None) != (world_size is None):
        raise ValueError("Pass both rank and world_size, or neither.")
    if rank is not None and world_size is not None:
        return rank, world_size
    found = find_rank()
    if found is not None:
        return found
    raise ValueError(
        "There is no process group, so the rank isn't known. Call init_process_group first, or pass"
        " rank= and world_size=."
    )
