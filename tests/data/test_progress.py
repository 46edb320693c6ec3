"""Elastic resume: over any history of world sizes each row comes exactly once in an epoch."""

import functools
import itertools
import json
import operator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miniray.data import DataLoader, IndexedDataset, merge_states
from miniray.data.plan.progress import Progress
from miniray.data.plan.split import (
    Contiguous,
    Interleaved,
    IntervalSet,
    count_positions,
    find_remaining,
)
from miniray.errors import DataError


def dataset(n, rank=0, world=1, **options):
    data = [{"id": i} for i in range(n)]
    return IndexedDataset(data, rank=rank, world_size=world, **{"seed": 5, **options})


def ids(batch):
    return batch["id"].tolist()


# -- intervals -----------------------------------------------------------------------------------


def test_rest_of_three_ranks():
    # 10 rows: [0:4] [4:7] [7:10], two taken from each.
    assert find_remaining(10, [[3, 2]], Contiguous()) == [(2, 4), (6, 7), (9, 10)]
    assert find_remaining(10, [[3, [0, 3, 9]]], Contiguous()) == [(0, 4)]
    assert find_remaining(10, [[3, 2]], Interleaved()) == [(6, 10)]
    # Rank 0 took 0, rank 1 took 1, 4 and 7, rank 2 took 2.
    assert find_remaining(10, [[3, [1, 3, 1]]], Interleaved()) == [(3, 4), (5, 7), (8, 10)]


def test_intervals_are_numbered():
    intervals = IntervalSet([(2, 4), (6, 7), (9, 12)])
    assert intervals.total == 6
    assert list(intervals.slice(1, 5)) == [(3, 4), (6, 7), (9, 11)]
    assert intervals.find_positions(np.array([0, 2, 5])).tolist() == [2, 6, 11]
    assert list(intervals.slice(3, 3)) == []
    assert [intervals.find_number(p) for p in (2, 3, 6, 9, 11)] == [0, 1, 2, 3, 5]


splits = st.sampled_from([Contiguous, Interleaved])
evens = st.sampled_from(["exact", "drop", "pad"])


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 300),
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 40)), max_size=5),
    evens,
    splits,
)
def test_joined_histories_leave_what_separate_ones_leave(n, stages, even, split):
    progress = Progress(n, split(even))
    separate = [[world, taken] for world, taken in stages if taken]
    for stage in stages:
        progress = progress.extend(stage)
    assert len(progress.history) <= len(separate)
    assert progress.remaining.intervals == find_remaining(n, separate, split(even))


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 300),
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(0, 9)), max_size=5),
    st.integers(1, 9),
    splits,
)
def test_every_position_once_over_any_history(n, stages, last_world, split):
    """Ranks take some steps, and resume with a different world size and batch size."""
    seen, progress = [], Progress(n, split())
    for world, batch, steps in [*stages, (last_world, 1, n + 1)]:
        remaining = progress.remaining
        shares = [progress.split.assign_positions(remaining, r, world) for r in range(world)]
        counts = progress.split.count_step_rows(remaining, world, batch)
        for rank, share in enumerate(shares):
            own = share.find_positions(np.arange(min(share.count, steps * batch))).tolist()
            seen += own
            assert len(own) == sum(rows[rank] for rows in counts[:steps])
        progress = progress.extend([world, steps * batch])
    assert sorted(seen) == list(range(n))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 400), st.sampled_from([(1, 24), (2, 12), (4, 6), (8, 3)]), st.integers(0, 5))
def test_interleaved_steps_do_not_depend_on_world_size(n, shape, done):
    """If ``world_size × batch_size`` is constant, also after a resume."""

    def steps(world, batch):
        progress = Progress(n, Interleaved()).extend([4, done * 6])
        ranks = range(world)
        found = [progress.split.assign_positions(progress.remaining, r, world) for r in ranks]
        for start in range(0, -(-progress.remaining.total // world), batch):
            rows = [
                share.find_positions(np.arange(start, min(share.count, start + batch))).tolist()
                for share in found
                if start < share.count
            ]
            yield sorted(itertools.chain(*rows))

    assert list(steps(*shape)) == list(steps(1, 24))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 60), st.lists(st.integers(0, 9), min_size=1, max_size=6), splits)
def test_ranks_that_took_different_numbers_of_rows(n, taken, split):
    progress = Progress(n, split())
    seen = []
    for rank, count in enumerate(taken):
        share = progress.split.assign_positions(progress.remaining, rank, len(taken))
        seen += share.find_positions(np.arange(min(share.count, count))).tolist()
    rest = progress.extend([len(taken), taken]).remaining
    assert sorted([*seen, *rest.find_positions(np.arange(rest.total)).tolist()]) == list(range(n))
    assert count_positions(rest.intervals) == rest.total


def test_a_run_restarted_often_has_a_short_history():
    progress = Progress(10**9, Contiguous())
    interleaved = Progress(10**9, Interleaved())
    for world in range(1, 501):
        progress = progress.extend([64, 128])
        interleaved = interleaved.extend([world, 128])
    assert progress.history == [[64, 64_000]]
    assert interleaved.history == [[1, 128 * sum(range(1, 501))]]


# -- loaders -------------------------------------------------------------------------------------

histories = st.lists(st.tuples(st.integers(1, 7), st.integers(0, 6)), min_size=1, max_size=4)


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 120),
    histories,
    st.integers(1, 7),
    st.booleans(),
    st.integers(0, 3),
    st.sampled_from(["contiguous", "interleaved"]),
)
def test_exactly_once_over_any_history(n, history, batch, shuffle, epoch, split):
    """A run is stopped repeatedly and resumed with a different number of ranks."""
    seen, state = [], None
    for number, (world, steps) in enumerate([*history, (3, None)]):
        loaders = []
        for rank in range(world):
            shard = dataset(n, rank, world, shuffle=shuffle, split=split)
            loader = DataLoader(shard, batch, prefetch=0)
            loader.set_epoch(epoch)
            if state is not None:
                loader.load_state_dict(json.loads(json.dumps(state)))
            loaders.append(loader)
        lengths = [len(loader) for loader in loaders]
        for loader, length in zip(loaders, lengths, strict=True):
            iterator = iter(loader)
            taken = range(length if steps is None else min(steps, length))
            seen += [row for _ in taken for row in ids(next(iterator))]
        if steps is not None:
            # Any rank will do, as long as it was not stopped earlier for want of rows.
            longest = int(np.argmax(lengths))
            state = loaders[(number * 5) % world if min(lengths) >= steps else longest].state_dict()
            assert len(json.dumps(state)) < 1024
    assert sorted(seen) == list(range(n))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 100),
    st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=5), min_size=1, max_size=3),
    st.integers(1, 5),
)
def test_exactly_once_when_ranks_are_apart(n, history, batch):
    """Each rank is stopped after any of its batches, or at the end."""
    seen, state = [], None
    for steps in [*history, [None]]:
        states = []
        for rank, count in enumerate(steps):
            loader = DataLoader(dataset(n, rank, len(steps), shuffle=True), batch, prefetch=0)
            if state is not None:
                loader.load_state_dict(state)
            for found in itertools.islice(loader, count):
                seen += ids(found)
            states.append(loader.state_dict())
        state = json.loads(json.dumps(merge_states(states[::-1])))
        if state["epoch"]:  # all have
            break
    assert sorted(seen) == list(range(n))
    assert (state["epoch"], state["taken"]) == (1, 0)


def test_three_then_five_then_two_ranks_in_mid_epoch():
    seen, state = [], None
    for world, steps in [(3, 4), (5, 2), (2, 100)]:
        for rank in range(world):
            loader = DataLoader(dataset(100, rank, world, shuffle=True), 4)
            if state is not None:
                loader.load_state_dict(state)
            for _, batch in zip(range(steps), loader, strict=False):
                seen += ids(batch)
                last = loader.state_dict()
        state = last
    assert sorted(seen) == list(range(100))


def test_the_state_of_1024_ranks_after_many_restarts_is_small():
    state = None
    for world in (1024, 512, 768, 1000):
        shard = IndexedDataset(range(10**6), seed=1, shuffle=True, rank=world - 1, world_size=world)
        loader = DataLoader(shard, 16)
        if state is not None:
            loader.load_state_dict(state)
        iterator = iter(loader)
        next(iterator), next(iterator)
        state = loader.state_dict()
    assert len(json.dumps(state)) < 1024


def test_the_state_is_what_was_delivered_not_what_was_read():
    loader = DataLoader(dataset(100, shuffle=True), 4, prefetch=8, decode_workers=2)
    iterator = iter(loader)
    first = [ids(next(iterator)) for _ in range(3)]
    state = loader.state_dict()
    rest = [ids(batch) for batch in iterator]
    again = DataLoader(dataset(100, shuffle=True), 4)
    again.load_state_dict(state)
    assert len(again) == 22
    assert [ids(batch) for batch in again] == rest
    assert sorted(functools.reduce(operator.iadd, first + rest, [])) == list(range(100))


def test_epochs_follow_each_other():
    loader = DataLoader(dataset(10, shuffle=True), 3)
    first = [row for batch in loader for row in ids(batch)]
    assert loader.epoch == 1
    second = [row for batch in loader for row in ids(batch)]
    assert first != second
    assert sorted(first) == sorted(second) == list(range(10))
    loader.set_epoch(0)
    assert [row for batch in loader for row in ids(batch)] == first


def test_set_epoch_of_the_loaded_epoch_keeps_the_place():
    loader = DataLoader(dataset(10, shuffle=True), 3)
    loader.set_epoch(4)
    iterator = iter(loader)
    seen = ids(next(iterator))
    other = DataLoader(dataset(10, shuffle=True), 3)
    other.load_state_dict(loader.state_dict())
    other.set_epoch(4)
    assert sorted(seen + [row for batch in other for row in ids(batch)]) == list(range(10))
    assert other.epoch == 5


def test_a_loop_that_was_left_starts_the_epoch_again():
    loader = DataLoader(dataset(10, shuffle=True), 3)
    first = [ids(batch) for batch in loader]
    loader.set_epoch(0)
    for _ in loader:
        break
    assert [ids(batch) for batch in loader] == first


def test_a_state_after_the_last_batch_gives_no_batch_and_then_the_next_epoch():
    loader = DataLoader(dataset(6), 3)
    iterator = iter(loader)
    next(iterator), next(iterator)
    other = DataLoader(dataset(6), 3)
    other.load_state_dict(loader.state_dict())
    assert (len(other), list(other), other.epoch) == (0, [], 1)
    assert len(list(other)) == 2


def test_the_seed_travels_in_the_state():
    loader = DataLoader(dataset(50, shuffle=True, seed=None), 5)
    iterator = iter(loader)
    seen = ids(next(iterator))
    other = DataLoader(dataset(50, shuffle=True, seed=None), 5)
    other.load_state_dict(loader.state_dict())
    assert sorted(seen + [row for batch in other for row in ids(batch)]) == list(range(50))
    assert other.dataset.seed == loader.dataset.seed


def test_iterating_a_dataset_is_resumable_too():
    first = dataset(20, shuffle=True)
    seen = [row["id"] for row, _ in zip(first, range(7), strict=False)]
    # zip has asked for one more row than it gave.
    assert first.state_dict()["taken"] == 8
    second = dataset(20, shuffle=True)
    second.load_state_dict(first.state_dict())
    assert len(second) == 12
    assert not {row["id"] for row in second} & set(seen)


# -- refusals ------------------------------------------------------------------------------------


def states_of(world, n=20):
    return [DataLoader(dataset(n, rank, world), 2).state_dict() for rank in range(world)]


def test_a_missing_rank_is_named(raises):
    states = states_of(4)
    with raises(DataError):
        merge_states([states[0], states[2]])


def test_states_of_different_runs_are_not_merged(raises):
    with raises(DataError) as caught:
        merge_states([states_of(2)[0], states_of(2, n=21)[1]])
    assert caught.value.rank == 1
    with raises(DataError):
        merge_states(states_of(2)[0])
    with raises(DataError):
        merge_states([{**states_of(2)[0], "epoch": 1, "taken": 2}, states_of(2)[1]])
    with raises(DataError):
        merge_states([])
    with raises(DataError):
        merge_states([merge_states(states_of(2))])
    with raises(DataError) as caught:
        merge_states([states_of(1)[0], {**states_of(1)[0], "taken": 3}])
    assert caught.value.rank == 0


@pytest.mark.parametrize(
    "options",
    [
        {"n": 21},
        {"shuffle": True},
        {"even": "pad"},
        {"split": "interleaved"},
        {"seed": 6},
        {"max_samples": 7},
        {"even": "pad", "seed": 6},
    ],
)
def test_a_state_of_something_else_is_refused(options, raises):
    state = dataset(20).state_dict()
    with raises(DataError):
        dataset(**{"n": 20, **options}).load_state_dict(state)


@pytest.mark.parametrize("version", [1, 2])
def test_a_state_of_an_earlier_version_raises_the_reason(version, raises):
    state = {"version": version, "kind": "indexed", "n": 20, "taken": 4}
    with raises(DataError):
        dataset(20).load_state_dict(state)


@pytest.mark.parametrize(
    "state",
    [
        None,
        [],
        {},
        {"model": 1, "loader": {}},
        {"version": 3, "n": 3},
    ],
)
def test_what_is_no_state_is_refused(state, check_message):
    loader = DataLoader(dataset(3), 2)
    messages = set()
    for load in (loader.load_state_dict, dataset(3).load_state_dict, lambda s: merge_states([s])):
        with pytest.raises(DataError) as caught:
            load(state)
        messages.add(str(caught.value))
    (message,) = messages
    check_message(message)


def test_a_state_of_another_version_is_refused():
    with pytest.raises(DataError, match=r"\b9\b"):
        dataset(3).load_state_dict({**dataset(3).state_dict(), "version": 9})


# -- equally many rows ---------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 60), st.integers(1, 9), st.integers(1, 5), st.sampled_from(["pad", "drop"]))
def test_even_parts_have_equal_steps(n, world, batch, even):
    shards = [dataset(n, rank, world, even=even, shuffle=True) for rank in range(world)]
    steps = {len(list(DataLoader(shard, batch, prefetch=0))) for shard in shards}
    assert len(steps) == 1
    for shard in shards:
        shard.set_epoch(0)
    rows = [row["id"] for shard in shards for row in shard]
    for shard in shards:
        shard.set_epoch(0)
    if even == "drop":
        left_out = [row for _, row in shards[0].dropped]
        assert len(left_out) == n % world
        assert sorted(rows + left_out) == list(range(n))
    else:
        for _, row in [row for shard in shards for row in shard.padded]:
            rows.remove(row)
        assert sorted(rows) == list(range(n))
