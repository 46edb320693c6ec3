"""Distributed evaluation equals evaluation in one process."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

import miniray
from miniray.train import DataParallelTrainer
from miniray.train.workers.evaluate import combine, cut
from tests.train.workers_for_tests import Counter


@given(st.lists(st.integers(-1000, 1000), min_size=1, max_size=60), st.integers(1, 9))
def test_sums_and_counts_give_the_mean_of_all_samples(values, world):
    results = []
    for worker in range(world):
        shard, size = cut(values, worker, world)
        if size:
            results.append((worker, size, {"x": (sum(shard), size)}))
    assert combine(results)["x"] == float(Fraction(sum(values), len(values)))


@miniray.remote
class Judge(Counter.__wrapped__):
    def evaluate(self, data, scale=1.0):
        self.got = len(data)
        return {"loss": float(np.mean(data)) * scale, "top": (float(np.sum(data > 5)), len(data))}


def test_unequal_shards_do_not_shift_the_result():
    data = np.arange(10.0)  # cut 4, 3, 3
    with DataParallelTrainer(3, worker=Judge, backend="inline", progress=False) as trainer:
        trainer.train(epochs=0)
        scores = trainer.evaluate(data=data, scale=2.0)
    assert scores == {"loss": 9.0, "top": 0.4, "num_samples": 10}


def test_fewer_samples_than_workers():
    with DataParallelTrainer(4, worker=Judge, backend="inline", progress=False) as trainer:
        trainer.train(epochs=0)
        assert trainer.evaluate(data=np.array([7.0, 1.0])) == {
            "loss": 4.0,
            "top": 0.5,
            "num_samples": 2,
        }


def test_workers_with_their_own_held_out_shards_during_training():
    @miniray.remote
    class Held(Counter.__wrapped__):
        def evaluate(self, shard_id, num_shards):
            n = shard_id + 1
            return {"accuracy": shard_id / 10, "val_loss": 0.5, "num_samples": n}

    with DataParallelTrainer(
        3, worker=Held, backend="inline", progress=False, eval_interval=2
    ) as trainer:
        history = trainer.train(epochs=4).history
    assert ["val_accuracy" in record for record in history] == [False, True, False, True]
    assert math.isclose(history[1]["val_accuracy"], (0.0 * 1 + 0.1 * 2 + 0.2 * 3) / 6)
    assert history[1]["val_loss"] == 0.5  # and not val_val_loss, where it is called so already


def test_a_mean_without_its_number_of_samples_is_refused(raises):
    @miniray.remote
    class Vague(Counter.__wrapped__):
        def evaluate(self):
            return {"accuracy": 0.5}

    with DataParallelTrainer(2, worker=Vague, backend="inline", progress=False) as trainer:
        trainer.train(epochs=0)
        with raises(ValueError):
            trainer.evaluate()


def test_workers_that_cannot_evaluate_are_told_what_is_missing(raises):
    with DataParallelTrainer(1, worker=Counter, backend="inline", progress=False) as trainer:
        trainer.train(epochs=0)
        with raises(TypeError):
            trainer.evaluate()
        with raises(RuntimeError):
            DataParallelTrainer(1, worker=Counter).evaluate()


def test_an_error_names_the_worker():
    @miniray.remote
    class Broken(Counter.__wrapped__):
        def evaluate(self, shard_id):
            if shard_id == 1:
                raise ZeroDivisionError("empty shard")
            return {"x": (1, 1)}

    with DataParallelTrainer(2, worker=Broken, backend="inline", progress=False) as trainer:
        trainer.train(epochs=0)
        with pytest.raises(ZeroDivisionError) as caught:
            trainer.evaluate()
    assert caught.value.worker == 1


class Rows(Dataset):
    """Dataset that, like most, returns two arrays for a slice instead of a list of rows."""

    def __init__(self, count):
        self.x = np.arange(2.0 * count).reshape(count, 2)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.x[index] + 1


class Strict(Rows):
    def __getitem__(self, index):
        first, second = super().__getitem__(index)[0].tolist()
        return float(first), float(second)


@pytest.mark.parametrize("kind", [Rows, Strict])
@pytest.mark.parametrize("wrap", [lambda data: data, lambda data: Subset(data, range(6))])
def test_a_dataset_is_cut_by_rows_whatever_it_makes_of_a_slice(kind, wrap):
    data = wrap(kind(6))
    shards = [cut(data, shard, 3) for shard in range(3)]
    assert [size for _, size in shards] == [2, 2, 2]
    rows = [row for shard, _ in shards for row in shard]
    assert np.array_equal(np.array(rows), np.array([data[i] for i in range(6)]))


def test_columns_are_cut_alike(raises):
    x, y = torch.arange(5), np.arange(5.0)
    for data in (TensorDataset(x, torch.tensor(y)), (x, y)):
        shards = [cut(data, shard, 2)[0] for shard in range(2)]
        assert [[column.tolist() for column in shard] for shard in shards] == [
            [[0, 1, 2], [0, 1, 2]],
            [[3, 4], [3, 4]],
        ]
    with raises(ValueError):
        cut((x, y[:4]), 0, 2)


def test_what_has_no_rows_is_refused(raises):
    with raises(TypeError):
        cut(DataLoader(Rows(3)), 0, 2)
    with raises(TypeError):
        cut((row for row in [1, 2]), 0, 2)


def test_a_mean_over_no_samples_counts_for_nothing():
    nothing = {"loss": math.nan, "num_samples": 0}
    scores = combine([(0, None, {"loss": 2.0, "num_samples": 3}), (1, None, nothing)])
    assert scores == {"loss": 2.0, "num_samples": 3}
    assert math.isnan(combine([(0, None, nothing)])["loss"])


@pytest.mark.parametrize("value", [np.ones((2, 2)), "good", torch.zeros(3), None])
def test_a_score_that_is_no_number_is_named(value):
    with pytest.raises(TypeError, match=r"(?s)worker 4\b.*'score'"):
        combine([(4, None, {"score": value, "num_samples": 2})])


def test_evaluation_while_training_needs_workers_that_can_and_leaves_training_data_alone(raises):
    options = {"backend": "inline", "progress": False, "eval_interval": 1}
    with raises(TypeError):
        DataParallelTrainer(1, worker=Counter, **options).train(epochs=1)

    @miniray.remote
    class Own(Counter.__wrapped__):
        def evaluate(self, data=None):
            return {"given": (data is not None, 1)}

    with DataParallelTrainer(1, worker=Own, **options) as trainer:
        assert trainer.train(epochs=1, data=[1, 2, 3])["val_given"] == 0
