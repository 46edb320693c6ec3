"""A rank that is killed inside an epoch costs at most ``snapshot_every`` steps, and no bit."""

from __future__ import annotations

import os
import signal

import pytest

import miniray
from miniray.train import DDPTrainer, ModelParallelTrainer, PipelineParallelTrainer
from miniray.train.lockstep.snapshots import arena

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils.data import DataLoader, Dataset, TensorDataset  # noqa: E402

pytestmark = pytest.mark.timeout(180)  # processes start slowly on a machine that is busy

STEPS = 12  # in each epoch
EVERY = 3


@pytest.fixture(autouse=True, scope="module")
def engine():
    """One engine for all: its first worker loads torch for the others."""
    with miniray.init(backend="local", num_workers=3):
        yield


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path, monkeypatch):
    """As everywhere, but the engine keeps running."""
    monkeypatch.chdir(tmp_path)


def kill(name, pid=None):
    """Kill a rank with SIGKILL, once: a file remembers it."""
    if not os.path.exists(name):
        open(name, "w").close()
        os.kill(pid or os.getpid(), signal.SIGKILL)


class Augmented(Dataset):
    """Samples with random noise. ``victim`` dies when it loads the row ``fatal``."""

    def __init__(self, size):
        self.x = torch.randn(size, 4, generator=torch.Generator().manual_seed(3))
        self.y = self.x.argmax(1).clamp(max=2)
        self.rank_pid = os.getpid()
        self.fatal = None  # number of loads left

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        if self.fatal is not None:
            self.fatal -= 1
            if not self.fatal:
                kill("killed-data", self.rank_pid)
        return self.x[index] + 0.1 * torch.randn(4), self.y[index]


class Mortal:
    """Trains with dropout, batch norm and Adam. Rank ``victim`` dies in each of ``places``.

    A place is a phase and the step of the process in which it dies.
    """

    def __init__(self, worker_id, world_size, places=(), victim=1, loaders=0, norm=True):
        torch.manual_seed(7)
        middle = [nn.BatchNorm1d(16)] if norm else []
        layers = [nn.Linear(4, 16), *middle, nn.Tanh(), nn.Dropout(0.2)]
        self.model = nn.Sequential(*layers, nn.Linear(16, 3))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.97)
        self.scheduler_interval = "step"
        data = Augmented(STEPS * 4 * world_size)
        self.train_loader = DataLoader(data, batch_size=4, shuffle=True, num_workers=loaders)
        self.val_loader = DataLoader(data, batch_size=4)
        self.places = dict(places) if worker_id == victim else {}
        self.steps = self.copies = self.states = 0
        if "data" in self.places:
            # Each loader process restarts in each epoch and loads every second batch.
            batches = self.places["data"] % STEPS // loaders if loaders else self.places["data"]
            data.fatal = 4 * batches + 1
        self.optimizer.register_step_pre_hook(lambda *_: self.at("optimizer"))
        self.optimizer.register_step_post_hook(lambda *_: self.at("after optimizer"))
        copy_bytes = arena._copy_bytes

        def copy_and_die(piece, target):
            copy_bytes(piece, target[: len(target)])
            self.copies += 1
            if self.copies > 3:  # some tensors of this snapshot are written
                self.at("snapshot")

        if "snapshot" in self.places:
            arena._copy_bytes = copy_and_die

    def at(self, phase):
        if self.places.get(phase) == self.steps:
            kill(f"killed-{phase}")

    def training_step(self, batch, batch_idx):
        self.steps += 1
        self.copies = self.states = 0
        self.at("forward")
        x, y = batch
        output = self.model(x)
        output.register_hook(lambda _: self.at("backward"))
        return functional.cross_entropy(output, y)

    def validation_step(self, batch, batch_idx):
        self.at("evaluation")
        return functional.cross_entropy(self.model(batch[0]), batch[1])

    def get_state(self):
        self.states += 1
        if self.states == 2:  # the first one is for the snapshot
            self.at("collect")
        return {"steps": torch.tensor(self.steps)}

    def set_state(self, state):
        self.steps = int(state["steps"])


def train(world_size, *, kills=0, every=EVERY, epochs=2, trainer_options=None, **options):
    """Return the losses by epoch, the records of steps, the weights, and the events."""
    with DDPTrainer(
        world_size,
        worker=Mortal,
        seed=5,
        progress=False,
        log_every=2,
        max_failures=kills,
        snapshot_every=every,
        run_dir="run" if kills else "undisturbed",
        **trainer_options or {},
    ) as trainer:
        result = trainer.train(epochs, world_size=world_size, **options)
        weights = trainer.model_weights()
        losses = [(record["loss"], record.get("val_loss")) for record in result.history]
        return losses, trainer.run.read_steps(), weights, trainer.run.read_events()


_undisturbed = {}


def train_undisturbed(world_size, options):
    """Return what ``train`` does without a kill, from an earlier test if there was one."""
    key = (world_size, repr(options))
    if key not in _undisturbed:
        _undisturbed[key] = train(world_size, **options)
    return _undisturbed[key]


def check_recovery(world_size, places, loaders=0, every=EVERY, epochs=2, **options):
    """Compare a run that loses a rank in these places with one that loses none."""
    common = {"loaders": loaders, "epochs": epochs, **options}
    expected = train_undisturbed(world_size, common)
    found = train(world_size, kills=len(places) + 1, every=every, places=places, **common)
    assert found[0] == expected[0]
    assert all(torch.equal(found[2][name], value) for name, value in expected[2].items())
    steps = [(record["step"], "val_loss" in record) for record in found[1]]
    assert steps == sorted(set(steps))
    restarts = [event for event in found[3] if event["event"] == "ranks_restarted"]
    assert len(restarts) == len(places)
    for event in restarts:
        assert event["rank"] == 1
        if event["died_at_step"] is None:  # not in a step
            continue
        assert 0 <= event["lost_steps"] <= every
        assert event["died_at_step"] - event["resumed_at_step"] == event["lost_steps"]
        # The first snapshot is that of step 1.
        assert event["resumed_at_step"] % every == 0 or event["resumed_at_step"] == 1
    return restarts


def test_a_kill_with_loader_processes_costs_the_steps_since_the_last_snapshot():
    """``test_kills`` has the other phases."""
    check_recovery(2, {"forward": STEPS + 6}, loaders=2)


@pytest.mark.slow
@pytest.mark.parametrize("loaders", [0, 2])
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    "phase", ["data", "forward", "backward", "optimizer", "after optimizer", "snapshot"]
)
@pytest.mark.parametrize("step", [6, STEPS + 7])
def test_a_kill_in_any_phase(world_size, phase, loaders, step):
    if phase == "snapshot":
        step -= step % EVERY
    check_recovery(world_size, {phase: step}, loaders)


@pytest.mark.slow
def test_two_kills_in_a_row():
    first, second = check_recovery(2, {"forward": 8, "backward": 9})
    assert (first["resumed_at_step"], second["resumed_at_step"]) == (6, 6)


@pytest.mark.slow
def test_a_kill_in_an_evaluation_inside_an_epoch_costs_no_step():
    """The state at the pause is newer than the snapshot of the same step."""
    options = {"trainer_options": {"eval_every_steps": 6}}
    expected = train(2, **options)
    found = train(2, kills=2, places={"evaluation": 6}, **options)
    assert found[0] == expected[0]
    assert all(torch.equal(found[2][name], value) for name, value in expected[2].items())
    (restart,) = [event for event in found[3] if event["event"] == "ranks_restarted"]
    assert restart["resumed_at_step"] == 6


@pytest.mark.slow
def test_a_kill_before_a_pause_that_a_snapshot_has_reached():
    """Rank 1 dies when its state is collected, after the snapshot of the same step."""
    options = {"trainer_options": {"eval_every_steps": 6}}
    (restart,) = check_recovery(2, {"collect": 6}, **options)
    assert restart["resumed_at_step"] == 6


@pytest.mark.slow
@pytest.mark.parametrize(("phase", "step"), [("backward", 8), ("snapshot", 9), ("data", 17)])
def test_shards_restart_from_their_own_snapshots(phase, step):
    check_recovery(2, {phase: step}, trainer_options={"shard": "full"}, norm=False)


class Fatal(nn.Module):
    """A layer that kills the rank that holds it in the forward pass of a step, once."""

    def __init__(self, step):
        super().__init__()
        self.register_buffer("left", torch.tensor(step))

    def forward(self, x):
        if self.training and x.requires_grad:
            self.left -= 1
            if self.left == 0:
                kill("killed-layer")
        return x


def train_split(kind, kills=0, step=0, **options):
    def make_layers():
        torch.manual_seed(1)
        middle = [nn.Linear(8, 8), nn.Dropout(0.2), Fatal(step), nn.ReLU()]
        return [nn.Linear(4, 8), nn.Tanh(), *middle, nn.Linear(8, 3)]

    x = torch.randn(STEPS * 8, 4, generator=torch.Generator().manual_seed(3))
    data = TensorDataset(x, x.argmax(1).clamp(max=2))
    arguments = {
        "loss": functional.cross_entropy,
        "optimizer": lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
        "data": lambda: DataLoader(data, batch_size=8, shuffle=True),
        "microbatches": 2,
        "max_failures": kills,
        "snapshot_every": EVERY,
        "seed": 5,
        "progress": False,
        **options,
    }
    if kind == "pipeline":
        trainer = PipelineParallelTrainer(
            2, model=make_layers, layers_per_stage=[3, 4], **arguments
        )
    else:
        trainer = ModelParallelTrainer(2, model=lambda: nn.Sequential(*make_layers()), **arguments)
    with trainer:
        result = trainer.train(2)
        losses = [record["loss"] for record in result.history]
        return losses, trainer.model_weights(), trainer.run.read_events()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pipeline", "tensor"])
def test_split_models_restart_from_their_own_snapshots(kind):
    losses, weights, _ = train_split(kind)
    found, weights_then, events = train_split(kind, kills=2, step=2 * (STEPS + 5))
    assert found == losses
    same = {name for name, value in weights.items() if torch.equal(weights_then[name], value)}
    assert set(weights) - same <= {"4.left"}
    (restart,) = [event for event in events if event["event"] == "ranks_restarted"]
    assert restart["resumed_at_step"] == STEPS + 3
    assert restart["lost_steps"] <= EVERY
