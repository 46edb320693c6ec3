"""``WorkerEpoch``: the batches of one worker's epoch, which it trains in one call or in several.

The loader stays open between calls, so training an epoch in parts gives bit-identical results. A
worker that was restored inside an epoch starts its loader again:

- Torch loaders with torch's samplers start at the position. Each batch carries a seed for random
  augmentation, so it doesn't depend on ``num_workers`` or on the batches before.
- Loaders with ``state_dict`` continue at their position.
- For others, the batches before the position are loaded and dropped, with the random numbers that
  the epoch started with.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, Subset, TensorDataset

from miniray.train.run.step_log import LogWindow
from miniray.train.workers import torch_utils as parts
from miniray.train.workers.data.loaders import (
    describe_custom_sampling,
    get_loader_state,
    is_shardable,
    load_loader_state,
    replace_parts,
)
from miniray.train.workers.data.planned import create_overfit_error, set_epoch
from miniray.train.workers.data.seeding import (
    SeededDataset,
    SeededIndices,
    derive_seed,
    draw_seed,
)


class _ListedBatches:
    """A batch sampler: the batches of an epoch, from ``first`` on, with seeds."""

    def __init__(self) -> None:
        self.batches: Sequence[Sequence[int]] = ()
        self.seed = self.first = 0

    def __iter__(self) -> Iterator[list[int]]:
        for number in range(self.first, len(self.batches)):
            yield SeededIndices(self.batches[number], derive_seed(self.seed, number))

    def __len__(self) -> int:
        return len(self.batches)


class _SeededLoader:
    """A copy of a torch loader that can start at any batch of an epoch."""

    def __init__(self, loader: Any) -> None:
        self.original = loader
        dataset = loader.dataset
        rows = dataset.dataset if type(dataset) is Subset else dataset
        if type(rows) is not TensorDataset:  # which draws no random numbers
            dataset = SeededDataset(dataset)
        # One object for all epochs: processes that keep running (persistent_workers) hold it.
        self._listed = _ListedBatches()
        self._copy = replace_parts(loader, dataset=dataset, batch_sampler=self._listed)

    @classmethod
    def create(cls, loader: Any) -> _SeededLoader | None:
        """Return None for loaders whose samples are chosen in a different way."""
        is_torch = isinstance(loader, DataLoader) and not hasattr(loader, "state_dict")
        return None if not is_torch or describe_custom_sampling(loader) else cls(loader)

    def start(self, first: int, in_order: bool) -> Iterator[Any]:
        """Draw the order of the epoch and the seed, and start the loader at batch ``first``."""
        loader = self.original
        batches = loader.batch_sampler
        if in_order:
            rows = SequentialSampler(loader.dataset)
            batches = BatchSampler(rows, loader.batch_size, loader.drop_last)
        listed = self._listed
        listed.batches, listed.seed, listed.first = list(batches), draw_seed(), first
        state = parts.random_state(), get_loader_state(loader, has_position=False)
        iterator: Iterator[Any] = iter(self._copy)  # draws a number if it starts processes
        load_loader_state(loader, state[1])
        parts.set_random_state(state[0])
        return iterator


class WorkerEpoch:
    """The position of a worker in its epoch, and the means so far.

    Attributes:
        epoch: Index of the epoch.
        step: Number of completed steps of ``accumulate`` batches.
        first_step: Completed steps of the run at the start of this epoch, or of the next one.
        is_complete: Whether the loader has no more batches.
        means: Means of the epoch so far.
    """

    def __init__(self) -> None:
        self.epoch, self.step, self.is_complete = -1, 0, False
        self.first_step = 0
        self._limit: int | None = None
        self._overfits = False
        self.means = parts.Means()
        self._start: dict[str, Any] | None = None  # random numbers at the start of the epoch
        self._loader: Any = None  # of ``_batches``
        self._batches: Iterator[Any] | None = None
        self._count: int | None = None
        self._accumulate = 1
        self._seeded: _SeededLoader | None = None
        self._reset_log()

    def _reset_log(self) -> None:
        self._log_means, self._tokens = parts.Means(), 0
        self._log_steps, self._log_seconds = 0, 0.0

    # -- position ---------------------------------------------------------------------------------

    @property
    def global_step(self) -> int:
        """Completed steps of the run."""
        return self.first_step + (0 if self.is_complete else self.step)

    def set_limit(self, batches: int | None, overfits: bool) -> None:
        """Use at most this number of batches in an epoch; with ``overfits``, always the same."""
        self._limit, self._overfits = batches, overfits

    def open(self, loader: Any, epoch: int, start: int, accumulate: int = 1) -> None:
        """Go to step ``start`` of an epoch.

        The epoch starts again if ``start`` is 0. A worker that takes the place of a lost one goes
        to ``start`` without training.
        """
        if start and epoch == self.epoch and (start == self.step or self.is_complete):
            if accumulate != self._accumulate and not self.is_complete:
                raise ValueError(
                    f"the run continues inside an epoch, with accumulate={accumulate} instead of "
                    f"{self._accumulate}. Pass the same value until the end of the epoch"
                )
            if self._batches is None and not self.is_complete:
                self._reopen(loader)
            return
        self._count = self.count_steps(loader, epoch, start, accumulate)
        self._accumulate = accumulate
        self.epoch, self.step, self.is_complete = epoch, start, False
        self.means = parts.Means()
        self._reset_log()
        state = get_loader_state(loader, has_position=False)
        self._start = {"random": parts.random_state(), "loader": state}
        self._batches = self._iterate(loader)

    def _iterate(self, loader: Any) -> Iterator[Any]:
        """Start the loader at ``step``."""
        self._loader, done = loader, self._accumulate * self.step
        limit = None if self._limit is None else max(0, self._limit - done)
        return itertools.islice(self._start_loader(loader, done), limit)

    def _start_loader(self, loader: Any, done: int) -> Iterator[Any]:
        if self._seeded is None or self._seeded.original is not loader:
            self._seeded = _SeededLoader.create(loader)
        if self._seeded is not None:
            return self._seeded.start(done, self._overfits)
        if self._overfits:
            raise create_overfit_error()
        set_epoch = getattr(getattr(loader, "sampler", None), "set_epoch", None)
        if set_epoch is not None:
            set_epoch(self.epoch)
        batches: Iterator[Any] = iter(loader)
        if not hasattr(loader, "state_dict"):
            for _ in itertools.islice(batches, done):
                pass
        return batches

    def _reopen(self, loader: Any) -> None:
        """Start the loader of a restored worker. The current random numbers are kept."""
        now = parts.random_state(), get_loader_state(loader, has_position=False)
        if not hasattr(loader, "state_dict") and self._start is not None:
            load_loader_state(loader, self._start["loader"])
            parts.set_random_state(self._start["random"])
        self._batches = self._iterate(loader)
        load_loader_state(loader, {**now[1], "running": False})
        parts.set_random_state(now[0])

    def count_steps(self, loader: Any, epoch: int, start: int, accumulate: int = 1) -> int | None:
        """Return the number of steps of an epoch that is at step ``start``; None if unknown."""
        if self._count is not None and epoch == self.epoch and start:
            return self._count
        if getattr(loader, "batch_by", None) is not None:  # batches of tokens: rows would be read
            return None
        try:
            batches = len(loader)
        except TypeError:
            return None
        # Loaders of miniray.data count the batches that are left.
        count = -(-batches // accumulate) + (start if is_shardable(loader) else 0)
        return count if self._limit is None else min(count, -(-self._limit // accumulate))

    # -- steps ------------------------------------------------------------------------------------

    def iter_steps(self, stop: int | None) -> Iterator[tuple[int, list[Any]]]:
        """Yield the first number and the batches of each step before ``stop``, or to the end."""
        began = time.monotonic()
        while not self.is_complete and (stop is None or self.step < stop):
            assert self._batches is not None
            batches = list(itertools.islice(self._batches, self._accumulate))
            if not batches:
                self._complete()
                break
            yield self._accumulate * self.step, batches
            self.step += 1
            self._log_steps += 1
        self._log_seconds += time.monotonic() - began

    def _complete(self) -> None:
        self.first_step = self.global_step
        self.is_complete, self._batches = True, None
        if self._limit is not None:  # else the loader counts epochs itself, after its last batch
            set_epoch(self._loader, self.epoch + 1)

    def add(self, values: Mapping[str, Any], samples: int, tokens: Any) -> None:
        """Add the metrics of a step."""
        self.means.add(values, samples)
        self._log_means.add(values, samples)
        self._tokens = self._tokens + tokens

    def take_window(self, facts: Mapping[str, float]) -> LogWindow:
        """Return what happened since the last call; its ``step`` is that of the epoch."""
        window = LogWindow(
            self.step,
            self.epoch,
            self._log_means.sums(),
            facts,
            int(self._tokens),
            self._log_steps,
            self._log_seconds,
        )
        self._reset_log()
        return window

    # -- checkpoints ------------------------------------------------------------------------------

    def get_loader_state(self, loader: Any) -> dict[str, Any]:
        """Return the loader's position and random numbers."""
        state = get_loader_state(loader)
        if self._is_inside and self._start is not None:
            # Its processes start when the epoch is opened again, with the same random numbers.
            state["running"] = self._start["loader"]["running"]
        return state

    @property
    def _is_inside(self) -> bool:
        return self.step > 0 and not self.is_complete

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "step": self.step,
            "first_step": self.first_step,
            "is_complete": self.is_complete,
            "means": self.means.state_dict(),
            "start": self._start if self._is_inside else None,
            "count": self._count,
            "accumulate": self._accumulate,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at ``state_dict``. The loader and the random numbers are restored separately."""
        self.epoch, self.step = state["epoch"], state["step"]
        self.first_step = state["first_step"]
        self.is_complete, self._start = state["is_complete"], state["start"]
        self._count, self._batches = state["count"], None
        self._accumulate = state["accumulate"]
        self.means = parts.Means()
        self.means.load_state_dict(state["means"])
        self._reset_log()
