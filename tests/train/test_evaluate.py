"""Distributed evaluation equals evaluation in one process."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import miniray
from miniray.train import DataParallelTrainer
from miniray.train.evaluate import combine, cut, shard_bounds
from tests.train.workers_for_tests import Counter


@given(st.integers(0, 500), st.integers(1, 40))
def test_shards_are_disjoint_complete_and_even(n, world):
    rows, sizes = [], []
    for shard in range(world):
        low, high = shard_bounds(n, shard, world)
        rows += range(low, high)
        sizes.append(high - low)
    assert rows == list(range(n))
    assert max(sizes) - min(sizes) <= 1


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
            return {"accuracy": shard_id / 10, "num_samples": n}

    with DataParallelTrainer(
        3, worker=Held, backend="inline", progress=False, eval_interval=2
    ) as trainer:
        history = trainer.train(epochs=4).history
    assert ["val_accuracy" in record for record in history] == [False, True, False, True]
    assert math.isclose(history[1]["val_accuracy"], (0.0 * 1 + 0.1 * 2 + 0.2 * 3) / 6)


def test_a_mean_without_its_number_of_samples_is_refused():
    @miniray.remote
    class Vague(Counter.__wrapped__):
        def evaluate(self):
            return {"accuracy": 0.5}

    with DataParallelTrainer(2, worker=Vague, backend="inline", progress=False) as trainer:
        trainer.train(epochs=0)
        with pytest.raises(ValueError, match=r"worker 0.*'accuracy' without the number of samples"):
            trainer.evaluate()


def test_workers_that_cannot_evaluate_are_told_what_is_missing():
    with DataParallelTrainer(1, worker=Counter, backend="inline", progress=False) as trainer:
        trainer.train(epochs=0)
        with pytest.raises(TypeError, match=r"Counter has no evaluate\(\)"):
            trainer.evaluate()
        with pytest.raises(RuntimeError, match="no workers before train"):
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
        with pytest.raises(ZeroDivisionError, match="worker 1: "):
            trainer.evaluate()
