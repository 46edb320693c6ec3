"""Random augmentation that depends on the batch, not on the process that loads it.

Each planned batch carries a seed, and the dataset seeds ``random``, NumPy and torch with it before
it loads the batch. A batch is therefore the same with any ``num_workers`` and after resuming inside
an epoch, and no earlier batches have to be loaded and dropped.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch


class SeededIndices(list[int]):
    """The indices of a batch, and its seed. Sent to loader processes like a plain list."""

    def __init__(self, indices: Sequence[int], seed: int) -> None:
        super().__init__(indices)
        self.seed = seed


def derive_seed(*numbers: int) -> int:
    """Return a seed that depends on all numbers, such as seed, epoch, rank and batch."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def draw_seed() -> int:
    """Return a seed from torch's generator of the CPU."""
    return int(torch.empty((), dtype=torch.int64).random_())


class SeededDataset:
    """A map-style dataset whose batches are loaded with the seed that their indices carry.

    The caller's random numbers are restored afterwards: with ``num_workers=0`` a batch is loaded in
    the training process, and dropout must not depend on it. Other attributes are the dataset's.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, index: Any) -> Any:
        return self._dataset[index]

    def __getitems__(self, indices: list[int]) -> Any:
        with seed_context(indices.seed) if isinstance(indices, SeededIndices) else _NO_SEED:
            load_batch = getattr(self._dataset, "__getitems__", None)
            if load_batch is not None:
                return load_batch(indices)
            return [self._dataset[index] for index in indices]

    def __len__(self) -> int:
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:
        if name == "_dataset":  # while unpickled, before it is set
            raise AttributeError(name)
        return getattr(self._dataset, name)


def seed_generators(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch, also those of GPUs."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


_NO_SEED = contextlib.nullcontext()


@contextlib.contextmanager
def seed_context(seed: int) -> Iterator[None]:
    """Seed all generators of the CPU inside, and restore their state afterwards."""
    state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(state[0])
        np.random.set_state(state[1])
        torch.set_rng_state(state[2])
