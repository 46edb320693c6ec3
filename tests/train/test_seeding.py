"""Batches with random augmentation don't depend on who loads them, or from where."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader  # noqa: E402

from miniray.train.workers.data.seeding import (  # noqa: E402
    SeededDataset,
    SeededIndices,
    derive_seed,
    seed_context,
)


class Augmented:
    """Rows with noise from three generators."""

    name = "augmented"

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        noise = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        return torch.tensor([float(index), *noise], dtype=torch.float64)


class Batches:
    def __init__(self, start: int) -> None:
        self.start = start

    def __iter__(self) -> Any:
        for number in range(self.start, 6):
            yield SeededIndices(range(4 * number, 4 * number + 4), derive_seed(7, 0, number))


def load(num_workers: int, start: int) -> list[Any]:
    loader = DataLoader(
        SeededDataset(Augmented()), batch_sampler=Batches(start), num_workers=num_workers
    )
    return list(loader)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_are_equal_for_any_loader_and_start(num_workers: int) -> None:
    expected = torch.stack(load(0, 0))
    assert len(torch.unique(expected[:, :, 1:])) == 24 * 3
    assert torch.equal(torch.stack(load(num_workers, 0)), expected)
    assert torch.equal(torch.stack(load(num_workers, 4)), expected[4:])


def test_loading_leaves_the_random_numbers_of_training_unchanged() -> None:
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = random.random(), np.random.rand(), torch.rand(3)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    dataset = SeededDataset(Augmented())
    dataset.__getitems__(SeededIndices([1, 2], 5))
    assert (random.random(), np.random.rand()) == expected[:2]
    assert torch.equal(torch.rand(3), expected[2])


def test_seed_context_restores_the_state_after_an_error() -> None:
    state = torch.get_rng_state()
    with pytest.raises(KeyError), seed_context(3):
        raise KeyError
    assert torch.equal(torch.get_rng_state(), state)


def test_seeded_dataset_has_the_attributes_of_its_dataset() -> None:
    dataset = SeededDataset(Augmented())
    assert dataset.name == "augmented"
    assert len(dataset) == 24
    with pytest.raises(AttributeError):
        _ = dataset.missing


def test_seeds_differ_by_every_number() -> None:
    seeds = {derive_seed(a, b, c) for a in range(5) for b in range(5) for c in range(5)}
    assert len(seeds) == 125
