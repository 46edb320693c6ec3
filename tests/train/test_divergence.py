"""Ranks whose weights differ are found with the next checkpoint."""

import warnings
from functools import partial

import pytest

import miniray
from miniray.errors import WeightsDivergedError
from miniray.train import (
    Checkpoint,
    DDPTrainer,
    PipelineParallelTrainer,
)
from miniray.train.lockstep.health.failure import find_divergence

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from miniray.train.lockstep.mesh import compute_checksums  # noqa: E402
from tests.train.ddp_for_tests import Stepper, make_data  # noqa: E402

pytestmark = pytest.mark.timeout(120)


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


class Drifting(Stepper):
    """On one rank, one number of one parameter changes before the fourth step."""

    def __init__(self, worker_id, victim=1, ignored=False):
        super().__init__(worker_id)
        self.victim = victim
        if ignored:
            self.model._ddp_params_and_buffers_to_ignore = ["2.bias"]

    def training_step(self, batch, batch_idx):
        if self.rank == self.victim and self.global_step == 3:
            with torch.no_grad():
                self.model.module[2].bias[1] += 1e-4
        return super().training_step(batch, batch_idx)


def make(num_workers=2, **options):
    checkpoint = Checkpoint(every_steps=4, keep_last=None)
    options = {"worker": Drifting, "progress": False, "callbacks": checkpoint, **options}
    return DDPTrainer(num_workers, **options)


def list_checkpoints(trainer):
    return [info.path.name for info in trainer.checkpoints.list()]


@pytest.mark.parametrize(
    ("num_workers", "victim"), [(2, 1), (3, 0), pytest.param(3, 2, marks=pytest.mark.slow)]
)
def test_rank_parameter_and_step_of_a_divergence(num_workers, victim):
    with make(num_workers) as trainer, pytest.raises(WeightsDivergedError) as caught:
        trainer.train(epochs=1, victim=victim)
    error = caught.value
    assert (error.rank, error.entry, error.step) == (victim, "model.2.bias", 4)
    assert error.code == "weights-diverged"
    assert list_checkpoints(trainer) == []
    (event,) = [e for e in trainer.run.read_events() if e["event"] == "weights_diverged"]
    assert (event["rank"], event["parameter"], event["step"]) == (victim, "model.2.bias", 4)
    assert trainer.run.status() == "failed"


def test_with_warn_only_checkpoints_are_left_out():
    with (
        make(on_divergence="warn") as trainer,
        pytest.warns(UserWarning, match=r"rank 1.*model\.2\.bias"),
    ):
        trainer.train(steps=6)
    assert trainer.state.step == 6
    assert list_checkpoints(trainer) == []
    steps = {e["step"] for e in trainer.run.read_events() if e["event"] == "weights_diverged"}
    assert steps == {4, 6}


def test_equal_ranks_and_ignored_parameters_are_saved():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with make() as trainer:
            trainer.train(steps=4, victim=None)
            assert len(list_checkpoints(trainer)) == 1
        with make() as trainer:
            trainer.train(steps=4, ignored=True)
            assert len(list_checkpoints(trainer)) == 1


@pytest.mark.slow
def test_shards_have_no_replicas_to_compare():
    with make(shard="full") as trainer:
        trainer.train(steps=4, victim=None)
        assert len(list_checkpoints(trainer)) == 1


class Changing(nn.Module):
    """Changes its weight on rank 3 in the third step of two microbatches."""

    def __init__(self):
        super().__init__()
        self.weight, self.left = nn.Parameter(torch.ones(8)), 6

    def forward(self, x):
        if x.requires_grad and dist.is_initialized() and dist.get_rank() == 3:
            self.left -= 1
            if self.left == 0:
                self.weight.data += 1e-6
        return x * self.weight


def create_layers():
    torch.manual_seed(1)
    return [nn.Linear(4, 8), nn.Tanh(), Changing(), nn.Linear(8, 3)]


def test_copies_of_a_pipeline_are_compared():
    trainer = PipelineParallelTrainer(
        4,
        model=create_layers,
        layers_per_stage=[2, 2],
        parallel={"data": 2, "pipeline": 2},
        microbatches=2,
        data=DataLoader(make_data(64), batch_size=8),
        loss=functional.cross_entropy,
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        callbacks=Checkpoint(every_steps=4, keep_last=None),
        progress=False,
    )
    with trainer, pytest.raises(WeightsDivergedError) as caught:
        trainer.train(epochs=2)
    assert (caught.value.rank, caught.value.entry, caught.value.step) == (3, "2.weight", 4)
    assert list_checkpoints(trainer) == []


def test_rank_that_most_others_differ_from():
    same, other = {"a": 1, "b": 2}, {"a": 1, "b": 3}
    assert find_divergence([same, same, same], [[0, 1, 2]]) is None
    assert find_divergence([same, other], [[0, 1]]) == (1, ["b"])
    assert find_divergence([other, same, same], [[0, 1, 2]]) == (0, ["b"])
    assert find_divergence([same, other, same, other], [[0, 2], [1, 3]]) is None
    assert find_divergence([same, same, same, other], [[0, 2], [1, 3]]) == (3, ["b"])


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex128],
)
def test_checksum_changes_with_each_bit_only(dtype):
    """Neither strides nor the place in a larger tensor matter, which may differ between ranks."""
    storage = torch.arange(17).to(dtype)
    values = storage[1:16].view(3, 5)  # 15 numbers, not a multiple of 8 bytes
    strided = values.t().contiguous().t()
    parameters = [("a", values), ("b", strided), ("c", values.clone()), ("empty", values[:0])]
    before = compute_checksums(parameters)
    assert before["a"] == before["b"] == before["c"]
    assert before["empty"] == 0
    data = values.clone().reshape(-1).view(torch.uint8)
    for number in range(8 * len(data)):
        data[number // 8] ^= 1 << number % 8
        assert compute_checksums([("a", data.view(dtype))])["a"] != before["a"]
        data[number // 8] ^= 1 << number % 8


def test_parts_of_different_types_have_separate_checksums():
    scalar = torch.tensor(1.5)
    found = compute_checksums([("scalar", scalar), ("half", torch.ones(3, dtype=torch.float16))])
    assert found["scalar"] == sum(b"\x00\x00\xc0\x3f")
    assert found["half"] == 3 * sum(b"\x00\x3c")
