"""Ranks that step together over batches by tokens: each epoch has its own number of steps."""

import itertools
import os
import signal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import miniray
from miniray.data import DataLoader, IndexedDataset, ParquetDataset
from miniray.errors import DataError
from miniray.train import Checkpoint, DDPTrainer
from tests.train.steps_for_tests import EveryCheckpoint, check_equal, run

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

pytestmark = pytest.mark.timeout(180)  # processes start slowly on a machine that is busy

ROWS = 83
LENGTHS = [1 + (7 * n * n + 3 * n) % 23 for n in range(ROWS)]


@pytest.fixture(scope="module", autouse=True)
def _engine():
    """One engine for all: its first worker loads torch for the others."""
    with miniray.init(backend="local", num_workers=3):
        yield


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path, monkeypatch):
    """As everywhere, but the engine keeps running."""
    monkeypatch.chdir(tmp_path)


def load_rows(**options):
    rows = [{"row": n, "length": length} for n, length in enumerate(LENGTHS)]
    options = {"shuffle": True, "seed": 4, **options}
    return DataLoader(
        IndexedDataset(rows, **options),
        40,
        batch_by="tokens",
        length="length",
        bucket_rows=8,
        format="torch",
    )


def count_steps(epoch, ranks=2):
    """Return the batches of each rank in an epoch, from reading them."""
    counts = []
    for rank in range(ranks):
        loader = load_rows(rank=rank, world_size=ranks)
        loader.set_epoch(epoch)
        counts.append(len(list(loader)))
    return counts


class Tokens:
    """Reports its rows. Rank 1 dies before the step ``kill`` of its process, once."""

    scheduler_interval = "step"

    def __init__(self, worker_id, kill=None, shuffle=True, order=4):
        torch.manual_seed(7)
        layers = [nn.Linear(2, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 3)]
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, gamma=0.9)
        self.train_loader = load_rows(shuffle=shuffle, seed=order)
        self.kill = kill if worker_id == 1 else None
        self.steps = 0

    def training_step(self, batch, batch_idx):
        if self.steps == self.kill and not os.path.exists("killed"):
            open("killed", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        self.steps += 1
        rows = batch["row"].float()
        x = torch.stack([rows / ROWS, batch["length"] / 23], 1)
        loss = functional.cross_entropy(self.model(x), batch["row"] % 3)
        return {"loss": loss, "row": rows.mean(), "square": (rows * rows).mean()}


class Groups(Tokens):
    """Has batches of 4 rows, and groups of rows that stay together."""

    def __init__(self, worker_id, kill=None):
        super().__init__(worker_id, kill)
        self.train_loader = load_groups()


def write_groups():
    groups = [group for group in range(ROWS) for _ in range(1 + group * group % 7)][:ROWS]
    table = {"row": range(ROWS), "length": LENGTHS, "group": groups}
    pq.write_table(pa.table({k: [*v] for k, v in table.items()}), "groups.parquet")


def load_groups(**options):
    options |= {"group_by": "group", "shuffle": "global", "seed": 4}
    return DataLoader(ParquetDataset("groups.parquet", **options), 4, format="torch")


def check_rows(history):
    """Check that each epoch has every row once: their number, sum and sum of squares."""
    for record in history:
        assert record["num_samples"] == ROWS
        assert record["row"] == pytest.approx(sum(range(ROWS)) / ROWS)
        assert record["square"] == pytest.approx(sum(n * n for n in range(ROWS)) / ROWS)


# -- an epoch --------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_every_epoch_has_every_row_once(accumulate):
    counts = [max(count_steps(epoch)) for epoch in range(4)]
    assert len(set(counts)) > 1
    options = {"worker": Tokens, "seed": 5, "progress": False, "accumulate": accumulate}
    with DDPTrainer(2, **options) as trainer:
        result = trainer.train(epochs=4)
    check_rows(result.history)
    steps = [-(-count // accumulate) for count in counts]
    assert [r["step"] for r in result.history] == [sum(steps[: n + 1]) for n in range(4)]


def test_groups_have_every_row_once_in_every_epoch():
    """The sizes of shards depend on where groups begin, which differs between epochs."""
    write_groups()
    steps = [len(load_groups(rank=rank, world_size=2)) for rank in range(2)]
    options = {"max_failures": 1, "snapshot_every": 2, "seed": 5, "progress": False}
    with DDPTrainer(2, worker=Groups, **options) as trainer:
        result = trainer.train(epochs=5, kill=4 * max(steps))
    check_rows(result.history)
    totals = [0, *(record["step"] for record in result.history)]
    assert len({stop - start for start, stop in itertools.pairwise(totals)}) > 1
    assert sum(record.get("restarts", 0) for record in result.history) == 1


@pytest.mark.slow
def test_run_ends_at_its_last_step_in_any_epoch():
    """The end is a step that epoch 0 doesn't have, or the last one of an epoch."""
    counts = [max(count_steps(epoch)) for epoch in range(4)]
    longer = next(n for n in range(1, 4) if counts[n] > counts[0])
    total = sum(counts[:longer]) + counts[0]
    step, _, _ = run("middle", {"steps": total}, worker=Tokens)
    assert step == total
    with DDPTrainer(2, worker=Tokens, seed=5, progress=False) as trainer:
        result = trainer.train(steps=sum(counts[:2]))
        assert (trainer.epoch, trainer.state.step_in_epoch) == (2, 0)
    check_rows(result.history)


@pytest.mark.slow
def test_number_of_steps_of_shuffled_epochs_isnt_known():
    class Scheduled(Tokens):
        def configure_scheduler(self, optimizer, total_steps):
            self.lengths = [total_steps]
            return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)

        def read(self):
            return [*self.lengths, self.total_steps]

    for length, options, expected in (
        ({"epochs": 2}, {}, None),
        ({"steps": 5}, {}, 5),
        ({"epochs": 2}, {"shuffle": False}, 2 * max(count_plain_steps())),
    ):
        with DDPTrainer(2, worker=Scheduled, progress=False) as trainer:
            trainer.train(**length, **options)
            assert trainer.call_workers("read") == [[expected] * 2] * 2


def count_plain_steps():
    return [len(load_rows(rank=rank, world_size=2, shuffle=False)) for rank in range(2)]


# -- restart and resume ----------------------------------------------------------------------------


@pytest.mark.parametrize("step", [pytest.param(5, marks=pytest.mark.slow), 36])
def test_restart_continues_inside_the_epoch_with_the_same_bits(step):
    """At step 36, the last one of epoch 1, rank 1 has no more rows."""
    assert (max(count_steps(0)), count_steps(1)) == (18, [19, 18])
    whole = run("whole", {"epochs": 3}, worker=Tokens)
    options = {"max_failures": 1, "snapshot_every": 2, "run_dir": "killed-run"}
    with DDPTrainer(2, worker=Tokens, seed=5, progress=False, **options) as trainer:
        result = trainer.train(epochs=3, kill=step)
        weights, events = trainer.model_weights(), trainer.run.read_events()
    check_rows(result.history)
    check_equal(
        (trainer.state.step, {r["epoch"]: r["loss"] for r in result.history}, weights), whole
    )
    (restart,) = [event for event in events if event["event"] == "ranks_restarted"]
    assert restart["lost_steps"] <= 2
    assert restart["resumed_at_step"] not in (0, max(count_steps(0)))


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
def test_resume_continues_inside_the_epoch_with_the_same_bits(accumulate):
    options = {"worker": Tokens, "accumulate": accumulate}
    whole = run("whole", {"epochs": 3}, **options)
    first = -(-max(count_steps(0)) // accumulate)
    for stop in (first + 3, first + 4, 2 * first - 1):
        options |= {"callbacks": Checkpoint(), "resume": "auto"}
        run("parts", {"steps": stop}, **options)
    check_equal(run("parts", {"epochs": 3}, **options), whole)


@pytest.mark.slow
@pytest.mark.parametrize(("after", "order"), [(1, 4), (3, 4), (2, None), (3, None)])
def test_resume_on_any_ranks_has_every_row_once(after, order):
    """Without a seed, the order is that of the saved run. Rank 1 is lost after the resume."""
    options = {"worker": Tokens, "progress": False, "run_dir": "run"}
    with DDPTrainer(2, callbacks=Checkpoint(), **options) as trainer:
        trainer.train(steps=5, order=order)
    options |= {"callbacks": EveryCheckpoint(every_steps=4), "max_failures": 1}
    with DDPTrainer(after, snapshot_every=2, **options) as trainer:
        result = trainer.train(epochs=2, resume=True, order=order, kill=3)
        assert trainer.failures == (after > 1)
    check_rows(result.history)


@pytest.mark.slow
def test_changed_accumulate_inside_an_epoch_is_an_error():
    options = {"worker": Tokens, "seed": 5, "progress": False, "run_dir": "run"}
    with DDPTrainer(2, callbacks=Checkpoint(), **options) as trainer:
        trainer.train(steps=3)
    with DDPTrainer(2, accumulate=2, **options) as trainer, pytest.raises(DataError):
        trainer.train(epochs=2, resume=True)
