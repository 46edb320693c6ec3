"""Elastic resume: over any history of world sizes each row comes exactly once in an epoch."""

import functools
import itertools
import json
import operator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miniray.data import DataLoader, IndexedDataset, JsonlDataset, merge_states
from miniray.data.plan.progress import after, extended, portion, positions_at, remaining, size
from miniray.errors import DataError


def dataset(n, rank=0, world=1, **options):
    data = [{"id": i} for i in range(n)]
    return IndexedDataset(data, rank=rank, world_size=world, **{"seed": 5, **options})


def ids(batch):
    return batch["id"].tolist()


# -- intervals -----------------------------------------------------------------------------------


def test_what_three_ranks_leave():
    # 10 rows: [0:4] [4:7] [7:10], two taken from each.
    assert after(remaining(10, []), [3, 2], "exact") == [(2, 4), (6, 7), (9, 10)]
    assert after(remaining(10, []), [3, [0, 3, 9]], "exact") == [(0, 4)]


def test_portions_and_positions():
    intervals = [(2, 4), (6, 7), (9, 12)]
    assert size(intervals) == 6
    assert portion(intervals, 1, 5) == [(3, 4), (6, 7), (9, 11)]
    assert positions_at(intervals, [0, 2, 5]) == [2, 6, 11]
    assert portion(intervals, 3, 3) == []


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 300),
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 40)), max_size=5),
    st.sampled_from(["exact", "drop", "pad"]),
)
def test_joined_histories_leave_what_separate_ones_leave(n, stages, even):
    joined = []
    for stage in stages:
        joined = extended(joined, stage, n)
    stages = [list(stage) for stage in stages if stage[1]]
    assert len(joined) <= len(stages)
    assert remaining(n, joined, even) == remaining(n, stages, even)


def test_a_run_restarted_often_has_a_short_history():
    history = []
    for _ in range(500):
        history = extended(history, [64, 128], 10**9)
    assert history == [[64, 64_000]]


# -- loaders -------------------------------------------------------------------------------------

histories = st.lists(st.tuples(st.integers(1, 7), st.integers(0, 6)), min_size=1, max_size=4)


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 120), histories, st.integers(1, 7), st.booleans(), st.integers(0, 3))
def test_exactly_once_over_any_history(n, history, batch, shuffle, epoch):
    """A run is stopped after so many steps, again and again, and goes on with other ranks."""
    seen, state = [], None
    for number, (world, steps) in enumerate([*history, (3, None)]):
        loaders = []
        for rank in range(world):
            loader = DataLoader(dataset(n, rank, world, shuffle=shuffle), batch, prefetch=0)
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
    """Each rank is stopped between any two batches of its own, or has come to the end."""
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


def test_a_missing_rank_is_named():
    states = states_of(4)
    with pytest.raises(DataError, match=r"ranks \[1, 3\] are missing \(2 of 4 given\)"):
        merge_states([states[0], states[2]])


def test_states_of_different_runs_are_not_merged():
    with pytest.raises(DataError, match="n is 20 on rank 0 and 21 on rank 1"):
        merge_states([states_of(2)[0], states_of(2, n=21)[1]])
    with pytest.raises(DataError, match="takes a list with the states of all ranks"):
        merge_states(states_of(2)[0])
    with pytest.raises(DataError, match="epoch is 1 on rank 0 and 0 on rank 1"):
        merge_states([{**states_of(2)[0], "epoch": 1, "taken": 2}, states_of(2)[1]])
    with pytest.raises(DataError, match="got none"):
        merge_states([])
    with pytest.raises(DataError, match="merged already"):
        merge_states([merge_states(states_of(2))])
    with pytest.raises(DataError, match="two states of rank 0 differ"):
        merge_states([states_of(1)[0], {**states_of(1)[0], "taken": 3}])


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"n": 21}, "other data"),
        ({"shuffle": True}, "taken with shuffle=False, and this dataset has shuffle='global'"),
        ({"even": "pad"}, "even='exact'"),
        ({"max_samples": 7}, "max_samples=-1"),
    ],
)
def test_a_state_of_something_else_is_refused(options, complaint):
    state = dataset(20).state_dict()
    with pytest.raises(DataError, match=complaint):
        dataset(**{"n": 20, **options}).load_state_dict(state)


def test_a_state_that_knew_files_by_their_sizes_is_refused_with_the_reason(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n' * 20)
    lines = JsonlDataset(path)
    # As it was made before: of names, rows and sizes.
    earlier = {"version": 1, "fingerprint": lines.sources[0].blocks.fingerprint([180])}
    with pytest.raises(DataError, match=r"an earlier version of miniray.*begin the epoch with"):
        lines.load_state_dict({**lines.state_dict(), **earlier})
    objects = dataset(3)  # known as they always were
    objects.load_state_dict({**objects.state_dict(), "version": 1})


@pytest.mark.parametrize(
    ("state", "complaint"),
    [
        (None, "not None"),
        ([], r"not \[\]"),
        ({}, "a state has 'version'; this has only"),
        ({"model": 1, "loader": {}}, "a state has 'version'; this has only model, loader"),
        ({"version": 2, "kind": "indexed"}, "a state has 'n'; this has only version, kind"),
    ],
)
def test_what_is_no_state_is_refused(state, complaint):
    with pytest.raises(DataError, match=complaint):
        DataLoader(dataset(3), 2).load_state_dict(state)
    with pytest.raises(DataError, match=complaint):
        dataset(3).load_state_dict(state)
    with pytest.raises(DataError, match=complaint):
        merge_states([state])


def test_a_state_of_another_version_is_refused():
    with pytest.raises(DataError, match="version 9"):
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
