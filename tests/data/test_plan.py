"""Rows of ranks: exact numbers, properties for any sizes, and randomness of the order."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miniray.data import shard_indices
from miniray.data.plan.permutation import Permutation, derive_key

sizes = st.one_of(st.integers(0, 40), st.integers(0, 9000))
worlds = st.integers(1, 70)
modes = st.sampled_from(["contiguous", "strided"])


def all_shards(n, world, **options):
    return [shard_indices(n, rank, world, **options) for rank in range(world)]


def test_2099_rows_on_two_ranks():
    first, second = all_shards(2099, 2)
    assert list(first) == list(range(1050))
    assert list(second) == list(range(1050, 2099))


def test_strided_rows():
    assert list(shard_indices(10, 0, 4, mode="strided")) == [0, 4, 8]
    assert list(shard_indices(10, 3, 4, mode="strided")) == [3, 7]


def test_ranks_beyond_the_rows_get_none():
    assert [list(s) for s in all_shards(2, 4)] == [[0], [1], [], []]


@settings(max_examples=150, deadline=None)
@given(sizes, worlds, modes, st.booleans(), st.integers(), st.integers(0, 5))
def test_every_row_exactly_once_and_sizes_within_one(n, world, mode, shuffle, seed, epoch):
    shards = all_shards(n, world, mode=mode, shuffle=shuffle, seed=seed, epoch=epoch)
    rows = np.concatenate([np.asarray(s) for s in shards])
    assert sorted(rows.tolist()) == list(range(n))
    lengths = [len(s) for s in shards]
    assert max(lengths) - min(lengths) <= 1


@settings(max_examples=100, deadline=None)
@given(sizes, worlds, modes, st.booleans(), st.integers(0, 9000), st.integers())
def test_max_samples_is_one_subset_for_the_whole_run(n, world, mode, shuffle, most, seed):
    options = {"mode": mode, "shuffle": shuffle, "max_samples": most, "seed": seed}
    rows = [row for s in all_shards(n, world, **options) for row in s]
    assert len(rows) == len(set(rows)) == min(n, most)
    assert all(0 <= row < n for row in rows)
    later = [row for s in all_shards(n, 1, **options, epoch=3) for row in s]
    assert set(later) == set(rows)  # the same subset each epoch and for any world size


@settings(max_examples=150, deadline=None)
@given(sizes, worlds, modes, st.booleans())
def test_padding_repeats_the_least_and_says_what(n, world, mode, shuffle):
    shards = all_shards(n, world, mode=mode, shuffle=shuffle, seed=3, even="pad")
    assert {len(s) for s in shards} == {-(-n // world)}
    rows = [row for s in shards for row in s]
    padded = [row for s in shards for row in s.padded]
    assert len(rows) - len(padded) == n
    assert all(len(s.padded) <= 1 for s in shards)
    for row in padded:
        rows.remove(row)
    assert sorted(rows) == list(range(n))


@settings(max_examples=150, deadline=None)
@given(sizes, worlds, modes, st.booleans())
def test_dropping_leaves_out_the_least_and_says_what(n, world, mode, shuffle):
    shards = all_shards(n, world, mode=mode, shuffle=shuffle, seed=3, even="drop")
    assert {len(s) for s in shards} == {n // world}
    rows = [row for s in shards for row in s]
    assert all(s.dropped == shards[0].dropped for s in shards)
    assert sorted([*rows, *shards[0].dropped]) == list(range(n))


def test_it_is_a_lazy_sequence(raises):
    shard = shard_indices(20_000, 1, 2, shuffle=True, seed=4)
    whole = np.asarray(shard)
    assert whole.dtype == np.int64
    assert shard[0] == whole[0]
    assert shard[-1] == whole[-1]
    assert shard[5:9].tolist() == whole[5:9].tolist()
    assert shard[::-4000].tolist() == whole[::-4000].tolist()
    assert [row for row, _ in zip(shard, range(3), strict=False)] == whole[:3].tolist()
    assert whole[7] in shard
    with raises(IndexError):
        shard[10_000]


def test_a_trillion_rows():
    shard = shard_indices(10**12, 63, 64, shuffle=True, seed=1, max_samples=10**11)
    assert len(shard) == 10**11 // 64
    some = shard[10**9 : 10**9 + 5000]
    assert len(set(some.tolist())) == 5000
    assert 0 <= some.min() < 10**11 < 9 * 10**11 < some.max() < 10**12


# -- seeds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"shuffle": True}, {"max_samples": 5}])
def test_several_ranks_without_a_seed_are_refused(options):
    with pytest.raises(ValueError, match=r"seed=.*MINIRAY_RUN_SEED"):
        shard_indices(10, 0, 2, **options)


def test_nothing_to_draw_needs_no_seed():
    assert len(shard_indices(10, 0, 2, max_samples=10)) == 5


def test_the_runs_seed_is_taken(monkeypatch, raises):
    monkeypatch.setenv("MINIRAY_RUN_SEED", "77")
    rows = [row for s in all_shards(2099, 2, max_samples=1000) for row in s]
    assert len(set(rows)) == 1000
    assert shard_indices(2099, 0, 2, max_samples=1000).seed == 77
    assert set(rows) == {row for s in all_shards(2099, 2, max_samples=1000, seed=77) for row in s}
    monkeypatch.setenv("MINIRAY_RUN_SEED", "many")
    with raises(ValueError):
        shard_indices(10, 0, 2, shuffle=True)


def test_one_rank_draws_a_seed_and_tells_it():
    shard = shard_indices(1000, 0, 1, shuffle=True)
    assert list(shard) == list(shard_indices(1000, 0, 1, shuffle=True, seed=shard.seed))
    assert list(shard) != list(shard_indices(1000, 0, 1, shuffle=True))


@pytest.mark.parametrize(
    "arguments",
    [
        {"n": -1},
        {"rank": 2},
        {"world_size": 0},
        {"mode": "zigzag"},
        {"even": "odd"},
        {"max_samples": -2},
        {"seed": "x", "shuffle": True},
        {"n": 10.0},
        {"rank": True},
        {"epoch": 1.0},
    ],
)
def test_bad_arguments_are_refused(arguments, raises):
    with raises(ValueError):
        shard_indices(**{"n": 10, "rank": 0, "world_size": 2, **arguments})


# -- is it a good shuffle? -----------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 70_000), st.integers(0, 2**64 - 1))
def test_a_permutation_is_a_bijection(n, key):
    assert (np.sort(Permutation(n, key).map_positions(np.arange(n))) == np.arange(n)).all()


@pytest.mark.parametrize("n", [17, 1000, 5000, 100_003])
def test_rows_land_everywhere_equally_often(n):
    """Chi-square over (first position, bin) and (last position, bin): keys 0 .. 3999, 16 bins."""
    keys = 4000
    where = np.array(
        [Permutation(n, derive_key(k)).map_positions([0, n // 2, n - 1]) for k in range(keys)]
    )
    for column in where.T:
        bins = np.bincount(column * 16 // n, minlength=16)
        sizes = np.bincount(np.arange(n) * 16 // n, minlength=16) / n * keys
        chi2 = ((bins - sizes) ** 2 / sizes).sum()
        assert chi2 < 44.3  # 15 degrees of freedom: one in ten thousand is above


@pytest.mark.parametrize("n", [4000, 50_000])
def test_neighbours_are_not_correlated(n):
    for key in range(5):
        rows = Permutation(n, derive_key("n", key)).map_positions(np.arange(n)).astype(float)
        for lag in (1, 2, 63, 64):
            correlation = np.corrcoef(rows[:-lag], rows[lag:])[0, 1]
            assert abs(correlation) < 4.5 / np.sqrt(n)
        assert abs(np.corrcoef(rows, np.arange(n))[0, 1]) < 4.5 / np.sqrt(n)
        # Neighbours stay neighbours twice in a random permutation, on average.
        assert (np.abs(np.diff(rows)) == 1).sum() <= 12


def test_all_orders_of_four_are_equally_likely():
    counts = {}
    for key in range(4800):
        order = tuple(Permutation(4, derive_key("o", key)).map_positions(np.arange(4)).tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 24
    assert sum((count - 200) ** 2 / 200 for count in counts.values()) < 58.0  # 23 degrees, 1e-4


def test_epochs_differ():
    orders = [
        np.asarray(shard_indices(5000, 0, 1, shuffle=True, seed=1, epoch=e)) for e in range(4)
    ]
    for i in range(4):
        for j in range(i):
            assert (orders[i] == orders[j]).sum() < 12  # 1 on average
            assert abs(np.corrcoef(orders[i], orders[j])[0, 1]) < 4.5 / np.sqrt(5000)


def test_orders_are_the_same_for_ever():
    """A change here would change the order of every run that is resumed."""
    assert Permutation(10, 1).map_positions(np.arange(10)).tolist() == [
        0,
        3,
        8,
        9,
        4,
        6,
        1,
        7,
        5,
        2,
    ]
    assert Permutation(10**6, 1).map_positions([0, 1, 2, 999_999]).tolist() == [
        321543,
        172300,
        247595,
        255356,
    ]
