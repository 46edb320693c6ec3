"""Every kind of trainer and loader resumes inside an epoch with the same bits."""

from functools import partial

import pytest

import miniray
from miniray.data import DataLoader as OwnLoader
from miniray.data import IndexedDataset
from miniray.train import (
    Checkpoint,
    ModelParallelTrainer,
    PipelineParallelTrainer,
    RunDirectory,
)

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402
from torch.utils.data.distributed import DistributedSampler  # noqa: E402

from tests.train.ddp_for_tests import make_data  # noqa: E402
from tests.train.steps_for_tests import ROWS, Augmented, Noisy, check_equal, run  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def _engine():
    """One engine for all: its first worker loads torch for the others."""
    miniray.init(backend="local", num_workers=4)
    yield
    miniray.shutdown()


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path, monkeypatch):
    """As everywhere, but the engine keeps running."""
    monkeypatch.chdir(tmp_path)


def check_resume(step, **options):
    """Check a run that stops after ``step`` steps, and once more a step later."""
    whole = run("whole", {"epochs": 2}, **options)
    run("parts", {"steps": step}, callbacks=Checkpoint(), **options)
    options["resume"] = True
    run("parts", {"steps": step + 1}, callbacks=Checkpoint(), **options)
    check_equal(run("parts", {"epochs": 2}, **options), whole)


# -- loaders ---------------------------------------------------------------------------------------


class OwnData(Noisy):
    """Reads with a loader of ``miniray.data``."""

    def __init__(self, worker_id):
        super().__init__(worker_id)
        rows = [{"x": x.numpy(), "y": int(y)} for x, y in zip(*self._get_rows(), strict=True)]
        self.train_loader = OwnLoader(IndexedDataset(rows, shuffle=True, seed=3), batch_size=4)

    def _get_rows(self):
        data = Augmented()
        return data.x, data.y

    def training_step(self, batch, batch_idx):
        x = torch.stack([torch.as_tensor(x) for x in batch["x"]])
        return functional.cross_entropy(self.model(x), torch.as_tensor(batch["y"]))


class OwnShard(Noisy):
    """Shards its data itself, and shuffles it with the random numbers of the process."""

    def __init__(self, worker_id, loader_workers=0):
        super().__init__(worker_id)
        self.loader_workers = loader_workers

    def load_data_shard(self, shard_id, num_shards):
        rows = torch.utils.data.Subset(Augmented(), range(shard_id, ROWS, num_shards))
        self.train_loader = DataLoader(
            rows, batch_size=4, shuffle=True, num_workers=self.loader_workers
        )


class Sampled(Noisy):
    """Has a ``DistributedSampler``."""

    def __init__(self, worker_id):
        super().__init__(worker_id)
        data = Augmented()
        sampler = DistributedSampler(data, self.world_size, self.rank)
        self.train_loader = DataLoader(data, batch_size=4, sampler=sampler)


class Stateful(Noisy):
    """Has a loader of torchdata that knows its position.

    It doesn't seed its processes for each batch, so only the main process may draw noise.
    """

    def __init__(self, worker_id, loader_workers=0):
        from torchdata.stateful_dataloader import StatefulDataLoader

        super().__init__(worker_id)
        data = make_data(ROWS) if loader_workers else Augmented()
        sampler = DistributedSampler(data, self.world_size, self.rank)
        self.train_loader = StatefulDataLoader(
            data, batch_size=4, sampler=sampler, num_workers=loader_workers
        )


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("worker", "train_options"),
    [
        (OwnData, {}),
        (OwnShard, {}),
        pytest.param(OwnShard, {"loader_workers": 2}, marks=pytest.mark.slow),
        pytest.param(Sampled, {}, marks=pytest.mark.slow),
        pytest.param(Stateful, {}, marks=pytest.mark.slow),
        pytest.param(Stateful, {"loader_workers": 2}, marks=pytest.mark.slow),
    ],
)
def test_loaders_that_miniray_does_not_plan(worker, train_options):
    if worker is Stateful:
        pytest.importorskip("torchdata")
    check_resume(3, worker=worker, train_options=train_options)


# -- parts of the model ----------------------------------------------------------------------------


class Normed(Noisy):
    """Has running statistics, which differ between ranks inside an epoch."""

    def __init__(self, worker_id):
        super().__init__(worker_id, rows=56)  # no batch of one row
        self.model.insert(1, nn.BatchNorm1d(16))


def create_layers():
    torch.manual_seed(3)
    layers = [nn.Linear(4, 32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 32), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(32, 3))


def create_list():
    return list(create_layers())


SPLIT = {
    "worker": None,
    "data": DataLoader(Augmented(), batch_size=8, shuffle=True),
    "loss": functional.cross_entropy,
    "optimizer": partial(torch.optim.Adam, lr=1e-2),
}

#: Stages that depend on measured times would draw different numbers for dropout.
FIXED_STAGES = {"layers_per_stage": [3, 3]}


def create_trainer(cls, num_workers, worker, **options):
    return cls(num_workers, **options)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("trainer", "options"),
    [
        (None, {"shard": "full"}),
        (PipelineParallelTrainer, {"model": create_list, "microbatches": 2, **FIXED_STAGES}),
        (ModelParallelTrainer, {"model": create_layers}),
    ],
    ids=["full", "pipeline", "tensor"],
)
@pytest.mark.slow
def test_trainers_whose_ranks_hold_parts(trainer, options):
    if trainer is not None:
        options = {**SPLIT, **options, "trainer": partial(create_trainer, trainer)}
    check_resume(5, **options)


@pytest.mark.parametrize(
    ("trainer", "options"),
    [
        pytest.param(None, {"worker": Normed}, marks=pytest.mark.slow),
        (PipelineParallelTrainer, {"model": create_list, "microbatches": 2, **FIXED_STAGES}),
        pytest.param(ModelParallelTrainer, {"model": create_layers}, marks=pytest.mark.slow),
    ],
    ids=["replicated", "pipeline", "tensor"],
)
def test_evaluation_inside_an_epoch_changes_no_bit(trainer, options):
    """The model has dropout, so it must train again after an evaluation."""
    if trainer is not None:
        val_data = DataLoader(make_data(9), batch_size=4)
        split = {**SPLIT, "val_data": val_data, "trainer": partial(create_trainer, trainer)}
        options = {**split, **options}
    evaluated = run("evaluated", {"epochs": 1}, **options, eval_every_steps=2)
    check_equal(evaluated, run("plain", {"epochs": 1}, **options))
    steps = RunDirectory("evaluated").read_steps()
    assert [r["step"] for r in steps if "val_loss" in r] == [*range(2, evaluated[0] + 1, 2)]


# -- log records of ranks that hold parts ----------------------------------------------------------


def create_embedding():
    torch.manual_seed(3)
    return [nn.Embedding(9, 8), nn.Linear(8, 8), nn.Flatten(), nn.Linear(24, 3)]


def create_embedding_model():
    return nn.Sequential(*create_embedding())


def compute_gradient_norms(rows, size):
    """Return the norm of the gradients at each step of one process."""
    model, norms = create_embedding_model(), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        ids, y = (torch.stack([row[name] for row in part]) for name in ("input_ids", "y"))
        optimizer.zero_grad()
        functional.cross_entropy(model(ids), y).backward()
        norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])))
        optimizer.step()
    return norms


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("trainer", "options"),
    [
        (PipelineParallelTrainer, {"model": create_embedding, "microbatches": 2}),
        (ModelParallelTrainer, {"model": create_embedding_model}),
    ],
    ids=["pipeline", "tensor"],
)
def test_log_records_of_split_models(trainer, options):
    """Steps of 8, 8 and 4 samples of 3 tokens: ranks that share them count them once."""
    rows = [{"input_ids": torch.arange(n, n + 3) % 9, "y": torch.tensor(n % 3)} for n in range(20)]
    loader, optimizer = DataLoader(rows, batch_size=8), partial(torch.optim.SGD, lr=0.1)
    options = {**options, "optimizer": optimizer, "loss": functional.cross_entropy}
    with trainer(2, data=loader, seed=0, progress=False, log_every=9, **options) as split:
        split.train(epochs=1)
        first, last = split.run.read_steps()
    norms = compute_gradient_norms(rows, 8)
    for record, step, steps, samples in ((first, 1, 1, 8), (last, 3, 2, 12)):
        assert record["step"] == step
        assert record["grad_norm"] == pytest.approx(norms[step - 1], rel=1e-4)
        seconds = steps * record["step_seconds"]
        assert record["samples_per_second"] * seconds == pytest.approx(samples)
        assert record["tokens_per_second"] * seconds == pytest.approx(3 * samples)
        assert (record["lr"], record["memory_mb"] > 10) == (0.1, True)
