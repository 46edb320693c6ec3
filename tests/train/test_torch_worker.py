"""TorchWorker: a model, a loss and a loader, and everything else comes with it."""

import random
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    TensorDataset,
)

import miniray
from miniray.train import Checkpoint, DataParallelTrainer, LRSchedule, TorchWorker
from miniray.train.workers.data.loaders import shard_loader


class Line(TorchWorker):
    """y = w x with w = 0: the loss of a batch is the mean of y², its gradient −2 mean(x y)."""

    def setup(self, lr=0.1, rows=5):
        x = torch.arange(1.0, rows + 1)
        self.model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.model.weight)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)
        self.train_loader = DataLoader(TensorDataset(x, x), batch_size=2)
        self.val_loader = self.train_loader
        self.rows = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.rows.append((batch_idx, x.tolist()))
        return ((self.model(x[:, None])[:, 0] - y) ** 2).mean()

    def seen(self):
        return {"rows": self.rows, "lr": self.optimizer.param_groups[0]["lr"]}


def trained(worker, epochs=1, **options):
    train = {k: options.pop(k) for k in ("lr", "rows") if k in options}
    trainer = DataParallelTrainer(2, worker=worker, backend="inline", progress=False, **options)
    result = trainer.train(epochs, **train)
    return trainer, result


@pytest.mark.parametrize("decorated", [False, True])
def test_an_epoch_by_hand(decorated):
    trainer, result = trained(miniray.remote(Line) if decorated else Line, lr=0.0)
    with trainer:
        seen = miniray.get([w.seen.remote() for w in trainer.workers])
    # Rows 1 to 5, assigned round-robin, in batches of two.
    assert [s["rows"] for s in seen] == [[(0, [1, 3]), (1, [5])], [(0, [2, 4])]]
    assert result["num_samples"] == 5
    assert result["loss"] == pytest.approx((1 + 4 + 9 + 16 + 25) / 5)  # over samples, not batches


def test_the_optimizer_steps_down_the_loss():
    trainer, _ = trained(Line, lr=0.01, rows=2)
    with trainer:
        # Worker 0 has x = 1: w = 0 + 0.01·2; worker 1 has x = 2: w = 0 + 0.01·8. Their mean:
        assert trainer.model_weights()["weight"].item() == pytest.approx(0.05)


class Full(TorchWorker):
    """Everything that has a state: Adam, a scheduler, dropout, BatchNorm, a shuffled loader."""

    def setup(self):
        self.loaded_before = "torch._dynamo" in sys.modules
        torch.manual_seed(1)
        self.model = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1)
        )
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        data = TensorDataset(torch.randn(24, 4), torch.randn(24, 1))
        shuffling = torch.Generator().manual_seed(2)
        self.train_loader = DataLoader(data, batch_size=4, shuffle=True, generator=shuffling)

    def loaded(self):
        return self.loaded_before

    def training_step(self, batch):
        x, y = batch
        noise = random.random() + np.random.rand()
        loss = nn.functional.mse_loss(self.model(x), y) * noise
        return {"loss": loss, "noise": noise}


def bits(trainer):
    weights = miniray.get([w.get_weights.remote() for w in trainer.workers])
    return [{k: v.numpy().tobytes() for k, v in w.items()} for w in weights]


class Persistent(Full):
    """Its loader has processes that draw a random number when they start, and then keep running."""

    def setup(self):
        super().setup()
        self.train_loader = DataLoader(
            self.train_loader.dataset, 4, shuffle=True, num_workers=1, persistent_workers=True
        )


@pytest.mark.parametrize(
    ("backend", "worker"), [("inline", Full), ("local", Full), ("local", Persistent)]
)
def test_stopped_and_resumed_is_bit_for_bit_never_stopped(tmp_path, backend, worker):
    miniray.init(backend=backend)  # one engine for all: torch is loaded once

    def make(name):
        return DataParallelTrainer(
            2, 2, worker=worker, seed=3, progress=False, run_dir=tmp_path / name,
            callbacks=[Checkpoint()],
        )  # fmt: skip

    with make("straight") as trainer:
        straight = trainer.train(epochs=5)["loss"]
        expected = bits(trainer)
    with make("stopped") as trainer:
        trainer.train(epochs=3)
    with make("stopped") as trainer:
        assert trainer.train(epochs=5, resume=True)["loss"] == straight
        assert bits(trainer) == expected
        # Modules that an optimizer imports were loaded before the first worker was created.
        assert miniray.get([w.loaded.remote() for w in trainer.workers]) == [True, True]
    assert "1.running_mean" in expected[0]  # buffers are also weights


def test_evaluation_is_that_of_one_process():
    trainer, _ = trained(Line, lr=0.0, rows=7)
    with trainer:
        whole = trainer.evaluate()  # its val_loader, sharded
        x = torch.arange(1.0, 8)
        given = trainer.evaluate(data=TensorDataset(x, x))
        rows = trainer.evaluate(data=[(v, v) for v in x])
    squares = sum(i * i for i in range(1, 8))
    assert whole == given == rows == {"loss": squares / 7, "num_samples": 7}


def test_evaluation_counts_what_the_step_says_and_leaves_the_mode():
    class Judge(Line):
        def validation_step(self, batch, batch_idx):
            assert not self.model.training
            assert not torch.is_grad_enabled()
            return {"big": ((batch[0] > 2).sum(), len(batch[0]))}

    trainer, _ = trained(Judge, rows=1, eval_interval=1)
    with trainer:
        assert trainer.history[-1]["val_big"] == 0  # one row: the second worker has none
        data = {"0": torch.arange(5.0)}

        class Columns(Judge):
            def validation_step(self, batch, batch_idx):
                return super().validation_step((batch["0"],), batch_idx)

    trainer, _ = trained(Columns, sanity_batches=0)  # val_loader has other batches
    with trainer:
        assert trainer.evaluate(data=data) == {"big": 0.4, "num_samples": 5}


def test_a_schedule_sets_the_learning_rate():
    trainer, _ = trained(Line, callbacks=[LRSchedule(lambda epoch: 0.5)])
    with trainer:
        assert miniray.get(trainer.workers[1].seen.remote())["lr"] == 0.5


def test_a_worker_may_train_in_its_own_way():
    class Own(TorchWorker):
        def __init__(self, worker_id):
            self.model = nn.Linear(1, 1)

        def train_epoch(self, epoch):
            return {"loss": 1.0}

    trainer, result = trained(Own)
    trainer.shutdown()
    assert result["loss"] == 1.0


#: A batch sampler of a known type, wrapped around a random sampler.
BATCHES = BatchSampler(RandomSampler(range(4)), 2, drop_last=False)


class Stream(IterableDataset):
    def __iter__(self):
        return iter([1.0])


@pytest.mark.parametrize(
    "change",
    [
        {"model": None},
        {"optimizer": None},
        {"train_loader": None},
        {"train_loader": DataLoader(Stream())},
        {"train_loader": [1, 2]},
        {"train_loader": DataLoader(range(4), sampler=[0, 1])},
        {"train_loader": DataLoader(range(4), batch_size=None)},
        {"train_loader": DataLoader(range(4), batch_sampler=BATCHES)},
    ],
)
def test_what_is_missing_or_cannot_be_dealt_out_is_named(change, raises):
    class Broken(Line):
        def setup(self):
            super().setup()
            vars(self).update(change)

    with raises(TypeError):
        trained(Broken)


def test_a_step_without_a_loss_is_refused(raises):
    class NoLoss(Line):
        def training_step(self, batch):
            return None

    with raises(TypeError):
        trained(NoLoss)


def test_a_state_of_another_worker_is_refused():
    state = Full().get_state()
    with pytest.raises(ValueError, match=r"\['optimizer', 'scheduler'\].*\['optimizer'\]"):
        Line().set_state(state)


def test_a_scheduler_may_go_by_the_loss_and_is_saved(tmp_path):
    class Patient(Line):
        def setup(self, lr=0.0):
            super().setup(lr)
            self.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
                self.optimizer, factor=0.5, patience=0
            )
            self.optimizer.param_groups[0]["lr"] = 1e-9  # no loss gets better by that

        def seen(self):
            return self.scheduler.num_bad_epochs, self.optimizer.param_groups[0]["lr"]

    options = {"run_dir": tmp_path / "run", "callbacks": [Checkpoint()]}
    trainer, _ = trained(Patient, epochs=2, **options)
    with trainer:
        seen = miniray.get(trainer.workers[0].seen.remote())
    trainer, _ = trained(Patient, epochs=0, resume=True, **options)
    with trainer:
        assert miniray.get(trainer.workers[0].seen.remote()) == seen
    assert seen[1] == pytest.approx(1e-9, rel=0.6)


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_loader_of_a_class_of_its_own_stays_one(shuffle):
    class Doubling(DataLoader):
        def __init__(self, rows):
            generator = torch.Generator().manual_seed(0)
            super().__init__(range(rows), batch_size=2, shuffle=shuffle, generator=generator)

        def __iter__(self):
            return (2 * batch for batch in super().__iter__())

    shards = [shard_loader(Doubling(5), i, 2) for i in range(2)]
    assert [sorted(torch.cat(list(part)).tolist()) for part in shards] == [[0, 4, 8], [2, 6]]
    assert [len(part) for part in shards] == [2, 1]
    assert len(Doubling(5)) == 3


def test_columns_of_numpy_are_evaluated_as_rows():
    trainer, _ = trained(Line, lr=0.0)
    with trainer:
        x = np.arange(1.0, 4.0, dtype=np.float32)
        assert trainer.evaluate(data=(x, x)) == pytest.approx({"loss": 14 / 3, "num_samples": 3})


def test_workers_without_a_seed_draw_numbers_of_their_own():
    """They are copies of one process that has torch and numpy loaded, random numbers and all."""

    @miniray.remote
    class Dice:
        def roll(self):
            return random.random(), np.random.rand(), torch.rand(1).item()

    with miniray.init(num_workers=1):
        rolls = miniray.get([Dice.remote().roll.remote() for _ in range(2)])
    assert all(one != other for one, other in zip(*rolls, strict=True))
