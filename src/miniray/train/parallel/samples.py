"""The samples of one replica of the model, on the rank that loads them."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Subset

from miniray.data.plan.shard import split_evenly
from miniray.train.parallel.plan.job import Job, Place
from miniray.train.workers.data import planned as sharing
from miniray.train.workers.data.loaders import (
    create_eval_loader,
    describe_custom_sampling,
    get_loader_state,
    load_loader_state,
)
from miniray.train.workers.data.shards import create_loader, is_loader, recognize


def make_loader(
    data: Any, argument: str, batch_size: int | None = None, *, evaluates: bool = False
) -> Any:
    """Return the loader for ``data=`` or ``val_data=``.

    Args:
        data: Data of a kind that ``DDPTrainer`` accepts, another iterable of batches, or a function
            that returns one of these.
        argument: Name of the argument, for errors.
        batch_size: Rows per batch, if the data is a dataset.
        evaluates: The loader is used once. Rows in a list, tuple or dict are accepted too, and
            loaders may have a different batch size.
    """
    made = data() if callable(data) and not isinstance(data, (DataLoader, Dataset)) else data
    if recognize(argument, made) is not None:
        size = None if evaluates and is_loader(made) else batch_size
        # All stages of the pipeline need the same batches.
        return create_loader(argument, made, size, 0, 1, format="torch")
    rows = isinstance(made, (Dataset, list, tuple, Mapping))
    if rows and evaluates:
        return create_eval_loader(made, SimpleNamespace(batch_size=batch_size))
    if batch_size is not None and not evaluates:
        raise ValueError(
            f"batch_size= was passed, but {argument}= is a {type(made).__name__}, which has batches"
        )
    if not evaluates and isinstance(made, Iterator):
        raise TypeError(
            f"{argument}= is a {type(made).__name__}, which has batches for one epoch only. "
            "Pass an iterable that starts again with every iter(), such as a DataLoader"
        )
    if isinstance(made, Iterable) and not rows:
        return made
    raise TypeError(
        f"{argument}= must be a torch DataLoader or another iterable of batches (rows need a "
        f"DataLoader around them), or a function that returns one, not {made!r:.80}"
    )


def check_can_be_cut(loader: Any, argument: str, copies: int) -> None:
    """Raise ``TypeError`` if the batches can't be sharded among replicas of the model."""
    what = f"a {type(loader).__name__}"
    if isinstance(loader, DataLoader):
        what = describe_custom_sampling(loader)
    if what:
        raise TypeError(
            f"{argument}= has {what}, which can't be sharded on {copies} copies of the model. Pass "
            "a torch DataLoader over a dataset with a length, in order or shuffled"
        )


def evaluation_share(loader: Any, copy: int, copies: int) -> Any:
    """Return the shard of ``loader`` that one replica evaluates. Every row is in one shard."""
    if copies == 1:
        return loader
    check_can_be_cut(loader, "val_data", copies)
    rows = range(*split_evenly(len(loader.dataset), copy, copies))
    return DataLoader(
        Subset(loader.dataset, rows), batch_size=loader.batch_size, collate_fn=loader.collate_fn
    )


class RandomNumbers:
    """Separate random numbers for the loader, so that loading doesn't change the model's."""

    def __init__(self, seed: int) -> None:
        self.state = torch.Generator().manual_seed(seed).get_state()

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        before = torch.get_rng_state()
        torch.set_rng_state(self.state)
        try:
            yield
        finally:
            self.state = torch.get_rng_state()
            torch.set_rng_state(before)


class Samples:
    """The loader of a replica, and separate random numbers for it.

    ``loads`` is False on ranks that receive their part. They have the random numbers only.
    """

    def __init__(self, job: Job, place: Place) -> None:
        self.copy, self.loads = place.data, place.pipeline == place.tensor == 0
        self.job = job.fetch_data() if self.loads else job
        self.random = RandomNumbers(job.seed + 1_000_003 * (1 + place.data))
        self.loader: Any = None
        self.windows: Any = None

    def open(self) -> None:
        """Create the loader and shard it. Raise ``TypeError`` if it can't be sharded."""
        if not self.loads:
            return
        copies, later = self.job.layout.data, self.job.val_data
        if later is not None and not callable(later):  # a function is called when it is needed
            evaluation_share(make_loader(later, "val_data", 1, evaluates=True), 0, copies)
        with self.random():
            loader = make_loader(self.job.data, "data", self.job.batch_size)
            if copies > 1:
                check_can_be_cut(loader, "data", copies)
            sharing.check_loader(loader, "data")
            self.loader = sharing.take_share(
                loader,
                self.copy,
                copies,
                seed=self.job.seed,
                limit=self.job.limit_train_batches,
                overfits=self.job.overfits,
            )
        own = sharing.planned(self.loader)
        self.windows = None if own is None else own.windows()

    @property
    def steps(self) -> int | None:
        """Number of steps of an epoch, if it is known."""
        return None if self.windows is None else len(self.windows)

    def batches(
        self, epoch: int, first: int, waiting: Callable[[str], None]
    ) -> Iterator[Any] | None:
        """Start the loader and return the batches of an epoch from step ``first`` on.

        None takes the place of a batch that only other copies have. Return None if a different
        rank loads.
        """
        if not self.loads:
            return None
        sharing.set_epoch(self.loader, epoch)
        planned = sharing.planned(self.loader)
        if planned is not None:
            planned.set_epoch(epoch, first)
        kept = self.random.state
        batches = self._draw_batches(self.loader)
        if first:  # a run that wasn't interrupted has started the loader once
            self.random.state = kept

        def items() -> Iterator[Any]:
            unknown = itertools.repeat((1.0,), self.job.limit_train_batches or sys.maxsize)
            windows = unknown if self.windows is None else self.windows[first:]
            for window in windows:
                if not any(window):
                    yield None
                    continue
                waiting("data")
                batch = next(batches, None)
                if batch is None:
                    return
                yield batch

        return items()

    def evaluation(self, data: Any, batch_size: int) -> Iterator[Any] | None:
        """Return this replica's batches of ``data`` or ``val_data``; None if another rank loads."""
        if not self.loads:
            return None
        given = self.job.val_data if data is None else data
        loader = make_loader(given, "val_data", batch_size, evaluates=True)
        return self._draw_batches(evaluation_share(loader, self.copy, self.job.layout.data))

    def _draw_batches(self, loader: Any) -> Iterator[Any]:
        """Return the batches of the loader, drawn with separate random numbers."""
        with self.random():
            batches = iter(loader)

        def draw() -> Iterator[Any]:
            while True:
                with self.random():
                    batch = next(batches, None)
                if batch is None:
                    return
                yield batch

        return draw()

    def set_order(self, seed: int) -> None:
        """Continue with the order of samples of a run with ``seed``."""
        own = sharing.planned(self.loader)
        if own is not None:
            own.seed = seed

    def state(self) -> dict[str, Any]:
        loader = None
        if self.loader is not None:
            has_position = sharing.planned(self.loader) is None
            loader = get_loader_state(self.loader, has_position)
        return {"data": self.random.state, "loader": loader}

    def load(self, saved: Any) -> None:
        if self.loader is not None and saved["loader"] is not None:
            load_loader_state(self.loader, saved["loader"])
        self.random.state = saved["data"]
