"""``min_workers``: continue on fewer ranks, grow again, and neither lose nor repeat a row."""

from __future__ import annotations

import itertools
import json
import os
import signal
from pathlib import Path
from random import Random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import miniray
from miniray.core.engine import count_room
from miniray.data import DataLoader, IndexedDataset, ParquetDataset
from miniray.errors import ActorDiedError
from miniray.train import Callback, Checkpoint, DDPTrainer, PipelineParallelTrainer
from miniray.train.workers import budget
from miniray.train.workers.budget import TooFewRanksError, WorldSize

torch = pytest.importorskip("torch")

from torch.utils import data as torch_data  # noqa: E402

from miniray.train.lockstep.snapshots.state import resize_states  # noqa: E402
from miniray.train.workers.data.seeding import derive_seed  # noqa: E402
from tests.conformance.helpers import eventually  # noqa: E402

pytestmark = pytest.mark.timeout(180)  # processes start slowly on a machine that is busy

ROWS = 60
SEED = 1


@pytest.fixture(autouse=True, scope="module")
def engine():
    """One engine for all: its first worker loads torch for the others."""
    with miniray.init(backend="local", num_workers=3, num_cpus=3):
        yield


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path, monkeypatch):
    """As everywhere, but the engine keeps running."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(budget, "PLACEMENT_TIMEOUT_S", 0.5)
    yield
    while others:
        miniray.kill(others.pop())


class Numbers(torch_data.Dataset):
    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return {"x": float(index)}


class Line:
    """Write down the rows of each step. A rank dies at some steps of the run, as often as listed.

    Each of ``kills`` is the number of ranks, the rank and the number of completed steps.
    """

    def __init__(self, kills=(), tokens=False):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Dropout(0.1)
        )
        self.model.append(torch.nn.Linear(8, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.02)
        self.kills = [tuple(kill) for kill in kills]
        if tokens:
            self.train_loader = load_tokens()

    def write_rows(self, rows):
        with open("steps", "a") as file:
            file.write(json.dumps([self.global_step, sorted(rows)]) + "\n")

    def training_step(self, batch, batch_idx):
        self.die((self.world_size, self.rank, self.global_step))
        x = batch["x"].float()[:, None]
        self.write_rows(batch["x"].tolist())
        loss = (self.model(x / ROWS) - x / ROWS).pow(2).mean()
        return {"loss": loss, "row": x.mean(), "square": x.pow(2).mean()}

    def die(self, where):
        killed = Path("killed").read_text().splitlines() if Path("killed").exists() else []
        if killed.count(str(where)) < self.kills.count(where):
            with open("killed", "a") as file:
                file.write(f"{where}\n")
            os.kill(os.getpid(), signal.SIGKILL)

    def get_seed(self):
        return torch.initial_seed()


class Loop(Line):
    """Trains in a separate loop."""

    def train_epoch(self, epoch):
        rows = 0
        for index, batch in enumerate(self.train_loader):
            self.optimizer.zero_grad()
            self.training_step(batch, index)["loss"].backward()
            self.optimizer.step()
            rows += len(batch["x"])
            self.die((self.world_size, self.rank, "epoch", epoch))
        return {"num_samples": rows}


class Sharding(Line):
    """Has a shard that a different number of ranks can't divide."""

    def load_data_shard(self, shard_id, num_shards):
        rows = torch_data.Subset(Numbers(), range(shard_id, ROWS, num_shards))
        self.train_loader = torch_data.DataLoader(rows, batch_size=2)


@miniray.remote
class Other:
    """A different user of the engine's CPUs."""

    def ping(self):
        return True


others = []


class Occupy(Callback):
    """Lets an actor take ``num_cpus`` as soon as ranks die."""

    def __init__(self, num_cpus):
        self.num_cpus = num_cpus

    def on_train_start(self, trainer, **kwargs):
        others.append(Other.options(num_cpus=self.num_cpus).remote())


class Mark(Callback):
    """Writes a line where ranks start again."""

    def on_worker_replaced(self, trainer, rank):
        if not rank:
            with open("steps", "a") as file:
                file.write("null\n")


def load_tokens():
    return DataLoader(
        IndexedDataset(Numbers()), 40, batch_by="tokens", length=lambda row: 7, format="torch"
    )


def read_steps():
    """Return the rows of each step. Those that were trained again count once."""
    steps = {}
    lines = map(json.loads, Path("steps").read_text().splitlines())
    for is_mark, part in itertools.groupby(lines, lambda line: line is None):
        if is_mark:
            continue
        part = list(part)
        first = min(step for step, _ in part)
        steps = {step: rows for step, rows in steps.items() if step < first}
        for step, rows in part:
            steps.setdefault(step, []).extend(map(int, rows))
    return [sorted(steps[step]) for step in sorted(steps)]


def count_rows(steps):
    return sorted(itertools.chain(*steps))


def create(num_workers=3, min_workers=1, callbacks=(), **options):
    if "worker" not in options:
        options["worker"] = Line
    if options["worker"] is not Sharding:
        options = {"data": Numbers(), "batch_size": 2, **options}
    return DDPTrainer(
        num_workers,
        min_workers=min_workers,
        seed=SEED,
        run_dir="run",
        progress=False,
        callbacks=[*callbacks, Mark()],
        **options,
    )


def read_changes(trainer):
    events = trainer.run.read_events()
    names = ("from", "to", "step", "global_batch_size")
    return [
        tuple(event[name] for name in names)
        for event in events
        if event["event"] == "world_size_changed"
    ]


def check_equal_weights(trainer):
    weights = miniray.get([worker.get_weights.remote() for worker in trainer.workers])
    for other in weights[1:]:
        assert all(torch.equal(other[name], value) for name, value in weights[0].items())


def test_shrink_and_grow_deliver_each_row_once():
    """Rank 1 of 3 is lost twice at step 8; 2 ranks continue until the checkpoint of step 11.

    With 3 ranks, step 11 would be in the next epoch. It is the last but one of the epoch now.
    """
    options = {"callbacks": [Checkpoint(every_steps=11)], "snapshot_every": 3, "log_every": 1}
    with create(**options) as trainer:
        result = trainer.train(epochs=3, kills=[(3, 1, 8)] * 2)
        changes, seeds = read_changes(trainer), trainer.call_workers("get_seed")
        records, run = trainer.run.read_steps(), trainer.run.read_run()
        assert len(trainer.workers) == 3
        check_equal_weights(trainer)
    sizes = [6] * 6 + [4] * 5 + [4]  # steps 0-5 on 3 ranks, 6-10 on 2, 11 on 3
    starts = [0, *itertools.accumulate(sizes)]
    expected = [list(range(a, b)) for a, b in itertools.pairwise(starts)]
    steps = read_steps()
    assert steps[:12] == expected
    assert count_rows(steps[12:22]) == count_rows(steps[22:]) == list(range(ROWS))
    assert changes == [(3, 2, 6, 4), (2, 3, 11, 6)]
    assert (trainer.state.step, run["world_size"], trainer.failures) == (32, 3, 2)
    # The means of the epoch are over all of its rows, those of the lost rank included.
    assert [record["num_samples"] for record in result.history] == [ROWS] * 3
    assert [record["row"] for record in result.history] == pytest.approx([(ROWS - 1) / 2] * 3)
    assert result.history[-1]["loss"] < result.history[0]["loss"]
    logged = [(a["step"], b["step"], b["row"]) for a, b in itertools.pairwise(records)]
    assert {step for _, step, _ in logged} >= {11, 12, 32}
    for before, step, mean in logged:
        if before >= 11:
            assert mean == pytest.approx(
                sum(count_rows(steps[before:step])) / sum(map(len, steps[before:step]))
            )
    assert seeds[2] == derive_seed(SEED, 2, 11)  # this rank is new


def test_missing_resources_shrink_the_group_until_they_are_back():
    class OccupyAtFirst(Occupy):
        def on_epoch_end(self, trainer, epoch, result, **kwargs):
            if epoch == 0:
                miniray.kill(others.pop())
                eventually(lambda: miniray.available_resources()["CPU"] == 1)

    options = {"callbacks": [OccupyAtFirst(1)], "resources_per_worker": {"num_cpus": 1}}
    with create(min_workers=2, snapshot_every=None, **options) as trainer:
        trainer.train(epochs=2, kills=[(3, 0, 4)])
        changes = read_changes(trainer)
        check_equal_weights(trainer)
    steps = read_steps()
    # Without snapshots, the epoch starts again.
    assert changes == [(3, 2, 0, 4), (2, 3, 15, 6)]
    assert [len(rows) for rows in steps] == [4] * 15 + [6] * 10
    assert count_rows(steps) == sorted([*range(ROWS)] * 2)


def test_too_few_resources_for_min_workers_raise_the_error_of_the_lost_rank():
    options = {"callbacks": [Occupy(2)], "resources_per_worker": {"num_cpus": 1}}
    with create(min_workers=2, **options) as trainer, pytest.raises(ActorDiedError) as failure:
        trainer.train(epochs=1, kills=[(3, 2, 4)])
    assert (failure.value.rank, failure.value.signal, failure.value.step) == (2, "SIGKILL", 4)
    assert trainer.failures == 1
    assert [event["event"] for event in trainer.run.read_events()][-1] == "worker_failed"
    assert miniray.get(others[0].ping.remote())


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"data": DataLoader(IndexedDataset(Numbers(), seed=3), 2), "batch_size": None},
        {"data": torch_data.DataLoader(Numbers(), 2, shuffle=True), "batch_size": None},
        {"accumulate": 2},
    ],
    ids=["miniray loader", "torch loader", "accumulate"],
)
def test_shrink_inside_an_epoch_with_each_kind_of_data(options):
    with create(snapshot_every=1, **options) as trainer:
        trainer.train(epochs=2, kills=[(3, 2, 3)] * 2)
        changes = read_changes(trainer)
        check_equal_weights(trainer)
    batch = 2 * options.get("accumulate", 1)
    epoch_end = sum(len(rows) < 3 * batch for rows in read_steps())
    assert changes[0] == (3, 2, 3, 2 * batch)
    assert changes[1][:2] == (2, 3)
    assert epoch_end > 0
    assert count_rows(read_steps()) == sorted([*range(ROWS)] * 2)


def load_shuffled(kind):
    """Return a loader whose ranks have different numbers of batches, or of rows, in each epoch."""
    if kind == "tokens":
        rows = IndexedDataset(Numbers(), shuffle=True, seed=3)
        length = lambda row: 1 + int(row["x"]) * 7 % 23  # noqa: E731
        return DataLoader(rows, 40, batch_by="tokens", length=length, format="torch")
    groups = [group for group in range(ROWS) for _ in range(1 + group * group % 7)][:ROWS]
    table = pa.table({"x": [float(n) for n in range(ROWS)], "group": groups})
    pq.write_table(table, "groups.parquet")
    rows = ParquetDataset("groups.parquet", group_by="group", shuffle="global", seed=3)
    return DataLoader(rows, 3, format="torch")


def check_rows_of_each_epoch(history):
    """Check their number, sum and sum of squares; a rank without rows repeats a batch."""
    for record in history:
        assert record["num_samples"] == ROWS
        assert record["row"] == pytest.approx((ROWS - 1) / 2)
        assert record["square"] == pytest.approx(sum(n * n for n in range(ROWS)) / ROWS)


@pytest.mark.parametrize("kind", ["tokens", pytest.param("groups", marks=pytest.mark.slow)])
def test_shrink_and_grow_with_batches_that_differ_between_epochs(kind):
    checkpoint = Checkpoint(every_steps=7)
    options = {"data": load_shuffled(kind), "batch_size": None, "callbacks": [checkpoint]}
    with create(snapshot_every=2, **options) as trainer:
        result = trainer.train(epochs=3, kills=[(3, 1, 5)] * 2 + [(2, 0, 6)])
        changes, failures = read_changes(trainer), trainer.failures
        check_equal_weights(trainer)
    assert [change[:3] for change in changes] == [(3, 2, 4), (2, 3, 7)]
    assert failures == 3
    check_rows_of_each_epoch(result.history)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_token_batches_come_once_whatever_ranks_are_lost(seed):
    """Ranks are lost at random steps, twice in a row so that the group shrinks, or once."""
    random = Random(seed)
    places = [(random.randint(2, 4), random.randint(0, 1), random.randint(1, 30)) for _ in range(8)]
    kills = [place for place in places for _ in range(random.randint(1, 2))]
    kills += [(4, random.randint(0, 3), random.randint(1, 5))] * 2
    options = {"data": load_shuffled("tokens"), "batch_size": None, "max_failures": len(kills)}
    callbacks = [Checkpoint(every_steps=random.randint(3, 9))]
    with create(4, 2, callbacks, snapshot_every=random.randint(1, 4), **options) as trainer:
        result = trainer.train(epochs=3, kills=kills)
        changes = read_changes(trainer)
        check_equal_weights(trainer)
    assert changes
    check_rows_of_each_epoch(result.history)


class Cycle(Line):
    """Its schedule ends after the number of steps that was known at the start."""

    def configure_scheduler(self, optimizer, total_steps):
        self.planned = total_steps
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps)

    def get_schedule(self):
        return self.planned, self.scheduler.last_epoch, self.optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize(
    ("length", "steps"),
    [({"epochs": 1}, 13), pytest.param({"steps": 10}, 10, marks=pytest.mark.slow)],
)
def test_schedule_of_a_fixed_length_is_kept_on_fewer_ranks(length, steps):
    """With ``steps=``, its end is that of the run. An epoch has more steps on fewer ranks."""
    options = {"worker": Cycle, "callbacks": [Occupy(1)], "resources_per_worker": {"num_cpus": 1}}
    with create(min_workers=2, snapshot_every=4, **options) as trainer:
        trainer.train(**length, kills=[(3, 2, 4)])
        changes = read_changes(trainer)
        schedules = trainer.call_workers("get_schedule")
    assert changes == [(3, 2, 4, 4)]
    assert trainer.state.step == steps
    assert [(planned, last) for planned, last, _ in schedules] == [(10, 10)] * 2
    assert [rate for _, _, rate in schedules] == pytest.approx([1 / 25 / 1e4] * 2)


@pytest.mark.slow
def test_rank_lost_after_the_group_has_grown_costs_no_row():
    """The new rank dies in its first step, and the group restarts from the state it grew from."""
    kills = [(3, 1, 8)] * 2 + [(3, 2, 11)]
    with create(callbacks=[Checkpoint(every_steps=11)], snapshot_every=3) as trainer:
        trainer.train(epochs=2, kills=kills)
        changes, failures = read_changes(trainer), trainer.failures
        check_equal_weights(trainer)
    assert changes == [(3, 2, 6, 4), (2, 3, 11, 6)]
    assert failures == 3
    assert count_rows(read_steps()) == sorted([*range(ROWS)] * 2)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [False, True])
def test_workers_with_train_epoch_repeat_the_epoch_on_fewer_ranks(tokens):
    """The position of batches by tokens differs between ranks, and is merged."""
    options = {"data": None, "batch_size": None} if tokens else {}
    options |= {"worker": Loop, "resources_per_worker": {"num_cpus": 1}, "callbacks": [Occupy(2)]}
    with create(2, **options) as trainer:
        result = trainer.train(epochs=3, kills=[(2, 1, "epoch", 1)], tokens=tokens)
        changes = read_changes(trainer)
    assert [change[:2] for change in changes] == [(2, 1)]
    assert changes[0][2] == result.history[0]["step"]
    assert trainer.run.read_run()["world_size"] == 1
    assert [path.name for path in trainer.run.path.glob("ranks/*.box")] == ["0.box"]
    assert [record["num_samples"] for record in result.history] == [ROWS] * 3


@pytest.mark.slow
def test_rank_lost_in_an_evaluation_shrinks_it():
    class Validating(Line):
        def validation_step(self, batch, batch_idx):
            self.die((self.world_size, self.rank, -1))
            return {"row": batch["x"].mean()}

    options = {"worker": Validating, "val_data": Numbers(), "eval_interval": 1}
    options["sanity_batches"] = 0  # in which it would die too
    with create(**options) as trainer:
        result = trainer.train(epochs=1, kills=[(3, 2, -1)] * 2)
        changes = read_changes(trainer)
    assert result.history[0]["val_row"] == pytest.approx((ROWS - 1) / 2)
    assert changes == [(3, 2, 10, 4)]


# -- options ---------------------------------------------------------------------------------------


class Overridden(DDPTrainer):
    def create_worker(self, worker_id):
        return miniray.remote(Line).remote()


@pytest.mark.parametrize(
    ("trainer", "options", "error"),
    [
        (DDPTrainer, {"min_workers": 0}, ValueError),
        (DDPTrainer, {"min_workers": 1.5}, ValueError),
        (DDPTrainer, {"min_workers": 4}, ValueError),
        (DDPTrainer, {"min_workers": 2, "shard": "full"}, ValueError),
        (Overridden, {"min_workers": 2, "worker": None}, ValueError),
        (PipelineParallelTrainer, {"min_workers": 2, "worker": None}, TypeError),
    ],
)
def test_invalid_options_raise_before_anything_starts(trainer, options, error):
    options = {"worker": Line, **options}
    if options["worker"] is None:
        del options["worker"]
    with pytest.raises(error, match="min_workers"):
        trainer(3, **options)


def test_loader_that_cannot_be_divided_again_is_an_error():
    with create(2, worker=Sharding) as trainer, pytest.raises(ValueError, match="min_workers"):
        trainer.train(epochs=1)


@pytest.mark.parametrize(
    ("min_workers", "max_failures", "expected"), [(3, 0, 0), (1, 0, 4), (1, 2, 2), (2, 9, 9)]
)
def test_min_workers_allow_restarts(min_workers, max_failures, expected):
    trainer = create(min_workers=min_workers, max_failures=max_failures)
    assert trainer._budget.max_failures == expected


# -- decisions -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fewest", "losses", "counts"),
    [
        (None, [(1, 5), (1, 5), (1, 5)], [4, 4, 4]),
        (1, [(1, 5), (1, 5), (1, 5), (1, 5)], [4, 3, 3, 2]),
        (1, [(1, 5), (1, 6), (1, 6)], [4, 4, 3]),  # a newer snapshot in between
        (1, [(1, 5), (2, 5), (1, 5)], [4, 4, 4]),  # different ranks
        (1, [(None, 5), (None, 5)], [4, 4]),  # all hang
        (4, [(1, 5), (1, 5)], [4, 4]),
        (3, [(0, None), (0, None), (0, None), (0, None)], [4, 3, 3, 3]),
    ],
)
def test_rank_is_dropped_if_it_is_lost_twice_at_one_state(fewest, losses, counts):
    world, count, found = WorldSize(4, fewest), 4, []
    for rank, step in losses:
        count = world.shrink(count, rank, step)
        found.append(count)
    assert found == counts


@pytest.mark.parametrize(
    ("room", "count", "larger"), [(0, 2, None), (1, 2, 3), (9, 2, 4), (None, 2, 4), (9, 4, None)]
)
def test_group_grows_into_the_room_there_is(room, count, larger):
    assert WorldSize(4, 2, lambda: room).find_larger(count) == larger
    assert WorldSize(4, None, lambda: room).find_larger(count) is None


def test_resources_are_waited_for():
    rooms = [1, 1, 3]
    world = WorldSize(3, 2, lambda: rooms.pop(0) if len(rooms) > 1 else rooms[0])
    assert world.shrink(3, 0, 5) == 3
    rooms[:] = [2]
    assert world.shrink(3, 1, 5) == 2
    rooms[:] = [1]
    with pytest.raises(TooFewRanksError):
        world.shrink(2, 1, 6)
    assert world.grow(3) == 2  # what was free is taken


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        ((0, 0), None),
        ((1, 0), 5),
        ((2, 0), 2),
        ((0, 1), 2),
        ((0.1, 0.5), 4),
        ((0, 0.4), 4),
        ((4, 1), 0),
    ],
)
def test_room_counts_actors_that_fit_on_a_node(request_, expected):
    nodes = [{"CPU": 3.0, "GPU": 2.0}, {"CPU": 2.0}, {"memory": 1.0}]
    assert count_room(nodes, *request_) == expected


# -- states ----------------------------------------------------------------------------------------


def make_state(loader=None, samples=0, total=0.0):
    means = {"sums": {"row": total}, "counts": {"row": samples}, "samples": samples}
    position = None if loader is None else loader.state_dict()
    own = {"own": position, "generator": None, "running": False}
    return {"rank": {"random": "bits", "means": means, "loader": own}, "worker": samples}


def test_dropped_ranks_leave_their_means_and_new_ranks_have_none():
    states = [make_state(samples=n, total=10.0 * n) for n in (1, 2, 3)]
    (only,) = resize_states(states, 1)
    assert only["rank"]["means"] == {"sums": {"row": 60.0}, "counts": {"row": 6}, "samples": 6}
    assert (only["worker"], only["rank"]["random"]) == (1, "bits")
    *old, new = resize_states(states, 4)
    assert old == states
    assert (new["worker"], new["rank"]["random"], new["rank"]["means"]) == (None, None, {})


@pytest.mark.parametrize("after", [1, 3])
def test_positions_of_loaders_are_merged(after):
    """Two ranks have taken different numbers of batches; each row is delivered once."""
    loaders = [load_tokens().shard(rank, 2) for rank in range(2)]
    seen = []
    for loader, batches in zip(loaders, (2, 3), strict=True):
        for batch in itertools.islice(iter(loader), batches):
            seen += [row["x"] for row in batch] if isinstance(batch, list) else list(batch["x"])
    states = resize_states([make_state(loader) for loader in loaders], after)
    assert resize_states(states, 2)[1]["rank"]["loader"] == states[0]["rank"]["loader"]
    for rank, state in enumerate(states):
        loader = load_tokens().shard(rank, after)
        loader.load_state_dict(state["rank"]["loader"]["own"])
        for batch in loader:
            seen += [row["x"] for row in batch] if isinstance(batch, list) else list(batch["x"])
    assert sorted(map(int, seen)) == list(range(ROWS))
