"""Supported and rejected inputs of a DDP worker: loaders, schedules, metrics, options."""

import dataclasses
import math

import numpy as np
import pytest

import miniray
from miniray.errors import ActorDiedError, CheckpointError
from miniray.train import DataParallelTrainer, DDPTrainer, TorchWorker

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler  # noqa: E402

from miniray.train.ddp.checks import read_output  # noqa: E402
from miniray.train.lockstep.health.failure import add_rank_context  # noqa: E402
from miniray.train.workers.data.batches import count_samples, move_batch  # noqa: E402
from miniray.train.workers.data.planned import planned, set_epoch, take_share  # noqa: E402
from miniray.train.workers.torch_utils import Means  # noqa: E402
from tests.train.ddp_for_tests import Stepper, make_data  # noqa: E402


def share(loader, world_size=2, sharded=False):
    """Return the loader of rank 1 and, if miniray shards the data, the plan of samples per rank."""
    own = take_share(loader, 1, world_size, accumulate=1, uneven="join", seed=0, sharded=sharded)
    return own, getattr(planned(own), "plan", None)


# -- loaders ---------------------------------------------------------------------------------------


class Halving(DataLoader):
    """A loader that does something with its batches."""

    factor = 0.5

    def __iter__(self):
        for x, y in super().__iter__():
            yield x * self.factor, y


def test_a_loader_of_ones_own_class_is_cut_and_goes_on_as_it_was():
    loader = Halving(make_data(10), batch_size=2, num_workers=0)
    loader.factor = 0.25
    own, plan = share(loader)
    assert (type(own), own.batch_size, len(own)) == (Halving, 2, plan.count(1)) == (Halving, 2, 3)
    taken = [plan.batches(1, 0, shuffle=False, seed=0)]
    for (x, _), rows in zip(own, *taken, strict=True):
        assert torch.equal(x, make_data(10)[rows][0] * 0.25)
    assert len(loader) == 5  # the user's own object is as it was


def test_processes_of_a_loader_that_was_used_before_it_was_cut_are_not_its_own():
    loader = DataLoader(make_data(8), batch_size=2, num_workers=1, persistent_workers=True)
    assert len(list(loader)) == 4
    own, _ = share(loader)
    assert sum(len(x) for x, _ in own) == 4
    del loader, own


class ByRank:
    """A batch sampler that knows of ranks."""

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter([[2, 3], [6, 7]])

    def __len__(self):
        return 2


def test_a_batch_sampler_that_is_told_epochs_is_trusted():
    loader = DataLoader(make_data(8), batch_sampler=ByRank())
    own, plan = share(loader)
    assert own is loader
    assert plan is None
    set_epoch(own, 3)
    assert loader.batch_sampler.epoch == 3


class Endless(IterableDataset):
    def __iter__(self):
        return iter(make_data(4))


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Endless(), batch_size=2),
        lambda: DataLoader(make_data(4), batch_sampler=[[0, 1], [2, 3]]),
        lambda: DataLoader(make_data(4), batch_size=None),
        lambda: DataLoader(make_data(4), sampler=WeightedRandomSampler([1.0] * 4, 4)),
    ],
)
def test_a_loader_that_cannot_be_cut_is_refused_with_what_it_has(make, raises):
    with raises(ValueError):
        share(make())
    loader = make()
    assert share(loader, world_size=1) == share(loader, sharded=True) == (loader, None)


@dataclasses.dataclass(frozen=True)
class Rows:
    x: object
    name: str = "rows"


def test_a_batch_may_be_a_dataclass():
    batch = Rows(torch.ones(3, 2))
    assert count_samples(batch) == 3
    there = move_batch(batch, torch.device("meta"))
    assert (there.x.device.type, there.name) == ("meta", "rows")
    assert batch.x.device.type == "cpu"


# -- steps, in the driver's own process ------------------------------------------------------------


def train(worker, epochs=1, **options):
    miniray.shutdown()
    with DDPTrainer(1, worker=worker, backend="inline", progress=False, **options) as trainer:
        return trainer.train(epochs=epochs)


class Named(dict):
    """A dict whose values are attributes, too."""

    def __getattr__(self, name):
        if name not in self:
            raise AttributeError(name)
        return self[name]


def test_a_batch_that_is_a_dict_of_the_users_own_stays_one():
    batch = Named(x=torch.ones(2), rows=[torch.ones(2), "text"])
    there = move_batch(batch, "meta")
    assert (there.x.device.type, there.rows[0].device.type, there.rows[1]) == (
        "meta",
        "meta",
        "text",
    )
    assert batch.x.device.type == "cpu"


def test_a_metric_that_is_no_number_is_named_in_the_first_step(raises):
    class Logits(Stepper):
        def training_step(self, batch, batch_idx):
            return {"loss": super().training_step(batch, batch_idx), "logits": torch.ones(4, 3)}

    with raises(TypeError):
        train(Logits)


@pytest.mark.parametrize("value", [2, 2.0, np.float32(2), np.array(2.0), torch.ones(1) * 2, (6, 3)])
def test_metrics_are_numbers_of_any_kind_or_pairs(value):
    means = Means()
    means.add({"m": value}, 4)
    assert means.means()["m"] == 2


@pytest.mark.parametrize("value", [None, "2", [2], [1, 2, 3], ("1", 2), {"a": 1}, np.ones(2)])
def test_what_is_no_metric(value):
    with pytest.raises(TypeError, match="'m'"):
        Means().add({"m": value}, 4)


class OneShot(Stepper):
    def load_data_shard(self, shard_id, num_shards):
        self.train_loader = iter(list(self.train_loader))


def test_a_loader_that_is_used_up_is_an_error_and_no_epoch_without_samples(raises):
    with raises(RuntimeError):
        train(OneShot, epochs=2)


class Scheduled(Stepper):
    scheduler_interval = "batch"
    kind = staticmethod(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1))

    def __init__(self, worker_id):
        super().__init__(worker_id)
        self.scheduler = self.kind(self.optimizer)


class Plateau(Scheduled):
    kind = torch.optim.lr_scheduler.ReduceLROnPlateau


def test_a_schedule_that_would_not_be_stepped_is_refused_before_training(raises):
    with raises(ValueError):
        train(Scheduled)
    with raises(ValueError):
        train(Plateau)


class OtherModel(Stepper):
    def __init__(self, worker_id):
        super().__init__(worker_id)
        self.model = torch.nn.Linear(4, 3)


def test_an_optimizer_of_another_model_is_refused(raises):
    with raises(ValueError):
        train(OtherModel)


class Margin(Stepper):
    """Worker whose loss has trainable weights, as in metric learning."""

    def __init__(self, worker_id):
        super().__init__(worker_id)
        self.criterion = torch.nn.Linear(3, 3)
        self.optimizer.add_param_group({"params": self.criterion.parameters()})


class Scaled(Stepper):
    def __init__(self, worker_id):
        super().__init__(worker_id)
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.scaling = torch.optim.SGD([self.model[0].weight, self.scale], 0.1)


def test_parameters_that_would_be_trained_on_each_worker_by_itself_are_refused(raises):
    with raises(ValueError):
        train(Margin)
    with raises(ValueError):
        train(Scaled)


# -- evaluation and checkpoints --------------------------------------------------------------------


class Typed(Stepper):
    def validation_step(self, batch, batch_idx):
        return {"half": float(self.model(batch[0]).dtype == torch.bfloat16)}


def test_an_evaluation_has_the_precision_of_the_steps():
    assert train(Typed, eval_interval=1, precision="bf16")["val_half"] == 1
    assert train(Typed, eval_interval=1)["val_half"] == 0


class Untested:
    __init__, training_step = Stepper.__init__, Stepper.training_step


class NoValidation(Stepper):
    def __init__(self, worker_id):
        super().__init__(worker_id)
        self.val_loader = None


def test_an_evaluation_that_cannot_be_is_refused_before_the_first_epoch(raises):
    with raises(TypeError):
        train(Untested, eval_interval=5)
    with raises(TypeError):
        train(NoValidation, eval_interval=5)


class Averaged(TorchWorker):
    def setup(self):
        Stepper.__init__(self)

    training_step = Stepper.training_step


def test_a_checkpoint_of_another_kind_of_trainer_is_refused(raises):
    with DataParallelTrainer(1, worker=Averaged, backend="inline", progress=False) as trainer:
        trainer.train(epochs=1)
        path = trainer.save_checkpoint()
    with raises(CheckpointError):
        train(Averaged, resume=path)


def test_nor_does_another_kind_take_one_of_ddp(tmp_path, raises):
    with DDPTrainer(1, worker=Averaged, progress=False) as trainer:
        trainer.train(epochs=1)
        path = trainer.save_checkpoint()
    other = DataParallelTrainer(
        1, worker=Averaged, backend="inline", progress=False, run_dir=tmp_path / "other"
    )
    with raises(CheckpointError):
        other.train(epochs=1, resume=path)


# -- options ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"timeout": None},
        {"timeout": math.inf},
        {"hang_timeout": "60"},
        {"clip_norm": True},
        {"on_nonfinite": "skip"},
        {"max_failures": -1},
        {"compile": 3},
        {"static_graph": True, "accumulate": 2},
    ],
)
def test_options_of_the_wrong_kind_are_refused_at_once(options, raises):
    with raises(ValueError):
        DDPTrainer(2, worker=Stepper, **options)


def test_numbers_of_numpy_are_numbers_and_none_is_no_limit():
    options = {"accumulate": np.int64(2), "clip_norm": np.float32(1), "hang_timeout": None}
    assert train(Stepper, **options)["num_samples"] == 64


@pytest.mark.parametrize(
    "output",
    [
        0.5,
        torch.ones(3, 1),
        None,
        {"accuracy": 1.0},
    ],
)
def test_a_loss_that_is_none(output, raises):
    with raises(TypeError):
        read_output(output, 1)


def test_a_worker_that_brings_its_own_ddp_is_told_who_does_that(check_message):
    died = ActorDiedError("ValueError: Default process group has not been initialized, please ...")
    check_message(add_rank_context(died, 1, None, None))
