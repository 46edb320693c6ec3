"""Assignment of samples to ranks and steps: pure arithmetic, all small cases."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miniray.train.workers.data.plan import EpochPlan, create_counted_windows

plans = st.fixed_dictionaries(
    {
        "n": st.integers(1, 80),
        "batch_size": st.integers(1, 6),
        "world_size": st.integers(1, 5),
        "accumulate": st.integers(1, 4),
        "uneven": st.sampled_from(["join", "pad", "drop"]),
        "shuffle": st.booleans(),
    }
)


@given(plans)
def test_samples_windows_and_weights_fit_together(case):
    shuffle = case.pop("shuffle")
    n, world_size, uneven = case["n"], case["world_size"], case["uneven"]
    if n < world_size and uneven != "pad":
        with pytest.raises(ValueError, match=rf"\b{n}\b"):
            EpochPlan(**case)
        return
    plan = EpochPlan(**case)
    ranks = range(world_size)
    taken = [list(plan.batches(rank, 3, shuffle=shuffle, seed=1)) for rank in ranks]
    windows = [list(plan.windows(rank)) for rank in ranks]
    rows = sorted(row for batches in taken for batch in batches for row in batch)
    if uneven == "join":
        assert rows == list(range(n))
    elif uneven == "drop":
        assert len(set(rows)) == len(rows) == n - n % world_size
    else:
        assert set(rows) == set(range(n))
        assert len(rows) == -(-n // world_size) * world_size
    for rank in ranks:
        weights = [weight for window in windows[rank] for weight in window]
        assert len(taken[rank]) == plan.count(rank) == sum(weight > 0 for weight in weights)
        assert all(len(batch) <= case["batch_size"] for batch in taken[rank])
        # Only the last micro-batch of an epoch may be one that a rank has no samples for.
        assert all(weight > 0 for weight in weights[:-1])
    for together in zip(*windows, strict=True):
        assert len({len(window) for window in together}) == 1  # all ranks make every step
        # DDP divides by the ranks: then every sample of the step counts the same.
        assert sum(map(sum, together)) / world_size == pytest.approx(1)


@given(plans, st.integers(0, 80))
def test_batches_from_a_window_are_the_rest_of_all_batches(case, first):
    shuffle = case.pop("shuffle")
    try:
        plan = EpochPlan(**case)
    except ValueError:
        return
    for rank in range(case["world_size"]):
        every = list(plan.batches(rank, 3, shuffle=shuffle, seed=1))
        rest = list(plan.batches(rank, 3, shuffle=shuffle, seed=1, first_window=first))
        assert rest == every[min(first * case["accumulate"], len(every)) :]


@given(plans, st.integers(1, 5), st.integers(0, 40))
def test_world_size_may_change_in_mid_epoch_exactly_once(case, other_size, windows):
    shuffle = case.pop("shuffle")
    case["uneven"] = "join"
    try:
        plan = EpochPlan(**case)
    except ValueError:
        return
    ends = list(plan.windows(0))[windows:]
    start = plan.samples(windows)
    assert start + sum(plan.sizes[windows * case["accumulate"] :]) == case["n"]
    if not ends or case["n"] - start < other_size:
        return
    before = [
        batch
        for rank in range(case["world_size"])
        for batch in list(plan.batches(rank, 3, shuffle=shuffle, seed=1))[
            : windows * case["accumulate"]
        ]
    ]
    rest = EpochPlan(**{**case, "world_size": other_size, "start": start})
    after = [
        batch
        for rank in range(other_size)
        for batch in rest.batches(rank, 3, shuffle=shuffle, seed=1)
    ]
    rows = sorted(row for batch in before + after for row in batch)
    assert rows == list(range(case["n"]))


def test_samples_are_dealt_out_in_turn_and_weighted_by_hand():
    plan = EpochPlan(11, 2, 2, accumulate=2)
    assert list(plan.batches(0, 0, shuffle=False, seed=0)) == [[0, 2], [4, 6], [8, 10]]
    assert list(plan.batches(1, 0, shuffle=False, seed=0)) == [[1, 3], [5, 7], [9]]
    # Two full micro-batches: 2 ranks x 2 of 8 samples. Then 2 and 1 of 3 samples.
    assert list(plan.windows(0)) == [(0.5, 0.5), (2 * 2 / 3,)]
    assert list(plan.windows(1)) == [(0.5, 0.5), (2 * 1 / 3,)]
    # One more sample: rank 1 has none left and repeats its last ones with weight 0.
    plan = EpochPlan(9, 2, 2, accumulate=2)
    assert list(plan.windows(0)) == [(0.5, 0.5), (2.0,)]
    assert list(plan.windows(1)) == [(0.5, 0.5), (0.0,)]


def test_the_samples_of_a_step_do_not_depend_on_the_number_of_ranks():
    steps = []
    for world_size in (1, 2, 4):
        plan = EpochPlan(30, 8 // world_size, world_size)
        ranks = [list(plan.batches(r, 1, shuffle=True, seed=9)) for r in range(world_size)]
        together = zip(*ranks, strict=True)
        steps.append([sorted(row for batch in batches for row in batch) for batches in together])
    assert steps[0] == steps[1] == steps[2]


def test_ranks_with_nothing_to_do_and_uneven_shares_are_named(raises):
    with raises(ValueError):
        EpochPlan(3, 2, 4)
    with raises(ValueError):
        EpochPlan(7, 4, 2, drop_last=True)
    with raises(ValueError):
        EpochPlan(2099, 8, 2, uneven="error")


def test_batches_that_ranks_bring_themselves(raises):
    assert create_counted_windows([2, 2], 0, 1, "join") == [(1.0,), (1.0,)]
    assert create_counted_windows([3, 3], 1, 2, "error") == [(0.5, 0.5), (1.0,)]
    # Rank 1 has one batch less: its last step has weight 0.
    assert create_counted_windows([3, 2], 0, 1, "join")[2] == (2.0,)
    assert create_counted_windows([3, 2], 1, 1, "join")[2] == (0.0,)
    # In the middle of a step: each of its three batches counts a third, averaged over two ranks.
    assert create_counted_windows([4, 3], 0, 2, "join")[1] == (2 / 3, 2 / 3)
    assert create_counted_windows([4, 3], 1, 2, "join")[1] == (2 / 3, 0.0)
    assert len(create_counted_windows([5, 3], 0, 1, "drop")) == 3
    with raises(ValueError):
        create_counted_windows([3, 2], 0, 1, "error")
    with raises(ValueError):
        create_counted_windows([3, 2], 0, 1, "pad")
    with raises(ValueError):
        create_counted_windows([3, 0], 0, 1, "join")
