"""The samples of one copy of the model, on the rank that loads them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from miniray.train import torch_parts as parts
from miniray.train.parallel import planning
from miniray.train.parallel.layout import Place
from miniray.train.parallel.planning import Job
from miniray.train.ranks import data as sharing


class RandomNumbers:
    """Random numbers of the loader's own, so that loading does not shift the model's."""

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
    """A copy's loader, and random numbers of its own for it.

    ``loads`` is False on ranks that are sent their part; all they have is the random numbers.
    """

    def __init__(self, job: Job, place: Place) -> None:
        self.job, self.copy = job, place.data
        self.loads = place.pipeline == place.tensor == 0
        self.random = RandomNumbers(job.seed + 1_000_003 * (1 + place.data))
        self.loader: Any = None
        self.windows: Any = None

    def open(self) -> None:
        """Make the loader and cut it to this copy's samples; refuses one that cannot be cut."""
        if not self.loads:
            return
        copies, later = self.job.layout.data, self.job.val_data
        if later is not None and not callable(later):  # what a function makes is seen when it does
            planning.evaluation_share(planning.make_loader(later, "val_data", 1), 0, copies)
        with self.random():
            loader = planning.make_loader(self.job.data, "data")
            if copies > 1:
                planning.check_can_be_cut(loader, "data", copies)
            sharing.check_loader(loader, "data")
            self.loader, plan = sharing.own_share(
                loader,
                self.copy,
                copies,
                accumulate=1,
                uneven="join",
                seed=self.job.seed,
                sharded=False,
            )
        if plan is not None:
            self.windows = list(plan.windows(self.copy))

    @property
    def steps(self) -> int | None:
        """Of an epoch, where that is known."""
        return None if self.windows is None else len(self.windows)

    def batches(self, epoch: int, waiting: Callable[[str], None]) -> Iterator[Any] | None:
        """The batches of an epoch, None in place of one that only other copies have.

        The loader's processes start here, before anybody waits. None where others load.
        """
        if not self.loads:
            return None
        sharing.set_epoch(self.loader, epoch)
        batches = self._drawn(self.loader)

        def items() -> Iterator[Any]:
            for window in itertools.repeat((1.0,)) if self.windows is None else self.windows:
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
        """This copy's batches of ``data``, or of ``val_data``. None where others load."""
        if not self.loads:
            return None
        given = self.job.val_data if data is None else data
        loader = planning.make_loader(given, "val_data", batch_size)
        return self._drawn(planning.evaluation_share(loader, self.copy, self.job.layout.data))

    def _drawn(self, loader: Any) -> Iterator[Any]:
        """The loader's batches, made with random numbers of their own."""
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
        """Go on with the order of samples that a run with ``seed`` has."""
        sampler = getattr(self.loader, "batch_sampler", None)
        if isinstance(sampler, sharing.PlannedBatches):
            sampler.seed = seed

    def state(self) -> dict[str, Any]:
        loader = None if self.loader is None else parts.loader_state(self.loader)
        return {"data": self.random.state, "loader": loader}

    def load(self, saved: Any) -> None:
        if self.loader is not None and saved["loader"] is not None:
            parts.load_loader_state(self.loader, saved["loader"])
        self.random.state = saved["data"]
