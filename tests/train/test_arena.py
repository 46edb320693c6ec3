"""Snapshots in shared memory: what ranks save is what the driver reads, after any death."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest

import miniray
from miniray.errors import ActorDiedError, ObjectStoreFullError
from miniray.train.lockstep.snapshots.arena import SnapshotArena, SnapshotWriter, measure_slot

torch = pytest.importorskip("torch")


@pytest.fixture
def inline() -> Any:
    with miniray.init(backend="inline"):
        yield


def make_shared(step: int) -> dict[str, Any]:
    """Make a state that all ranks share, of many types and sizes that no world size divides."""
    generator = torch.Generator().manual_seed(step)
    return {
        "weights": {
            "w": torch.randn(7, 5, generator=generator),
            "transposed": torch.randn(3, 11, generator=generator).t(),
            "half": torch.randn(13, generator=generator).to(torch.bfloat16),
            "scalar": torch.tensor(step),
            "empty": torch.empty(0, 4),
        },
        "optimizer": {0: {"step": torch.tensor(float(step)), "lr": 0.1}, "betas": (0.9, 0.99)},
        "counts": np.arange(17) + step,
        "flags": torch.tensor([True, False, True]),
    }


def make_own(rank: int, step: int) -> dict[str, Any]:
    return {"random": np.full(5, rank * 100 + step, np.uint64), "text": f"rank {rank}"}


def write_all(
    world_size: int, steps: list[int], num_slots: int = 2
) -> tuple[SnapshotArena, list[SnapshotWriter]]:
    arena = SnapshotArena(num_slots)
    sizes = [
        measure_slot(make_shared(0), make_own(rank, 0), rank, world_size)
        for rank in range(world_size)
    ]
    writers = [
        SnapshotWriter(buffer, num_slots, rank, world_size)
        for rank, buffer in enumerate(arena.reserve(sizes))
    ]
    for step in steps:
        for rank, writer in enumerate(writers):
            assert writer.save(step, make_shared(step), make_own(rank, step))
    return arena, writers


def assert_same(left: Any, right: Any) -> None:
    assert type(left) is type(right)
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype
        assert torch.equal(left, right)
    elif isinstance(left, np.ndarray):
        assert left.dtype == right.dtype
        assert np.array_equal(left, right)
    elif isinstance(left, (list, tuple)):
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    else:
        assert left == right


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_read_returns_what_ranks_saved(inline: Any, world_size: int) -> None:
    arena, _ = write_all(world_size, [2, 4, 6])
    assert arena.find_newest_step() == 6
    for step in (4, 6):
        found = arena.read(step)
        assert_same(found.shared, make_shared(step))
        assert_same(found.own, [make_own(rank, step) for rank in range(world_size)])
    with pytest.raises(KeyError):
        arena.read(2)


def test_each_rank_copies_its_part_only(inline: Any) -> None:
    shared = {"w": torch.zeros(1_000_000)}
    sizes = [measure_slot(shared, {}, rank, 4) for rank in range(4)]
    assert all(1_000_000 <= size <= 1_020_000 for size in sizes)


def test_step_that_one_rank_lacks_is_ignored(inline: Any) -> None:
    arena, writers = write_all(2, [2])
    writers[0].save(4, make_shared(4), make_own(0, 4))
    assert arena.find_newest_step() == 2


def test_interrupted_write_leaves_the_step_before(inline: Any, monkeypatch: Any) -> None:
    arena, writers = write_all(2, [2, 4])
    writers[0].save(6, make_shared(6), make_own(0, 6))

    def fail(*_: Any) -> None:
        raise OSError("killed here")

    monkeypatch.setattr("miniray.train.lockstep.snapshots.arena._copy_bytes", fail)
    with pytest.raises(OSError, match="killed here"):
        writers[1].save(6, make_shared(6), make_own(1, 6))
    assert arena.find_newest_step() == 4
    assert_same(arena.read(4).shared, make_shared(4))


def test_state_of_the_same_step_with_a_higher_count_is_newer(inline: Any) -> None:
    """As after a call of the driver, in which one of the ranks may die."""
    arena, writers = write_all(2, [4, 6])
    writers[0].save(6, make_shared(7), make_own(0, 7), 1)
    assert_same(arena.read(6).shared, make_shared(6))
    writers[1].save(6, make_shared(7), make_own(1, 7), 1)
    assert arena.find_newest_step() == 6
    assert_same(arena.read(6).shared, make_shared(7))
    for rank, writer in enumerate(writers):  # a checkpoint of an earlier step was loaded
        writer.save(2, make_shared(2), make_own(rank, 2), 2)
    assert arena.find_newest_step() == 2
    assert_same(arena.read(2).own, [make_own(rank, 2) for rank in range(2)])


@pytest.mark.parametrize("copy", [True, False])
def test_single_slot_holds_the_last_step(inline: Any, copy: bool) -> None:
    arena, writers = write_all(2, [1, 2], num_slots=1)
    assert arena.find_newest_step() == 2
    found = arena.read(2, copy=copy)
    assert_same(found.shared, make_shared(2))
    for rank, writer in enumerate(writers):
        writer.save(3, make_shared(3), make_own(rank, 3))
    is_copy = torch.equal(found.shared["weights"]["w"], make_shared(2)["weights"]["w"])
    assert is_copy is copy
    with pytest.raises(KeyError):
        arena.read(2)


def test_state_that_outgrew_its_slot_is_not_written(inline: Any) -> None:
    arena, writers = write_all(1, [2])
    assert not writers[0].save(4, {"w": torch.zeros(100_000)}, {})
    assert arena.find_newest_step() == 2


def test_reserve_beyond_memory_raises_with_the_size(inline: Any) -> None:
    arena = SnapshotArena()
    with pytest.raises(ObjectStoreFullError):
        arena.reserve([1 << 50])


def test_snapshots_survive_sigkill_of_their_rank() -> None:
    @miniray.remote
    class Rank:
        def save(self, buffer: Any, step: int) -> int:
            writer = SnapshotWriter(buffer, 2, 0, 1)
            writer.save(step, make_shared(step), make_own(0, step))
            return os.getpid()

        def sleep(self) -> None:
            signal.pause()

    with miniray.init(num_workers=1):
        arena = SnapshotArena()
        (buffer,) = arena.reserve([measure_slot(make_shared(0), make_own(0, 0), 0, 1)])
        rank = Rank.remote()
        pid = miniray.get(rank.save.remote(buffer, 8))
        pending = rank.sleep.remote()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ActorDiedError):
            miniray.get(pending)
        assert arena.find_newest_step() == 8
        assert_same(arena.read(8).shared, make_shared(8))
