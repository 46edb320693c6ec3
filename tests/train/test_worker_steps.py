"""Steps of ``TorchWorker``s of ``DataParallelTrainer``: length of the run, logs, limits, sanity."""

import itertools
import os
import signal

import pytest

import miniray
from miniray.data import DataLoader as ShardedLoader
from miniray.data import IndexedDataset
from miniray.train import Checkpoint, DataParallelTrainer, DDPTrainer, TorchWorker

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from tests.train.ddp_for_tests import make_data  # noqa: E402
from tests.train.steps_for_tests import check_equal  # noqa: E402

pytestmark = pytest.mark.timeout(180)  # many processes, and the machine may be busy

ROWS = 57
STEPS = 8  # per epoch on two workers: 29 rows and 28 rows in batches of 4


@pytest.fixture(scope="module", autouse=True)
def _engine():
    """One engine for all: its first worker loads torch for the others."""
    miniray.init(backend="local", num_workers=3)
    yield
    miniray.shutdown()


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path, monkeypatch):
    """As everywhere, but the engine keeps running."""
    monkeypatch.chdir(tmp_path)


class Scheduled(TorchWorker):
    """Records its attributes in ``setup`` and in each step; its rate falls to 0 at the end."""

    def setup(self, own_loader=True):
        torch.manual_seed(7)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 3))
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.01)
        self.places = [self.read_place()]
        self.who = (self.rank, self.world_size, self.device)
        self.rows, self.calls = [], {"training": 0, "validation": 0}
        if own_loader:
            rows = TensorDataset(torch.arange(ROWS), *make_data(ROWS).tensors)
            self.train_loader = DataLoader(rows, 4, shuffle=True)
            self.val_loader = DataLoader(rows, 4, shuffle=True)

    def read_place(self):
        return self.global_step, self.epochs, self.total_steps

    def configure_scheduler(self, optimizer, total_steps):
        self.planned = total_steps
        length = total_steps or 1
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / length)

    def training_step(self, batch, batch_idx):
        self.calls["training"] += 1
        self.places.append(self.read_place())
        numbers, x, y = batch.values() if isinstance(batch, dict) else batch
        self.rows.append(numbers.tolist())
        self.log("twice", 2 * len(x))
        self.log("right", (torch.tensor(1.0), len(x)))
        return functional.cross_entropy(self.model(x), y)

    def validation_step(self, batch, batch_idx):
        self.calls["validation"] += 1
        torch.rand(3)
        _, x, y = batch
        self.log("rows", float(len(x)))
        return {"loss": functional.cross_entropy(self.model(x), y)}

    def get_seen(self):
        return self.who, self.places, self.planned, self.optimizer.param_groups[0]["lr"]

    def get_rows(self):
        return self.rows

    def get_calls(self):
        return self.calls


def make(num_workers=2, **options):
    return DataParallelTrainer(
        num_workers, **{"worker": Scheduled, "seed": 5, "progress": False, **options}
    )


def train(length, *, own_loader=True, **options):
    """Train; return the step, the losses by epoch, the weights, and the rows of each batch."""
    with make(**options) as trainer:
        result = trainer.train(**length, own_loader=own_loader)
        losses = {record["epoch"]: record["loss"] for record in result.history}
        weights = trainer.model_weights()
        return (trainer.state.step, losses, weights), trainer.call_workers("get_rows")


# -- the length of the run -------------------------------------------------------------------------


def test_workers_know_the_length_of_the_run_and_build_schedules():
    options = {"run_dir": "known", "callbacks": Checkpoint()}
    with make(**options) as trainer:
        trainer.train(steps=STEPS + 2)
        found = trainer.call_workers("get_seen")
    for rank, (who, places, planned, lr) in enumerate(found):
        # The second worker has a batch less, and its next epoch starts with that of the first.
        steps = [*range(STEPS - rank), STEPS, STEPS + 1]
        assert who == (rank, 2, "cpu")
        assert places == [(step, None, STEPS + 2) for step in (0, *steps)]
        assert planned == STEPS + 2
        assert lr == pytest.approx(0.01 * rank / (STEPS + 2))
    with make(**options) as trainer:
        trainer.train(epochs=2, resume=True)
        (_, places, planned, lr), _ = trainer.call_workers("get_seen")
    steps = range(STEPS + 2, 2 * STEPS)
    assert places == [(STEPS + 2, 2, None), *((step, 2, 2 * STEPS) for step in steps)]
    assert (planned, lr) == (2 * STEPS, 0.0)


def test_a_second_call_of_train_changes_the_length():
    with make() as trainer:
        trainer.train(steps=3)
        trainer.train(epochs=1)
        (_, places, planned, _), _ = trainer.call_workers("get_seen")
    assert places[4:] == [(step, 1, STEPS) for step in range(3, STEPS)]
    assert planned == 3  # configure_scheduler isn't called again


def test_number_of_token_batches_isnt_known():
    rows = IndexedDataset(make_rows())
    data = ShardedLoader(rows, 12, batch_by="tokens", length=lambda row: 4)
    for length, expected in (({"epochs": 1}, None), ({"steps": 2}, 2)):
        with make(data=data) as trainer:
            trainer.train(**length, own_loader=False)
            assert [seen[2] for seen in trainer.call_workers("get_seen")] == [expected] * 2


class ByEpoch(Scheduled):
    scheduler_interval = "epoch"

    def configure_scheduler(self, optimizer, total_steps):
        self.planned = total_steps
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


def test_scheduler_can_go_by_epochs():
    with make(worker=ByEpoch, mode="async") as trainer:
        trainer.train(epochs=2)
        found = trainer.call_workers("get_seen")
    assert [(planned, lr) for _, _, planned, lr in found] == [(2 * STEPS, 0.0025)] * 2


class Own(Scheduled):
    """Has attributes of these names."""

    epochs = "mine"

    def setup(self):
        self.log = []
        super().setup()
        self.log, self.total_steps = [], 3

    def training_step(self, batch, batch_idx):
        self.log.append(batch_idx)
        return functional.cross_entropy(self.model(batch[1]), batch[2])

    def validation_step(self, batch, batch_idx):
        return self.training_step(batch, batch_idx)

    def get_own(self):
        return self.log, self.epochs, self.total_steps


def test_attributes_of_the_worker_are_left_alone():
    with make(1, worker=Own, sanity_batches=0) as trainer:
        trainer.train(steps=2)
        assert trainer.call_workers("get_own") == [([0, 1], "mine", 3)]


def test_worker_can_be_used_without_a_trainer():
    class Logging(TorchWorker):
        def training_step(self, batch, batch_idx):
            self.log("step", self.global_step)
            return batch

    worker = Logging()
    assert worker.training_step(3, 0) == 3
    assert (worker.rank, worker.world_size, worker.total_steps) == (0, 1, None)


# -- logs ------------------------------------------------------------------------------------------


def test_logged_metrics_are_in_records_and_scores():
    steps = []

    class Hooked(DataParallelTrainer):
        def on_step_end(self, step, metrics, **kwargs):
            steps.append((step, metrics["twice"]))

    options = {"worker": Scheduled, "seed": 5, "progress": False, "log_every": 2}
    with Hooked(2, **options, eval_every_steps=4) as trainer:
        result = trainer.train(epochs=1)
        records = trainer.run.read_steps()
    assert [step for step, _ in steps] == [1, 4, 8]
    assert all(twice == 8 for _, twice in steps[:2])
    # 28 rows in batches of 4 and a batch of one row, and 28 rows.
    assert result["twice"] == pytest.approx((56 * 8 + 2) / ROWS)
    assert result["right"] == pytest.approx(15 / ROWS)
    scores = {r["step"]: r["val_rows"] for r in records if "val_rows" in r}
    assert scores == {step: pytest.approx((56 * 4 + 1) / ROWS) for step in (4, 8)}


# -- limits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "batches", "steps", "validated"),
    [
        ({"limit_train_batches": 3, "sanity_batches": 0}, [3, 3], 6, [16, 14]),
        ({"limit_train_batches": 3, "accumulate": 2, "limit_val_batches": 2}, [3, 3], 4, [6, 6]),
        ({"limit_val_batches": 1, "sanity_batches": 3}, [8, 7], 16, [3, 3]),
        ({"limit_train_batches": 100, "limit_val_batches": 100}, [8, 7], 16, [18, 16]),
    ],
)
def test_number_of_batches_on_every_worker(options, batches, steps, validated):
    with make(eval_interval=1, **options) as trainer:
        result = trainer.train(epochs=2)
        calls = trainer.call_workers("get_calls")
        seen = trainer.call_workers("get_seen")
    assert [found["training"] for found in calls] == [2 * count for count in batches]
    assert [found["validation"] for found in calls] == validated
    assert [record["step"] for record in result.history] == [steps // 2, steps]
    assert [planned for _, _, planned, _ in seen] == [steps, steps]
    config = trainer.run.read_run()["config"]
    limits = {name: value for name, value in options.items() if name.startswith("limit_")}
    assert {name: config[name] for name in limits} == limits


def make_rows():
    x, y = make_data(ROWS).tensors
    return [{"n": n, "x": x[n].numpy(), "y": int(y[n])} for n in range(ROWS)]


@pytest.mark.parametrize("kind", ["torch", "miniray"])
def test_limited_epochs_have_different_rows_of_the_own_shard(kind):
    options = {"limit_train_batches": 3, "sanity_batches": 0}
    if kind == "miniray":
        dataset = IndexedDataset(make_rows(), shuffle=True, seed=1)
        options |= {"data": ShardedLoader(dataset, 4)}
    _, rows = train({"epochs": 2}, own_loader=kind == "torch", **options)
    epochs = [[sorted(itertools.chain(*found[i : i + 3])) for found in rows] for i in (0, 3)]
    for first, second in epochs:
        assert (len(first), len(second)) == (12, 12)
        assert not set(first) & set(second)
    assert epochs[0] != epochs[1]


class Halving(Scheduled):
    def configure_scheduler(self, optimizer, total_steps):
        return torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)


@pytest.mark.parametrize("kind", ["torch", pytest.param("miniray", marks=pytest.mark.slow)])
def test_limited_run_resumes_with_the_same_bits(kind):
    options = {"worker": Halving, "limit_train_batches": 3, "accumulate": 2}
    if kind == "miniray":
        dataset = IndexedDataset(make_rows(), shuffle=True, seed=1)
        options |= {"data": ShardedLoader(dataset, 4), "own_loader": False}
    whole, _ = train({"epochs": 2}, **options)
    parts = {"run_dir": "parts", "callbacks": Checkpoint(), **options}
    for step in (1, 3):
        train({"steps": step}, resume="auto", **parts)
    check_equal(train({"epochs": 2}, resume=True, **parts)[0], whole)


def test_overfit_batches_are_the_same_in_every_epoch():
    _, rows = train({"epochs": 3}, overfit_batches=2)
    assert rows == [3 * [[0, 2, 4, 6], [8, 10, 12, 14]], 3 * [[1, 3, 5, 7], [9, 11, 13, 15]]]


def test_overfit_batches_need_a_loader_that_miniray_shards():
    data = ShardedLoader(IndexedDataset(make_rows()), 4)
    with make(data=data, overfit_batches=2) as trainer, pytest.raises(ValueError, match="overfit"):
        trainer.train(epochs=1, own_loader=False)


class Mortal(Scheduled):
    def training_step(self, batch, batch_idx):
        if self.rank == 1 and self.global_step == 4 and not os.path.exists("killed"):
            open("killed", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)


def test_replacement_has_the_limits_and_the_length_of_the_run():
    with make(worker=Mortal, max_failures=1, limit_train_batches=3) as trainer:
        trainer.train(epochs=3)
        (_, places, _, _), (_, replaced, planned, _) = trainer.call_workers("get_seen")
    assert os.path.exists("killed")
    assert places[1:] == [(step, 3, 9) for step in range(9)]
    assert replaced[1:] == [(step, 3, 9) for step in range(3, 9)]  # of the epoch that was lost
    assert planned == 9


class OwnLoop(Scheduled):
    def train_epoch(self, epoch):
        return {"loss": 0.0, "num_samples": 1}


class OwnSteps(Scheduled):
    def train_steps(self, epoch, start=0, stop=None):
        return {"loss": 0.0, "num_steps": 1}


class Plain:
    def train_epoch(self, epoch):
        return {"loss": 0.0}

    def get_weights(self):
        return [torch.zeros(1)]

    def set_weights(self, weights):
        pass


class Creates(DataParallelTrainer):
    def create_worker(self, worker_id, **kwargs):
        return miniray.remote(self.kind).remote()


@pytest.mark.parametrize("worker", [OwnLoop, OwnSteps, Plain])
@pytest.mark.parametrize("option", ["limit_train_batches", "limit_val_batches", "overfit_batches"])
def test_limits_need_training_step(worker, option):
    with pytest.raises(TypeError, match=rf"{option}.*training_step.*{worker.__name__}"):
        make(worker=worker, **{option: 2}).train(epochs=1)


@pytest.mark.parametrize("worker", [OwnLoop, OwnSteps, Plain])
def test_limits_of_created_workers_need_training_step(worker):
    trainer = Creates(1, limit_train_batches=2, progress=False)
    trainer.kind = worker
    with trainer, pytest.raises(TypeError, match=r"limit_train_batches.*training_step"):
        trainer.train(epochs=1)


def test_options_are_checked_when_the_trainer_is_created():
    for name in ("limit_train_batches", "limit_val_batches", "overfit_batches"):
        with pytest.raises(ValueError, match=name):
            make(**{name: 0})
    with pytest.raises(ValueError, match="limit_train_batches"):
        make(overfit_batches=1, limit_train_batches=1)
    with pytest.raises(ValueError, match="sanity_batches"):
        make(sanity_batches=-1)


# -- the sanity pass -------------------------------------------------------------------------------


class Normalized(Scheduled):
    def setup(self, own_loader):
        super().setup(own_loader)
        self.model.insert(1, nn.BatchNorm1d(8, momentum=0.5))
        rows = self.train_loader.dataset
        self.train_loader = DataLoader(rows, 4, shuffle=True, drop_last=True)
        self.val_loader = DataLoader(rows, 4, shuffle=True, drop_last=True)

    def validation_step(self, batch, batch_idx):
        self.model.train()  # so that statistics change in this step, too
        return super().validation_step(batch, batch_idx)


def test_run_has_the_same_bits_with_and_without_the_pass():
    found = [
        train({"epochs": 1}, worker=Normalized, sanity_batches=batches, seed=5)[0]
        for batches in (0, 2)
    ]
    check_equal(*found)


class Broken(Scheduled):
    def validation_step(self, batch, batch_idx):
        if self.rank == 1:
            raise KeyError("no such column")
        return super().validation_step(batch, batch_idx)


def test_broken_validation_ends_the_run_before_the_first_step():
    hooks = []

    class Hooked(DataParallelTrainer):
        def on_train_start(self, **kwargs):
            hooks.append("on_train_start")

    trainer = Hooked(2, worker=Broken, progress=False)
    with trainer, pytest.raises(KeyError) as caught:
        trainer.train(epochs=1)
    assert caught.value.worker == 1
    assert "validation_step" in str(caught.value)
    assert not hooks
    assert trainer.state.step == 0


class WithoutData(Scheduled):
    def setup(self):
        super().setup()
        del self.val_loader


class OwnEvaluate(Scheduled):
    """Its evaluation has nothing to do with ``validation_step``."""

    def evaluate(self):
        return {"loss": 1.0}


class Default(Scheduled):
    """Its validation is ``training_step``, whose errors the first step shows."""

    validation_step = TorchWorker.validation_step


@pytest.mark.parametrize(
    ("worker", "batches"),
    [(Scheduled, 2), (Default, 0), (WithoutData, 0), (OwnEvaluate, 0), (OwnLoop, 2)],
)
def test_which_workers_validate_first(worker, batches):
    with make(1, worker=worker) as trainer:
        trainer.train(epochs=1)
        trainer.train(epochs=1)
        assert trainer.call_workers("get_calls")[0]["validation"] == batches
        assert trainer.call_workers("get_calls")[0]["training"] in (0, 30)


def test_resumed_run_does_not_validate_first():
    options = {"run_dir": "run", "callbacks": Checkpoint()}
    train({"steps": 1}, **options)
    with make(**options) as trainer:
        trainer.train(steps=2, resume=True)
        assert [c["validation"] for c in trainer.call_workers("get_calls")] == [0, 0]


def test_attributes_and_schedule_are_those_of_lockstep_trainers():
    """The same class, on one worker."""
    found = []
    for trainer_class in (DataParallelTrainer, DDPTrainer):
        with trainer_class(1, worker=Scheduled, seed=5, progress=False) as trainer:
            trainer.train(epochs=2, own_loader=True)
            found += trainer.call_workers("get_seen")
    assert found[0] == found[1]
