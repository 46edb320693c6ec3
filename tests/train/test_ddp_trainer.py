"""DDPTrainer end to end: exact resume, other numbers of workers, evaluation, kinds of workers."""

import json
import logging

import pytest

import miniray
from miniray.train import Callback, Checkpoint, DDPTrainer, LRSchedule, TorchWorker, load_model

torch = pytest.importorskip("torch")

from tests.train.ddp_for_tests import (  # noqa: E402
    SEED,
    Looper,
    Stepper,
    apart,
    make_data,
    make_model,
    one_process,
)


@pytest.fixture(autouse=True, scope="module")
def _engine():
    """One engine for all: its first worker loads torch for the others."""
    miniray.shutdown()
    miniray.init(backend="local")
    yield
    miniray.shutdown()


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path, monkeypatch):
    """Run in an empty directory and keep the engine running."""
    monkeypatch.chdir(tmp_path)


class Random(Stepper):
    """With dropout, momentum, a schedule and random numbers from everywhere."""

    def __init__(self, worker_id):
        super().__init__(worker_id, n=57)
        self.model = torch.nn.Sequential(*make_model(), torch.nn.Dropout(0.3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)

    def training_step(self, batch, batch_idx):
        x, y = batch
        noise = torch.randn_like(x) * 0.1
        print("batch", batch_idx)
        return torch.nn.functional.cross_entropy(self.model(x + noise), y)

    def optimizer_state(self):
        return self.optimizer.state_dict()


@pytest.mark.timeout(120)  # processes start slowly on a machine that is busy
def test_going_on_from_a_checkpoint_gives_the_same_bits(tmp_path, warns):
    options = {"worker": Random, "seed": 1, "progress": False}
    with DDPTrainer(2, run_dir="whole", **options) as trainer:
        whole = trainer.train(epochs=4)
        expected = trainer.model_weights()
    with DDPTrainer(2, run_dir="parts", callbacks=[Checkpoint()], **options) as trainer:
        trainer.train(epochs=2)
    with DDPTrainer(2, run_dir="parts", resume=True, **options) as trainer:
        parts = trainer.train(epochs=4)
        found = trainer.model_weights()
        final = trainer.save_final_model()
        lr = miniray.get(trainer.workers[0].gather_shared.remote())["parts"]["optimizer"]
    assert [r["loss"] for r in parts.history] == [r["loss"] for r in whole.history]
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert lr["param_groups"][0]["lr"] == 0.1 / 4  # stepped after epochs 2 and 4
    assert set(load_model(final)) == set(expected)  # the names are the model's own
    # The prefixed output of every rank, next to its flight recorder.
    lines = (tmp_path / "whole" / "ranks" / "1.log").read_text().splitlines()
    # Rank 1 has 7 batches and rank 0 has 8, so rank 1 repeats its last batch.
    assert lines == [f"[Rank 1/2] batch {number}" for number in (*range(7), 6)] * 4
    assert (tmp_path / "whole" / "ranks" / "1.box").exists()
    assert json.loads((tmp_path / "whole" / "run.json").read_text())["config"]["uneven"] == "join"

    # A different number of workers resumes the sample order and the optimizer state.
    with DDPTrainer(3, run_dir="parts", resume=True, **options) as trainer:
        with warns(UserWarning):
            result = trainer.train(epochs=3)
        states = trainer.call_workers("optimizer_state")
    assert [r["epoch"] for r in result.history] == [0, 1, 2]
    assert result["num_samples"] == 57
    buffers = [state["state"][0]["momentum_buffer"] for state in states]
    assert torch.equal(buffers[0], buffers[2])


def test_evaluation_hooks_callbacks_and_training_again():
    seen = []

    class Hooked(DDPTrainer):
        def create_worker(self, worker_id, **kwargs):
            return miniray.remote(Stepper).remote(worker_id, n=kwargs["n"])

        def on_epoch_end(self, epoch, result, **kwargs):
            super().on_epoch_end(epoch, result, **kwargs)
            seen.append((epoch, result["val_num_samples"], kwargs))

    class Noting(Callback):
        def on_train_end(self, trainer, history, **kwargs):
            seen.append(history.epochs)

    callbacks = [LRSchedule(lambda epoch: 0.01), Noting()]
    with Hooked(2, seed=SEED, progress=False, eval_interval=1, callbacks=callbacks) as trainer:
        trainer.train(epochs=1, n=64)
        result = trainer.train(epochs=1, n=64)
        weights = trainer.model_weights()
        other = trainer.evaluate(make_data(5))
    assert seen == [(0, 9, {"n": 64}), 1, (1, 9, {"n": 64}), 2]
    losses, expected = one_process(64, 8, epochs=2)
    assert [record["loss"] for record in result.history] == pytest.approx(losses, abs=1e-5)
    assert apart(weights, expected) < 1e-5
    # 9 samples on two ranks: 5 and 4, means of means would be wrong.
    model = make_model()
    model.load_state_dict(expected)
    for scores, n in ((result, 9), (other, 5)):
        x, y = make_data(n).tensors
        out = model(x)
        prefix = "val_" if n == 9 else ""
        loss = torch.nn.functional.cross_entropy(out, y).item()
        assert scores[f"{prefix}loss"] == pytest.approx(loss, abs=1e-5)
        assert scores[f"{prefix}accuracy"] == pytest.approx((out.argmax(1) == y).double().mean())


class Torch(TorchWorker):
    """The worker of the parameter-server trainer, as short as it gets."""

    def setup(self, n=64):
        self.model = make_model()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.train_loader = torch.utils.data.DataLoader(make_data(n), batch_size=4, shuffle=True)

    def training_step(self, batch):
        x, y = batch
        return torch.nn.functional.cross_entropy(self.model(x), y)


def test_workers_of_the_parameter_server_trainer_need_no_change():
    with DDPTrainer(2, worker=Torch, seed=SEED, progress=False, accumulate=2) as trainer:
        trainer.train(epochs=2)
        assert apart(trainer.model_weights(), one_process(64, 16, epochs=2)[1]) < 1e-5
    # Its own loop, its own shards: rank 0 has 16 rows and rank 1 has 12.
    starts = [(4 * i, 16 + 4 * i) for i in range(3)]
    rows = [torch.tensor([*range(a, a + 4), *range(b, b + 4)]) for a, b in starts]
    rows.append(torch.arange(12, 16))
    with DDPTrainer(2, worker=Looper, progress=False) as trainer:
        result = trainer.train(epochs=2, rows=(16, 12))
        weights = miniray.get([w.get_weights.remote() for w in trainer.workers])
    losses, expected = one_process(28, 0, epochs=2, rows=rows, lr=0.1)
    assert [record["loss"] for record in result.history] == pytest.approx(losses, abs=1e-5)
    for found in weights:
        for mine, theirs in zip(found, expected.values(), strict=True):
            assert torch.allclose(mine, theirs, atol=1e-5)


class Fetching(Stepper):
    def __init__(self, worker_id):
        super().__init__(worker_id)
        logging.basicConfig(format="%(message)s")
        print("made", worker_id)
        logging.warning(f"noted by {self.rank} of {self.world_size}")
        self.train_loader = torch.utils.data.DataLoader(
            make_data(64), batch_size=4, shuffle=True, num_workers=1
        )

    def bar_is_shown(self):
        from tqdm import tqdm

        logging.warning("noted later")
        return not tqdm([], file=None, disable=False).disable


def test_loader_processes_are_started_and_ended_and_bars_are_rank_0s():
    """All output of a rank is prefixed and kept, also from a handler created in ``__init__``."""
    psutil = pytest.importorskip("psutil")
    with DDPTrainer(2, worker=Fetching, seed=SEED, progress=False) as trainer:
        trainer.train(epochs=1)
        assert apart(trainer.model_weights(), one_process(64, 8, epochs=1)[1]) < 1e-5
        pids = [box.pid for box in boxes(trainer)]
        assert [psutil.Process(pid).children() for pid in pids] == [[], []]
        assert trainer.call_workers("bar_is_shown") == [True, False]
    lines = (trainer.run.path / "ranks" / "1.log").read_text().splitlines()
    assert lines == [f"[Rank 1/2] {text}" for text in ("made 1", "noted by 1 of 2", "noted later")]


def boxes(trainer):
    from miniray.doctor.reader import read_box

    return [read_box(trainer.run.path / "ranks" / f"{rank}.box") for rank in range(2)]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_on_ray(tmp_path):
    pytest.importorskip("ray")
    miniray.shutdown()
    try:
        with DDPTrainer(2, worker=Stepper, seed=SEED, backend="ray", progress=False) as trainer:
            result = trainer.train(epochs=2, n=57)
            weights = trainer.model_weights()
            assert trainer.evaluate()["num_samples"] == 9
        losses, expected = one_process(57, 8, epochs=2)
        assert [record["loss"] for record in result.history] == pytest.approx(losses, abs=1e-5)
        assert apart(weights, expected) < 1e-5
    finally:
        miniray.shutdown()
        miniray.init(backend="local")
