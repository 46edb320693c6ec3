"""Micro-batches, mini-batches, sources of prompts, metrics."""

import collections
import itertools
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miniray.data import DataLoader, IndexedDataset
from miniray.rl.metrics import Metrics, pool, record
from miniray.rl.rollouts.batch import Generated, Rollouts, split_by_tokens
from miniray.rl.rollouts.sources import ListSource, LoaderSource, held_out, place_of_all, rows_of
from miniray.rl.update import mini_batch_of

# -- micro-batches by tokens ----------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 30)), max_size=40), st.integers(1, 200)
)
def test_micro_batches_hold_each_sequence_once_and_the_budget(lengths, budget):
    prompts, responses = [p for p, _ in lengths], [r for _, r in lengths]
    batches = split_by_tokens(prompts, responses, budget, range(len(lengths)))
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        width = max(prompts[i] for i in batch) + max(responses[i] for i in batch)
        assert len(batch) == 1 or len(batch) * width <= budget


def test_like_lengths_go_together():
    assert split_by_tokens([2, 9, 2, 9], [1, 1, 1, 1], 20, range(4)) == [[3, 1], [2, 0]]


def make_rollouts():
    prompts = [torch.tensor([1, 5]), torch.tensor([1, 5, 6, 7])]
    responses = [torch.tensor([8, 9, 2]), torch.tensor([4])]
    masks = [torch.tensor([1, 0, 1]), torch.tensor([1])]
    made = Generated(prompts, responses, ["a", "b"], masks)
    return Rollouts([{"row": 0}, {"row": 1}], [10, 11], [5, 5], made)


def test_a_micro_batch_is_padded_on_both_sides():
    rollouts = make_rollouts()
    (batch,) = rollouts.micro_batches(1000, device="cpu", among=[0, 1])
    order = batch.index.tolist()
    ids = dict(zip(order, batch.input_ids.tolist(), strict=True))
    assert ids == {0: [0, 0, 1, 5, 8, 9, 2], 1: [1, 5, 6, 7, 4, 0, 0]}
    there = dict(zip(order, batch.attention_mask.tolist(), strict=True))
    assert there == {0: [0, 0, 1, 1, 1, 1, 1], 1: [1, 1, 1, 1, 1, 0, 0]}
    places = dict(zip(order, batch.position_ids.tolist(), strict=True))
    assert places == {0: [0, 0, 0, 1, 2, 3, 4], 1: [0, 1, 2, 3, 4, 4, 4]}
    mask = dict(zip(order, batch.mask.tolist(), strict=True))  # the gap is not the policy's own
    assert mask == {0: [True, False, True], 1: [True, False, False]}
    assert [row["row"] for row in batch.rows] == order


def test_what_is_known_of_tokens_goes_with_them():
    rollouts = make_rollouts()
    for batch in rollouts.micro_batches(1, device="cpu"):  # one at a time
        rollouts.put("logp", batch, batch.responses.float())
    assert rollouts.tokens["logp"].tolist() == [[8, 0, 2], [4, 0, 0]]
    rollouts.keep(torch.tensor([False, True]))
    assert len(rollouts) == 1
    (batch,) = rollouts.micro_batches(100, device="cpu")
    assert rollouts.get("logp", batch).tolist() == [[4]]
    assert rollouts.ids.tolist() == [11]


def test_a_policy_may_give_lists_of_token_ids():
    made = Rollouts([{}], [0], [0], Generated([[1]], [[3, 4]], ["ab"], masks=[[1, 0]]))
    assert made.responses[0].tolist() == [3, 4]
    assert made.mask.tolist() == [[True, False]]


@pytest.mark.parametrize(
    "made",
    [
        [torch.tensor([1])],
        Generated([torch.tensor([1])], [torch.tensor([[1]])], [""]),
    ],
)
def test_what_is_no_response_is_named(made, raises):
    with raises((TypeError, ValueError)):
        Rollouts([{}], [0], [0], made)


def test_a_policy_that_returns_too_few_is_told(raises):
    one = torch.ones(1)
    with raises(ValueError):
        Rollouts([{}, {}], [0, 1], [0, 0], Generated([one, one], [one], ["", ""]))


# -- mini-batches ---------------------------------------------------------------------------------


@given(st.integers(1, 8), st.integers(0, 100), st.integers(0, 2**62), st.integers(1, 4))
def test_mini_batches_do_not_depend_on_who_has_the_sequences(count, total, seed, workers):
    ids = torch.arange(total)
    whole = mini_batch_of(ids, count, (seed, 3, 0))
    parts = [mini_batch_of(part, count, (seed, 3, 0)) for part in ids.chunk(workers)]
    assert torch.equal(torch.cat(parts), whole)
    sizes = torch.bincount(whole, minlength=count)
    assert int(sizes.max() - sizes.min()) <= 1
    for part in parts:
        own = torch.bincount(part, minlength=count)
        assert int(own.max() - own.min()) <= 2


def test_mini_batches_differ_from_epoch_to_epoch():
    made = {tuple(mini_batch_of(torch.arange(40), 4, (1, 0, e)).tolist()) for e in range(10)}
    assert len(made) == 10


# -- prompts --------------------------------------------------------------------------------------

ROWS = [{"id": i} for i in range(10)]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_a_list_is_shared_out_the_same_way_over_any_number_of_workers(world):
    sources = [ListSource(ROWS, 4, rank, world) for rank in range(world)]
    alone = ListSource(ROWS, 4, 0, 1)
    seen = []
    for step in range(6):  # two epochs of 4 + 4 + 2
        parts = [source.rows(step, seed=5) for source in sources]
        assert [row for part in parts for row in part] == alone.rows(step, seed=5)
        seen.append([row["id"] for part in parts for row in part])
    first, second = itertools.chain(*seen[:3]), itertools.chain(*seen[3:])
    assert sorted(first) == sorted(second) == list(range(10))
    assert seen[:3] != seen[3:]
    assert [r["id"] for r in alone.rows(0, seed=6)] != seen[0]


class Batches:
    """Ten rows in batches of four; deterministic, and without memory of where it was."""

    def __init__(self):
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for i in range(0, 10, 4):
            yield [{"id": (j, self.epoch)} for j in range(i, min(i + 4, 10))]


class Remembering(Batches):
    def __init__(self):
        super().__init__()
        self.at = 0

    def __iter__(self):
        batches = list(super().__iter__())
        while self.at < len(batches):
            self.at += 1
            yield batches[self.at - 1]
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


@pytest.mark.parametrize("kind", [Batches, Remembering])
@pytest.mark.parametrize("after", [0, 2, 3, 5])
def test_a_loader_goes_on_for_ever_and_resumes(kind, after):
    source = LoaderSource(kind(), per_step=99, rank=0)
    seen = [[r["id"] for r in source.rows(step, 0)] for step in range(7)]
    assert [len(rows) for rows in seen] == [4, 4, 2, 4, 4, 2, 4]
    assert seen[3][0] == (0, 1)
    first = LoaderSource(kind(), per_step=99, rank=0)
    for step in range(after):
        first.rows(step, 0)
    other = LoaderSource(kind(), per_step=99, rank=0)
    other.load_state_dict(first.state_dict())
    assert [[r["id"] for r in other.rows(step, 0)] for step in range(after, 7)] == seen[after:]


def test_a_loader_that_takes_the_place_of_another_catches_up():
    source = LoaderSource(Batches(), per_step=99, rank=0)
    assert [r["id"] for r in source.rows(4, 0)] == [(j, 1) for j in (4, 5, 6, 7)]


def test_a_loader_of_single_rows():
    source = LoaderSource([{"id": i} for i in range(5)], per_step=2, rank=0)
    assert [[r["id"] for r in source.rows(s, 0)] for s in range(3)] == [[0, 1], [2, 3], [4]]


class Torchs:
    """As torch's DataLoader with ``batch_size=None``: it gives rows, and has the attribute."""

    batch_size = None

    def __iter__(self):
        return iter([{"id": "a", "prompt": "1"}, {"id": "b", "prompt": "2"}])


def test_a_loader_that_does_not_batch_gives_rows():
    both = [*Torchs()]
    assert LoaderSource(Torchs(), per_step=2, rank=0).rows(0, 0) == both
    assert [row for _, row in held_out(lambda rank, world: Torchs(), 0, 1)] == both


@pytest.mark.parametrize(
    "batch",
    [
        {"id": [1, 2], "truth": {"style": ["a", "b"], "value": [3, 4]}},
        {"id": [1, 2], "prompt": [{"role": ["user", "user"]}]},
    ],
)
def test_a_batch_whose_rows_were_mixed_up_names_the_way_out(batch, raises):
    with raises(ValueError):
        rows_of(batch)


def together(sources, steps):
    """Ids that all workers get in each of these steps; in threads that sum as workers do."""
    barrier, numbers = threading.Barrier(len(sources)), {}

    def worker(rank):
        def total(number):
            numbers[rank] = number
            barrier.wait(30)
            found = sum(numbers.values())
            barrier.wait(30)
            return found

        return [[row["id"] for row in sources[rank].rows(step, 0, total)] for step in steps]

    with ThreadPoolExecutor(len(sources)) as pool:
        found = list(pool.map(worker, range(len(sources))))
    return [[i for part in parts for i in part] for parts in zip(*found, strict=True)]


def numbered(world, **batching):
    def source(rank):
        data = IndexedDataset(
            [{"id": i, "n": 1 + i % 7} for i in range(41)],
            rank=rank,
            world_size=world,
            shuffle=True,
            seed=3,
            name="numbers",
        )
        return LoaderSource(DataLoader(data, **batching), 99, rank)

    return [source(rank) for rank in range(world)]


BY_TOKENS = {"batch_size": 20, "batch_by": "tokens", "length": "n", "bucket_rows": 16}


@pytest.mark.parametrize("batching", [{"batch_size": 5}, BY_TOKENS], ids=["rows", "tokens"])
@pytest.mark.parametrize("later", [4, 3, 6])
@pytest.mark.parametrize("before", range(2, 8))
def test_an_epoch_has_each_row_once_whoever_is_at_its_end_first(batching, later, before):
    first = numbered(4, **batching)  # 11, 10, 10 and 10 rows: three batches of 5, two of the others
    seen = together(first, range(before))
    places = json.loads(json.dumps([source.state_dict() for source in first]))
    place, then = place_of_all(places), numbered(later, **batching)
    for source, own in zip(then, places, strict=False):
        source.load_state_dict(place if later != 4 or place["to_all"] else own)
    for source in then[len(places) :]:
        source.load_state_dict(place)
    seen = [*itertools.chain(*seen, *together(then, range(before, before + 9)))]
    assert sorted(seen[:41]) == sorted(seen[41:82]) == list(range(41))
    assert seen[:41] != seen[41:82]


def test_workers_that_never_wait_have_no_place_in_common():
    sources = numbered(4, batch_size=5)
    for source in sources:
        for step in range(3):
            source.rows(step, 0)
    assert (
        "epoch is 0 on rank 0 and 1 on rank 1"
        in place_of_all([source.state_dict() for source in sources])["apart"]
    )


def test_loaders_that_give_nothing_or_nonsense_are_named(raises):
    with raises(ValueError):
        LoaderSource([], 2, rank=3).rows(0, 0)
    with raises(TypeError):
        LoaderSource([["text"]], 2, rank=3).rows(0, 0)
    with raises(TypeError):
        LoaderSource(5, 2, rank=3)


@pytest.mark.parametrize("data", [ROWS, lambda rank, world: [ROWS[rank::world]]])
def test_held_out_rows_are_there_once(data):
    seen = collections.Counter(row["id"] for rank in range(3) for _, row in held_out(data, rank, 3))
    assert seen == dict.fromkeys(range(10), 1)


# -- metrics --------------------------------------------------------------------------------------


def test_metrics_are_not_means_of_means():
    first, second = Metrics(), Metrics()
    first.extend("reward", [1, 0, 0, 0])
    second.extend("reward", [1])
    first.total("tokens", 30)
    second.total("tokens", 5)
    first.add("update_seconds", 2.0)
    second.add("update_seconds", 3.0)
    first.add("kl", 0.5, weight=10)
    second.add("kl", 2.0, weight=0)  # no tokens: no part in it
    line = record(pool([first.export(), second.export()]))
    assert line == {
        "reward": 0.4, "kl": 0.5, "counts": {"tokens": 35}, "timing": {"update": 3.0},
        "range": {"reward": [0, 1]},
    }  # fmt: skip
