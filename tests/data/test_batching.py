"""Batches by tokens, groups kept together, mixtures."""

import functools
import itertools
import json
import operator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miniray.data import DataLoader, IndexedDataset, Mixture, ParquetDataset, merge_states
from miniray.errors import DataError, RowError

# -- tokens --------------------------------------------------------------------------------------


def texts(lengths, rank=0, world=1, **options):
    data = [{"id": i, "n": n} for i, n in enumerate(lengths)]
    return IndexedDataset(data, rank=rank, world_size=world, **{"seed": 2, **options})


def by_tokens(dataset, tokens=100, chunk=16):
    return DataLoader(dataset, tokens, batch_by="tokens", length="n", bucket_rows=chunk, prefetch=0)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(1, 60), max_size=90),
    st.integers(1, 4),
    st.booleans(),
    st.integers(60, 300),
)
def test_every_row_once_and_no_batch_too_large(lengths, world, shuffle, tokens):
    seen = []
    for rank in range(world):
        loader = by_tokens(texts(lengths, rank, world, shuffle=shuffle), tokens)
        batches = list(loader)
        loader.set_epoch(0)
        assert len(loader) == len(batches)
        for batch in batches:
            assert batch["n"].max() * len(batch["n"]) <= tokens
            seen += batch["id"].tolist()
    assert sorted(seen) == list(range(len(lengths)))


def test_rows_of_similar_length_come_together_and_padding_is_little():
    lengths = np.random.default_rng(0).integers(1, 100, 2000).tolist()
    loader = by_tokens(texts(lengths, shuffle=True), 1000, chunk=512)
    padded = sum(batch["n"].max() * len(batch["n"]) for batch in loader)
    assert sum(lengths) / padded > 0.9
    loader.set_epoch(0)
    sizes = [batch["n"].max() for batch in loader]
    assert sizes != sorted(sizes)  # but not from short to long


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(1, 60), max_size=80),
    st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=4), max_size=3),
)
def test_exactly_once_over_any_history(lengths, history):
    """Stopped between any two batches, in the midst of a chunk too, and resumed on other ranks."""
    seen, state = [], None
    for steps in [*history, [None, None]]:
        states = []
        for rank, count in enumerate(steps):
            loader = by_tokens(texts(lengths, rank, len(steps), shuffle=True))
            if state is not None:
                loader.load_state_dict(state)
            for number, batch in enumerate(loader):
                if number == count:
                    break
                seen += batch["id"].tolist()
                states = [s for s in states if s["rank"] != rank] + [loader.state_dict()]
            if not any(s["rank"] == rank for s in states):
                fresh = by_tokens(texts(lengths, rank, len(steps), shuffle=True))
                if state is not None:
                    fresh.load_state_dict(state)
                states.append(fresh.state_dict())
        state = json.loads(json.dumps(merge_states(states)))
    assert sorted(seen) == list(range(len(lengths)))


def test_states_at_the_ends_of_chunks_after_one_within_a_chunk():
    seen, state = [], None
    for steps in [1, 4, 4, None]:  # a chunk of 16 rows has four batches
        states = []
        for rank in range(2):
            loader = by_tokens(texts([5] * 200, rank, 2), tokens=20)
            if state is not None:
                loader.load_state_dict(state)
            seen += [
                row for batch in itertools.islice(loader, steps) for row in batch["id"].tolist()
            ]
            states.append(loader.state_dict())
        state = merge_states(states)
    assert sorted(seen) == list(range(200))


def test_one_ranks_state_is_not_enough():
    loader = by_tokens(texts([5] * 100, 0, 2))
    next(iter(loader))
    with pytest.raises(DataError, match="merge_states"):
        by_tokens(texts([5] * 100, 0, 2)).load_state_dict(loader.state_dict())


def test_a_state_of_other_batches_is_refused():
    state = by_tokens(texts([5] * 100), tokens=50).state_dict()
    with pytest.raises(ValueError, match=r"\[50, 16\].*\[60, 16\]"):
        by_tokens(texts([5] * 100), tokens=60).load_state_dict(state)
    with pytest.raises(ValueError, match="None"):
        DataLoader(texts([5] * 100), 3).load_state_dict(state)


def test_a_row_longer_than_a_batch_is_named():
    with pytest.raises(RowError, match=r"\b200\b.*\b100\b") as caught:
        list(by_tokens(texts([5, 200, 5])))
    assert caught.value.row == 1


@pytest.mark.parametrize("length", ["n", lambda row: len(row["n"])], ids=["column", "function"])
def test_length_that_cannot_be_found_names_the_row(length):
    data = IndexedDataset([{"n": [0]}, {"n": [0]}, {"n": None}])
    with pytest.raises(RowError) as caught:
        list(DataLoader(data, 20, batch_by="tokens", length=length))
    assert (caught.value.row, type(caught.value.__cause__)) == (2, TypeError)


def test_lengths_by_a_function_and_of_lists(tmp_path):
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"tokens": [[0] * (i % 7 + 1) for i in range(50)]}), path)
    for length in ("tokens", lambda row: len(row["tokens"])):
        loader = DataLoader(ParquetDataset(path), 20, batch_by="tokens", length=length)
        sizes = [[len(tokens) for tokens in batch["tokens"]] for batch in loader]
        assert sum(map(len, sizes)) == 50
        assert all(max(batch) * len(batch) <= 20 for batch in sizes)


# -- groups --------------------------------------------------------------------------------------


@pytest.fixture
def conversations(tmp_path):
    """60 conversations of 1 to 7 turns; row groups of 10 cut through them."""
    sizes = np.random.default_rng(1).integers(1, 8, 60)
    who = np.repeat(np.arange(60), sizes)
    turn = np.concatenate([np.arange(size) for size in sizes])
    table = pa.table({"who": who, "turn": turn, "id": np.arange(len(who))})
    pq.write_table(table, tmp_path / "c.parquet", row_group_size=10)
    return tmp_path / "c.parquet", len(who)


@pytest.mark.parametrize("shuffle", [False, "window", "global"])
@pytest.mark.parametrize("world", [1, 3, 20])
def test_a_conversation_stays_on_one_rank_and_in_order(conversations, world, shuffle):
    path, total = conversations
    whole = ParquetDataset(path, group_by="who", shuffle=shuffle, seed=3, window_bytes=700)
    assert len(whole) == total
    owner, rows, lengths = {}, [], []
    for rank in range(world):
        part = [(row["who"], row["turn"], row["id"]) for row in whole.shard(rank, world)]
        lengths.append(len(part))
        rows += [i for _, _, i in part]
        for who, _, _ in part:
            assert owner.setdefault(who, rank) == rank
        starts = [i for i, (_, turn, _) in enumerate(part) if turn == 0]
        assert bool(starts) == bool(part)
        for a, b in zip(starts, [*starts, len(part)][1:], strict=True):
            assert [turn for _, turn, _ in part[a:b]] == list(range(b - a))
            assert len({who for who, _, _ in part[a:b]}) == 1
    assert sorted(rows) == list(range(total))
    assert max(lengths) - total / world <= 7
    if shuffle and world == 1:
        assert rows != sorted(rows)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 5)), max_size=3), st.integers(1, 4))
def test_groups_over_any_history(history, batch):
    who = np.repeat(np.arange(25), np.arange(25) % 5 + 1)
    data = [{"id": i, "who": int(w)} for i, w in enumerate(who)]
    seen, state = [], None
    for world, steps in [*history, (2, None)]:
        states, owner = [], {}
        for rank in range(world):
            dataset = IndexedDataset(
                data, group_by="who", shuffle=True, seed=1, rank=rank, world_size=world
            )
            loader = DataLoader(dataset, batch, prefetch=0)
            if state is not None:
                loader.load_state_dict(state)
            iterator, length = iter(loader), len(loader)
            for _ in range(length if steps is None else min(steps, length)):
                rows = next(iterator)
                seen += rows["id"].tolist()
                for person in rows["who"].tolist():
                    assert owner.setdefault(person, rank) == rank
            states.append(loader.state_dict())
        state = merge_states(states)
    assert sorted(seen) == list(range(len(who)))


def test_a_key_that_cannot_name_a_group_is_named(raises):
    with raises(DataError):
        len(IndexedDataset([{"g": "a"}, {"g": [2]}], group_by="g"))


def test_rows_of_a_group_that_are_apart_are_named(tmp_path, raises):
    pq.write_table(pa.table({"who": ["a", "a", "b", "a"]}), tmp_path / "x.parquet")
    dataset = ParquetDataset(tmp_path / "x.parquet", group_by="who")
    with raises(DataError):
        len(dataset)


# -- mixtures ------------------------------------------------------------------------------------


def numbers(start, count, **options):
    return IndexedDataset(
        [{"id": i} for i in range(start, start + count)], name=f"n{start}", **options
    )


def mixture(world=1, rank=0, **options):
    sources = [(numbers(0, 300, shuffle=True), 3), (numbers(1000, 50, shuffle=True), 1)]
    return Mixture(sources, **{"seed": 5, **options}, rank=rank, world_size=world)


def test_proportions_and_sharding():
    whole = [row["id"] for row in mixture()]
    assert len(whole) == len(set(whole)) == 200  # the smaller one is used up at 4 × 50
    assert sum(i >= 1000 for i in whole) == 50
    for start in (0, 64):  # rounds; the last takes what is left over
        assert sum(i >= 1000 for i in whole[start : start + 64]) == 16
    parts = [[row["id"] for row in mixture(3, rank)] for rank in range(3)]
    assert functools.reduce(operator.iadd, parts, []) == whole
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_over_epochs_each_source_is_passed_through_exactly_once():
    dataset = mixture()
    epochs = [[row["id"] for row in dataset] for _ in range(6)]
    assert dataset.epoch == 6
    for epoch in epochs:
        assert sorted(i for i in epoch if i >= 1000) == list(range(1000, 1050))
    large = [i for epoch in epochs for i in epoch if i < 1000]
    for number in range(3):  # 900 rows are three passes
        assert sorted(large[300 * number : 300 * (number + 1)]) == list(range(300))


def test_until_all_have_come():
    rows = [row["id"] for row in mixture(until="all")]
    assert len(rows) == 400
    assert sorted(i for i in rows if i < 1000) == list(range(300))
    assert sorted(i for i in rows if i >= 1000) == sorted([*range(1000, 1050)] * 2)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.floats(0.1, 9)), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5)), max_size=3),
    st.integers(0, 2),
)
def test_mixtures_resume_on_other_ranks(sources, history, epoch):
    def make(rank, world):
        members = [(numbers(100 * k, n, shuffle=True), w) for k, (n, w) in enumerate(sources)]
        made = Mixture(members, seed=1, rank=rank, world_size=world)
        made.set_epoch(epoch)
        return made

    expected = sorted(row["id"] for row in make(0, 1))
    seen, state = [], None
    for world, steps in [*history, (2, None)]:
        loaders = [DataLoader(make(rank, world), 3, prefetch=0) for rank in range(world)]
        states = []
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
            iterator, length = iter(loader), len(loader)
            for _ in range(length if steps is None else min(steps, length)):
                seen += next(iterator)["id"].tolist()
            states.append(loader.state_dict())
        state = json.loads(json.dumps(merge_states(states)))
    assert sorted(seen) == expected


def test_members_of_different_kinds(parquet_folder):
    dataset = Mixture(
        [(ParquetDataset(parquet_folder, shuffle=True), 1), (numbers(1000, 100), 1)],
        seed=1,
        memory_budget="1MB",
    )
    rows = list(dataset)
    assert len(rows) == 200
    assert all(("data" in row) == (row["id"] < 1000) for row in rows)
    batch = next(iter(DataLoader(dataset, 40)))
    assert [d is None for d in batch["data"]] == [i >= 1000 for i in batch["id"].tolist()]
    names = {file for file, _ in dataset.row_ids}
    assert "n1000" in names
    assert len(names) == 4


def test_ranks_agree_on_members_seeds(parquet_folder):
    def ids(rank):
        members = [(ParquetDataset(parquet_folder, shuffle=True, max_samples=100), 1)]
        return list(Mixture(members, seed=9, rank=rank, world_size=2).row_ids)

    assert len({*ids(0), *ids(1)}) == 100


@pytest.mark.parametrize(
    ("datasets", "options"),
    [
        ([], {}),
        ([(numbers(0, 3), 0)], {}),
        ([(numbers(0, 3), "2")], {}),
        ([(numbers(0, 3, world_size=2), 1)], {}),
        ([(numbers(0, 3), 1)], {"until": "noon"}),
        ([(numbers(0, 3), 1)], {"seed": None, "world_size": 2}),
    ],
)
def test_bad_mixtures_are_refused(datasets, options, raises):
    with raises(ValueError):
        Mixture(datasets, **{"seed": 1, **options})


def test_interleaved_split_needs_random_access_and_fixed_batches(parquet_folder):
    members = [(ParquetDataset(parquet_folder, shuffle=True), 1), (numbers(1000, 50), 1)]
    with pytest.raises(ValueError, match="shuffle='global'"):
        Mixture(members, seed=1, split="interleaved")
    with pytest.raises(ValueError, match="split='contiguous'"):
        by_tokens(texts([5] * 10, split="interleaved"))
    cached = [(ParquetDataset(parquet_folder, shuffle="global"), 1), (numbers(1000, 50), 1)]
    mixed = Mixture(cached, seed=1, split="interleaved")
    parts = [[row["id"] for row in mixed.shard(rank, 3)] for rank in range(3)]
    assert len({row for part in parts for row in part}) == len(mixed) == 100


def test_a_mixture_with_nothing_of_a_source_is_refused(raises):
    with raises(TypeError):
        Mixture([numbers(0, 3)], seed=1)
    with raises(DataError):
        len(Mixture([(numbers(0, 3), 1), (numbers(0, 0), 1)], seed=1))
