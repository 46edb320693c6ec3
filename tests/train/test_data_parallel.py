"""DataParallelTrainer: sharding, aggregation and syncing, with numbers computed by hand."""

import numpy as np
import pytest

import miniray
from miniray.errors import NonFiniteWeightsError, WeightsMismatchError
from miniray.ps.strategies.momentum import Momentum
from miniray.train import DataParallelTrainer
from tests.train.workers_for_tests import Counter

pytestmark = pytest.mark.usefixtures("_light_workers")


class CounterTrainer(DataParallelTrainer):
    def create_worker(self, worker_id, **kwargs):
        return Counter.remote(worker_id)


def weights_of(trainer):
    return [float(w[0][0]) for w in miniray.get([w.get_weights.remote() for w in trainer.workers])]


def test_an_epoch():
    with CounterTrainer(num_workers=4, backend="local", progress=False) as trainer:
        result = trainer.train(epochs=1)
        # All begin with worker 0's 0.0, add 1, 2, 3 and 4, and are averaged.
        assert weights_of(trainer) == [2.5] * 4
        stats = trainer.get_sync_stats()
    assert result["loss"] == pytest.approx(2.5)  # mean of 1, 2, 3, 4
    assert result["accuracy"] == pytest.approx(0.15)
    assert result["synced"] is True
    assert stats["num_syncs"] == 1
    assert stats["strategy"] == "average"


def test_sync_happens_every_so_many_epochs():
    with CounterTrainer(2, sync_interval=3, backend="inline", progress=False) as trainer:
        history = trainer.train(epochs=2).history
        assert weights_of(trainer) == [2.0, 4.0]  # 2 x 1 and 2 x 2, still apart
        assert [record["synced"] for record in history] == [False, False]
        result = trainer.train(epochs=1)
        assert weights_of(trainer) == [4.5, 4.5]  # mean of 3 and 6
        assert result["synced"]
        assert result.sync["num_syncs"] == 1


def test_training_starts_from_worker_0s_weights_unless_told_otherwise():
    with CounterTrainer(3, sync_interval=9, backend="inline", progress=False) as trainer:
        trainer.train(epochs=0)
        assert weights_of(trainer) == [0.0, 0.0, 0.0]
    with CounterTrainer(
        3, sync_interval=9, backend="inline", progress=False, initial_sync=False
    ) as trainer:
        trainer.train(epochs=0)
        assert weights_of(trainer) == [0.0, 1.0, 2.0]


def test_every_worker_gets_its_shard_and_the_arguments_of_train():
    with CounterTrainer(3, backend="inline", progress=False) as trainer:
        trainer.train(epochs=1, batch_size=128, dataset="cifar10", unknown_to_workers=1)
        seen = miniray.get([w.seen.remote() for w in trainer.workers])
    assert [s["shard"] for s in seen] == [(i, 3, 128, "cifar10") for i in range(3)]


def test_an_error_while_loading_a_shard_is_not_taken_for_no_sharding():
    @miniray.remote
    class NoData(Counter.__wrapped__):
        def load_data_shard(self, shard_id, num_shards):
            if shard_id == 1:
                raise FileNotFoundError("part-1.parquet")

    with pytest.raises(FileNotFoundError) as caught:
        DataParallelTrainer(2, worker=NoData, backend="local", progress=False).train(epochs=1)
    assert caught.value.worker == 1
    assert caught.value.function.endswith("NoData.load_data_shard")


def test_loading_shards_is_optional_in_that_the_method_may_be_absent():
    @miniray.remote
    class Bare:
        def __init__(self):
            self.w = np.zeros(1)

        def train_epoch(self, epoch):
            return {"loss": 0.0}

        def get_weights(self):
            return [self.w]

        def set_weights(self, weights):
            self.w = weights[0]

    with DataParallelTrainer(2, worker=Bare, backend="inline", progress=False) as trainer:
        assert trainer.train(epochs=1)["loss"] == 0


@pytest.mark.parametrize("missing", ["train_epoch", "get_weights", "set_weights"])
def test_a_worker_that_lacks_a_required_method_is_refused_before_training(missing):
    members = {name: lambda self, *args: None for name in ("train_epoch", "get_weights")}
    members["set_weights"] = members["train_epoch"]
    del members[missing]
    incomplete = miniray.remote(type("Incomplete", (), members))
    with pytest.raises(TypeError, match=rf"Incomplete\b.*\b{missing}\(\)"):
        DataParallelTrainer(2, worker=incomplete, backend="inline", progress=False).train(epochs=1)


def test_weights_of_workers_count_whether_given_before_or_after_the_start():
    with CounterTrainer(2, sync_strategy="weighted", backend="inline", progress=False) as trainer:
        trainer.set_worker_weight(0, 1.0)
        trainer.set_worker_weight(1, 3.0)
        trainer.train(epochs=1)
        assert weights_of(trainer) == [1.75, 1.75]  # (1 x 1 + 3 x 2) / 4
        trainer.set_worker_weight(1, 0.0)
        trainer.train(epochs=1)
        assert weights_of(trainer) == [2.75, 2.75]  # worker 0's 1.75 + 1


def test_worker_weights_are_refused_where_they_would_do_nothing(raises):
    with raises(ValueError):
        CounterTrainer(2).set_worker_weight(0, 1.0)
    weighted = CounterTrainer(2, sync_strategy="weighted")
    with raises(ValueError):
        weighted.set_worker_weight(2, 1.0)
    for wrong in (-1.0, float("inf"), "x", None):
        with raises(ValueError):
            weighted.set_worker_weight(0, wrong)


def test_worker_weights_count_wherever_the_strategy_is_based_on_the_mean():
    with CounterTrainer(
        2, sync_strategy="ema", decay=0.0, backend="inline", progress=False
    ) as trainer:
        trainer.set_worker_weight(1, np.float32(3))
        trainer.train(epochs=1)
        assert weights_of(trainer) == [1.75, 1.75]  # (1 x 1 + 3 x 2) / 4


def test_a_strategy_may_be_an_object_and_goes_into_checkpoints(tmp_path):
    options = {"worker": Counter, "run_dir": tmp_path / "run", "backend": "inline"}
    with DataParallelTrainer(2, 1, Momentum(0.5), progress=False, **options) as trainer:
        trainer.train(epochs=1)
        trainer.save_checkpoint(0)
    with DataParallelTrainer(2, 1, "momentum", momentum=0.5, progress=False, **options) as trainer:
        trainer.train(epochs=2, resume=True)
        assert weights_of(trainer) == [3.75, 3.75]  # as computed below


def test_arguments_of_the_strategy_are_given_by_keyword():
    with CounterTrainer(
        2, sync_strategy="momentum", momentum=0.5, lr=1.0, backend="inline", progress=False
    ) as trainer:
        trainer.train(epochs=2)
        # Epoch 1: change 1.5, velocity 1.5, weights 1.5.
        # Epoch 2: the workers add 1 and 2 again: change 1.5, velocity 0.75 + 1.5, weights 3.75.
        assert weights_of(trainer) == pytest.approx([3.75, 3.75])


@pytest.mark.parametrize(
    "arguments",
    [
        {"sync_strategy": "averaged"},
        {"sync_interval": 0},
        {"sync_intervall": 5},
        {"callback": []},
        {"batch_size": 8},
        {"on_nonfinite": "ignore"},
        {"staleness_power": 1},
        {"sync_strategy": "krum"},
    ],
)
def test_unknown_strategies_and_arguments_are_refused_at_once(arguments, raises):
    with raises((ValueError, TypeError)):
        CounterTrainer(2, **arguments)


def test_unknown_option_of_a_strategy_is_refused_at_once():
    with pytest.raises(TypeError, match="'momentun'"):
        CounterTrainer(2, sync_strategy="average", momentun=0.9)


def test_a_sync_nobody_waited_for_is_waited_for():
    class Careless(CounterTrainer):
        def train_epoch(self, epoch, **kwargs):
            refs = [w.train_epoch.remote(epoch) for w in self.workers]
            self.param_server.sync_from_workers.remote(self.workers)
            return {"loss": miniray.get(refs)[0]["loss"]}

    with Careless(2, backend="local", progress=False) as trainer:
        result = trainer.train(epochs=3)
        assert result["synced"] is True
        assert result.sync["num_syncs"] == 3
        assert weights_of(trainer) == [4.5, 4.5]


def test_a_sync_that_failed_is_not_reported_as_synced():
    @miniray.remote
    class Stubborn(Counter.__wrapped__):
        def set_weights(self, weights):
            if self.epochs:
                raise RuntimeError("will not")
            super().set_weights(weights)

    trainer = DataParallelTrainer(2, worker=Stubborn, backend="local", progress=False)
    with pytest.raises(RuntimeError, match="will not"):
        trainer.train(epochs=1)
    assert trainer.history == []


@pytest.mark.parametrize(
    ("weights", "error", "name"),
    [(None, TypeError, "none"), ([], ValueError, "empty"), ([1.0, "a"], TypeError, "text")],
)
def test_first_weights_that_cannot_be_combined_raise(weights, error, name, golden):
    """The error names the worker. The server knows only the entry."""

    @miniray.remote
    class Wrong(Counter.__wrapped__):
        def get_weights(self):
            return weights

    trainer = DataParallelTrainer(1, worker=Wrong, backend="local", progress=False)
    with pytest.raises(error) as caught:
        trainer.train(epochs=1)
    assert type(caught.value) is error
    golden(f"first_weights_{name}.txt", str(caught.value))


class Biased(Counter.__wrapped__):
    """Has a bias that is Python's before the first step and numpy's after it."""

    def __init__(self, worker_id):
        super().__init__(worker_id, start=0)
        self.b = 0.0

    def train_epoch(self, epoch):
        self.b -= np.mean([1.0 + self.worker_id])
        return super().train_epoch(epoch)

    def get_weights(self):
        return {"w": self.w, "b": self.b}

    def set_weights(self, weights):
        self.w, self.b = weights["w"].copy(), weights["b"]


def test_a_bias_may_be_a_plain_number():
    with DataParallelTrainer(2, worker=Biased, backend="inline", progress=False) as trainer:
        trainer.train(epochs=2)
        weights = trainer.model_weights()
    assert weights["b"] == -3.0  # twice the mean of 1 and 2
    assert type(weights["b"]) is float


class Broken(Counter.__wrapped__):
    """Its weights are what cannot be combined from epoch 1 on."""

    def train_epoch(self, epoch, wrong=None):
        self.wrong = wrong if epoch and self.worker_id else None
        return super().train_epoch(epoch)

    def get_weights(self):
        return [self.w] if getattr(self, "wrong", None) is None else [np.array(self.wrong)]


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [([1.0, 2.0], WeightsMismatchError), ([float("nan")], NonFiniteWeightsError)],
)
def test_what_a_sync_finds_wrong_is_said_with_its_epoch(wrong, kind, raises):
    trainer = DataParallelTrainer(2, worker=Broken, backend="inline", progress=False)
    with trainer, raises(kind) as caught:
        trainer.train(epochs=2, wrong=wrong)
    assert caught.value.epoch == 1
    assert getattr(caught.value, "workers", (1,)) == (1,)


def test_what_a_strategy_raises_is_said_with_its_epoch():
    trainer = CounterTrainer(2, 1, "weighted", backend="inline", progress=False)
    trainer.set_worker_weight(0, 0)
    trainer.set_worker_weight(1, 0)
    with trainer, pytest.raises(ValueError) as caught:
        trainer.train(epochs=1)
    assert caught.value.epoch == 0
    assert "Server" in caught.value.function


class InPlace(Counter.__wrapped__):
    def train_epoch(self, epoch):
        self.w += 1
        return {}

    def set_weights(self, weights):
        self.w = weights[0]


def test_who_changes_received_arrays_in_place_is_told_to_copy_them(check_message):
    trainer = DataParallelTrainer(2, worker=InPlace, backend="local", progress=False)
    with trainer, pytest.raises(ValueError) as caught:
        trainer.train(epochs=1)
    assert caught.value.worker == 1
    check_message(caught.value.remote_traceback.splitlines()[-1])
