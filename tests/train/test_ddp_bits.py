"""Restarted and resumed DDP runs have the bits of a run that was never interrupted."""

import os
import signal

import pytest

import miniray
from miniray.doctor.reader import read_box
from miniray.train import Checkpoint, DDPTrainer

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from miniray.train.ddp.model import wrap  # noqa: E402
from miniray.train.torch_private import PinnedDDP  # noqa: E402
from tests.train.ddp_for_tests import SEED, make_data  # noqa: E402

STEPS = 4  # in each epoch of ``Deep``
TINY = {"bucket_cap_mb": 0.0004}  # four buckets


@pytest.fixture(scope="module")
def engine():
    """One engine for all: its first worker loads torch for the others."""
    yield lambda: miniray.is_initialized() or miniray.init(backend="local", num_workers=4)
    miniray.shutdown()


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path, monkeypatch):
    """As everywhere, but the engine keeps running."""
    monkeypatch.chdir(tmp_path)


class Layers(nn.Module):
    """Layers whose gradients don't arrive in the reverse order of their definition."""

    def __init__(self, uses_bias):
        super().__init__()
        self.last = nn.Linear(24, 3)
        self.norm = nn.BatchNorm1d(24)
        self.first = nn.Linear(4, 24)
        self.middle = nn.Linear(24, 24)
        self.bias = nn.Parameter(torch.zeros(3))
        self.uses_bias = uses_bias

    def forward(self, x):
        x = functional.dropout(torch.tanh(self.first(x)), 0.1, self.training)
        out = self.last(self.norm(torch.tanh(self.middle(x))))
        return out + self.bias if self.uses_bias else out


class Deep:
    """Kills rank 1 in the step ``at``, once: a file remembers it."""

    def __init__(self, worker_id, world_size=3, at=None, marker="", frozen=False, uses_bias=True):
        torch.manual_seed(7)
        self.model = Layers(uses_bias)
        self.model.middle.bias.requires_grad_(not frozen)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(trained, 0.1, momentum=0.9)
        data = make_data(STEPS * 4 * world_size)
        self.train_loader = DataLoader(data, batch_size=4, shuffle=True)
        self.at = at if worker_id == 1 else None
        self.marker = marker

    def training_step(self, batch, batch_idx):
        here = self.train_loader.batch_sampler.epoch, batch_idx
        if here == self.at and not os.path.exists(self.marker):
            open(self.marker, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        x, y = batch
        return functional.cross_entropy(self.model(x), y)


def run(world_size, epochs, options, *, run_dir, worker_options=None, resume=None, **more):
    """Return the losses and restarts by epoch, and the weights, of a run in ``run_dir``."""
    with DDPTrainer(
        world_size, worker=Deep, seed=SEED, progress=False, run_dir=run_dir, **options, **more
    ) as trainer:
        result = trainer.train(epochs, resume=resume, world_size=world_size, **worker_options or {})
        weights = trainer.model_weights()
        steps = result.epochs * STEPS // options.get("accumulate", 1)
        assert trainer.state.step == steps  # also after a resume or restart
    losses = {record["epoch"]: record["loss"] for record in result.history}
    restarts = {r["epoch"]: r["restarts"] for r in result.history if r.get("restarts")}
    return losses, restarts, weights


def check_bits(found, expected):
    assert found[0] == expected[0]
    assert all(torch.equal(found[2][name], expected[2][name]) for name in expected[2])


@pytest.mark.timeout(120)  # processes start slowly on a machine that is busy
def test_resume_and_restart_of_three_ranks_give_the_same_bits(engine, tmp_path):
    """A run resumes at epoch 1 and loses a rank in epoch 2."""
    engine()
    whole = run(3, 3, TINY, run_dir="whole", callbacks=[Checkpoint(keep_last=None)])
    parts = run(
        3,
        3,
        TINY,
        run_dir="parts",
        max_failures=1,
        resume=min((tmp_path / "whole" / "checkpoints").iterdir()),
        worker_options={"at": (2, 2), "marker": "killed"},
    )
    assert parts[1] == {2: 1}
    check_bits(parts, whole)
    # Wrapping the model made no step, no backward pass and no collective in the record.
    for rank in range(3):
        record = read_box(tmp_path / "whole" / "ranks" / f"{rank}.box")
        assert (record.step, record.backwards, record.steps[0].step) == (3 * STEPS, 3 * STEPS, 1)
        ddp = [e.name for e in record.collectives() if e.name.startswith("DDP.")]
        assert ddp == ["DDP.__init__", *["DDP.forward", "DDP.backward"] * (3 * STEPS)]


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("world_size", "options", "worker_options"),
    [
        (2, {}, {}),
        (3, {}, {}),
        (4, {}, {}),
        (2, TINY, {}),
        (4, TINY, {}),
        (3, {**TINY, "static_graph": True}, {}),
        (3, {**TINY, "find_unused_parameters": True}, {"uses_bias": False}),
        (
            3,
            {**TINY, "find_unused_parameters": True, "static_graph": True},
            {"uses_bias": False},
        ),
        (3, {**TINY, "gradient_as_bucket_view": False}, {}),
        (3, {**TINY, "broadcast_buffers": False}, {}),
        (3, {**TINY, "accumulate": 2}, {}),
        (3, {**TINY, "precision": "bf16"}, {}),
        (3, {**TINY, "precision": "fp16"}, {}),
        (3, {"compile": "eager"}, {}),
        (3, TINY, {"frozen": True}),
    ],
    ids=str,
)
def test_restart_and_resume_give_the_same_bits(
    engine, tmp_path, world_size, options, worker_options
):
    engine()
    whole = run(
        world_size,
        2,
        options,
        run_dir="whole",
        worker_options=worker_options,
        callbacks=[Checkpoint(keep_last=None)],
    )
    at = (1, 1)
    restarted = run(
        world_size,
        2,
        options,
        run_dir="restarted",
        max_failures=1,
        worker_options={**worker_options, "at": at, "marker": "killed"},
    )
    assert restarted[1] == {1: 1}
    check_bits(restarted, whole)
    checkpoint = min((tmp_path / "whole" / "checkpoints").iterdir())
    resumed = run(
        world_size,
        2,
        options,
        run_dir="resumed",
        worker_options=worker_options,
        resume=checkpoint,
    )
    check_bits(resumed, whole)


@pytest.fixture
def _one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize(
    ("options", "is_compiled"),
    [
        (TINY, False),
        ({**TINY, "static_graph": True}, False),
        ({**TINY, "gradient_as_bucket_view": False}, False),
        ({}, True),  # torch compiles only with buckets of 1 MB and more
    ],
)
def test_wrapping_pins_buckets_and_changes_nothing_else(options, is_compiled):
    """No forward pass, hook, compilation or random number; not-a-numbers stay where they are."""
    calls = []
    model = Layers(uses_bias=True)
    model.register_forward_hook(lambda *_: calls.append("forward"))
    model.middle.weight.register_hook(lambda _: calls.append("gradient"))
    with torch.no_grad():
        model.middle.weight[0, 0] = float("nan")
        model.first.weight[0, 0] = float("inf")
    model.first.bias.grad = torch.ones(24)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()

    ddp = wrap(model, torch.device("cpu"), is_compiled and _counting(calls), options)

    assert not calls
    assert torch.equal(torch.get_rng_state(), random)
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0, equal_nan=True)
    kept = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    torch.testing.assert_close(kept, {"first.bias": torch.ones(24)})
    model.load_state_dict({name: value.nan_to_num(0, 0, 0) for name, value in before.items()})
    sizes = []
    for _ in range(4):
        ddp(torch.ones(2, 4)).sum().backward()
        sizes.append(ddp._get_ddp_logging_data().get("rebuilt_bucket_sizes"))
    # torch logs what it regrouped at the next forward pass.
    assert sizes[1] == ("3384" if is_compiled else "2400, 480, 492, 12")
    assert sizes[1:] == sizes[1:2] * 3
    assert ("compile" in calls) == is_compiled


def _counting(calls):
    """Return options of ``torch.compile`` that count compilations."""

    def backend(graph, _):
        calls.append("compile")
        return graph.forward

    return {"backend": backend}


@pytest.mark.usefixtures("_one_rank")
def test_gradients_are_sent_in_reverse_order_of_parameters():
    """The last parameters are in the first bucket, because their gradients arrive first."""
    model = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 8), nn.Linear(8, 1))
    orders = {}
    for find_unused in (False, True):
        ddp = PinnedDDP(model, bucket_cap_mb=2e-5, find_unused_parameters=find_unused)
        for _ in range(2):
            ddp(torch.ones(2, 4)).sum().backward()
        facts = ddp._get_ddp_logging_data()
        orders[find_unused] = facts["bucket_sizes" if find_unused else "rebuilt_bucket_sizes"]
    assert orders == {False: "36, 32, 64, 40", True: "4, 32, 32, 72, 32"}  # bytes


@pytest.mark.usefixtures("_one_rank")
def test_missing_private_names_leave_buckets_unpinned_with_warning(monkeypatch):
    class Missing:
        """The reducer of a torch without the names."""

    original = nn.parallel.DistributedDataParallel.__init__

    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        self.reducer = Missing()

    monkeypatch.setattr(nn.parallel.DistributedDataParallel, "__init__", init)
    with pytest.warns(RuntimeWarning, match="_push_all_rebuilt_params"):
        PinnedDDP(nn.Linear(2, 2))
