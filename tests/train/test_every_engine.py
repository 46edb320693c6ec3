"""The training framework as it was asked for, on every engine: the code as users have it.

One engine of a kind serves all tests of it: starting Ray takes longer than everything else here.
"""

import statistics

import numpy as np
import pytest
import torch

import miniray
from miniray.ps import create_parameter_server
from miniray.train import BaseTrainer, DataParallelTrainer, load_model
from tests.ps import helpers as ps
from tests.train.workers_for_tests import Counter, Noisy

# Starting Ray, and four processes of it that load torch, takes its time on a busy machine.
pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module", params=["inline", "local", "ray"])
def engine(request):
    if request.param == "ray":
        pytest.importorskip("ray")
    miniray.init(backend=request.param, num_workers=4)
    yield request.param
    miniray.shutdown()


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path, monkeypatch, engine):
    """Instead of the one of this folder, which ends the engine after each test."""
    monkeypatch.chdir(tmp_path)


@miniray.remote
class MyWorker:
    """The worker that the trainer of the framework's description goes with."""

    def __init__(self, worker_id):
        torch.manual_seed(worker_id)
        self.model = torch.nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def train_epoch(self, epoch):
        loss = ((self.model(self.x) - self.y) ** 2).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        acc = ((self.model(self.x) - self.y).abs() < 0.5).float().mean()
        return {"loss": loss.item(), "accuracy": acc}

    def get_weights(self):
        return [p.detach().cpu() for p in self.model.parameters()]

    def set_weights(self, weights):
        with torch.no_grad():
            for param, new in zip(self.model.parameters(), weights):  # noqa: B905
                param.copy_(new)

    def load_data_shard(self, shard_id, num_shards, **kwargs):
        self.batch_size = kwargs["batch_size"]
        self.x = torch.randn(self.batch_size, 2)
        self.y = self.x @ torch.tensor([[3.0], [-1.0]]) + 2


#: As printed in the description, to the letter.
AS_PRINTED = """
from miniray.train import DataParallelTrainer

class MyTrainer(DataParallelTrainer):
    def create_worker(self, worker_id, **kwargs):
        return MyWorker.remote(worker_id)
    def on_epoch_end(self, epoch, result, **kwargs):    # optional
        super().on_epoch_end(epoch, result, **kwargs)
        print(f"Loss: {result['loss']:.4f}")

trainer = MyTrainer(num_workers=4, sync_interval=5, sync_strategy="average")
result = trainer.train(epochs=50, batch_size=128)
trainer.shutdown()
"""


def test_the_trainer_as_printed(capsys):
    names = {"MyWorker": MyWorker}
    exec(AS_PRINTED, names)
    result = names["result"]
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Loss: ")]
    assert len(shown) == result.epochs == 50
    assert result["loss"] < 1e-3
    assert result["accuracy"] == 1
    assert result.sync["num_syncs"] == 10
    assert [r["synced"] for r in result.history] == [(e + 1) % 5 == 0 for e in range(50)]


class Everything(DataParallelTrainer):
    """Trainer with medians and maxima, a custom sync, weights, and checkpoints saved in hooks."""

    def create_worker(self, worker_id, lr=None, **kwargs):
        return Counter.remote(worker_id, start=0, lr=lr)

    def train_epoch(self, epoch, **kwargs):
        results = miniray.get([w.train_epoch.remote(epoch) for w in self.workers])
        miniray.get(self.param_server.sync_from_workers.remote(self.workers))
        return {
            "loss": statistics.median(r["loss"] for r in results),
            "accuracy": max(r["accuracy"] for r in results),
        }

    def on_train_start(self, **kwargs):
        self.seen = [("start", kwargs)]

    def on_epoch_end(self, epoch, result, **kwargs):
        super().on_epoch_end(epoch, result, **kwargs)
        self.save_checkpoint(epoch)

    def on_train_end(self, history, **kwargs):
        self.returned = super().on_train_end(history)
        self.model_file = self.save_final_model()


@pytest.mark.slow_on_ray
def test_hooks_arguments_weights_own_aggregation_and_saving(tmp_path):
    trainer = Everything(3, sync_strategy="weighted", progress=False, run_dir=tmp_path / "run")
    trainer.set_worker_weight(2, 2.0)
    with trainer:
        result = trainer.train(epochs=2, lr=0.25, batch_size=64, dataset="cifar10")
        seen = miniray.get([w.seen.remote() for w in trainer.workers])
        stats = trainer.get_sync_stats()
    assert trainer.seen == [("start", {"lr": 0.25, "batch_size": 64, "dataset": "cifar10"})]
    assert [(s["shard"], s["lr"]) for s in seen] == [
        ((i, 3, 64, "cifar10"), 0.25) for i in range(3)
    ]
    assert result["loss"] == 1.5  # the median of 0.5, 1.5 and 2.5
    assert result["accuracy"] == 0.2
    assert trainer.returned is result
    assert (stats["num_syncs"], stats["strategy"]) == (2, "weighted")
    # Twice (1 + 2 + 2·3)/4 = 2.25.
    np.testing.assert_array_equal(load_model(trainer.model_file)[0], [4.5])
    assert result.checkpoint == trainer.checkpoints.newest()


@pytest.mark.slow_on_ray
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(tmp_path):
    def run(name, epochs, resume=False):
        trainer = DataParallelTrainer(
            2, 2, "momentum", momentum=0.9, worker=Noisy, progress=False, run_dir=tmp_path / name
        )
        with trainer:
            trainer.train(epochs, resume=resume)
            trainer.save_checkpoint()
            weights = miniray.get([w.get_weights.remote() for w in trainer.workers])
        return [w[0].tobytes() for w in weights]

    straight = run("straight", 5)
    run("stopped", 3)
    assert run("stopped", 5, resume=True) == straight


@miniray.remote
class Judge(Counter.__wrapped__):
    def evaluate(self, data, scale=1.0):
        return {"loss": float(np.mean(data)) * scale, "top": (float(np.sum(data > 5)), len(data))}

    def custom_method(self, x):
        return self.worker_id * x


@pytest.mark.slow_on_ray
def test_evaluation_and_epochs_without_a_barrier():
    """Ten samples split 4, 3, 3 count as ten, and no epoch is lost with mode="async"."""
    with DataParallelTrainer(3, worker=Judge, mode="async", progress=False) as trainer:
        result = trainer.train(epochs=3)
        seen = miniray.get([w.seen.remote() for w in trainer.workers])
        scores = trainer.evaluate(data=np.arange(10.0), scale=2.0)
    assert scores == {"loss": 9.0, "top": 0.4, "num_samples": 10}
    assert [s["epochs"] for s in seen] == [[0, 1, 2]] * 3
    assert [r["loss"] for r in result.history] == pytest.approx([2.0, 1.5, 4 / 3])


@pytest.mark.slow_on_ray
def test_a_loop_of_ones_own_on_the_base_trainer():
    class Custom(BaseTrainer):
        def create_worker(self, worker_id, **kwargs):
            return Judge.remote(worker_id)

        def train_epoch(self, epoch, **kwargs):
            found = miniray.get([w.custom_method.remote(epoch + 1) for w in self.workers])
            return {"total": sum(found)}

    with Custom(num_workers=2, progress=False) as trainer:
        assert trainer.train(epochs=3)["total"] == 3
    assert miniray.is_initialized()  # it was running before


def test_a_parameter_server_by_itself(engine):
    server = create_parameter_server("momentum")
    workers = ps.workers([torch.zeros(200_000)], [torch.full((200_000,), 2.0)])
    assert ps.call(server, "sync_from_workers", workers)["synced"]
    assert ps.weights_of(workers)[1][0].tolist()[:2] == [1, 1]
    ps.call(workers[0], "fail_in", "get_weights")
    with pytest.raises(miniray.errors.SyncError) as caught:
        ps.call(server, "sync_from_workers", workers)
    assert (caught.value.workers, caught.value.phase) == ((0,), "collect")
