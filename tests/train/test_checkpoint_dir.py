"""Copies of checkpoints in ``checkpoint_dir`` are complete or absent, and runs resume from them."""

import json
import shutil

import pytest

from miniray.errors import CheckpointError
from miniray.train import CheckpointStore, DataParallelTrainer
from miniray.train.callbacks import Checkpoint
from miniray.train.run.checkpoints.storage import FsspecStorage

fsspec = pytest.importorskip("fsspec")

URL = "memory://bucket/checkpoints"


class Worker:
    def __init__(self):
        self.weights = [0.0]

    def train_epoch(self, epoch):
        self.weights = [self.weights[0] * 0.5 + epoch + 1]
        return {"loss": 1.0 / (epoch + 1)}

    def get_weights(self):
        return self.weights

    def set_weights(self, weights):
        self.weights = [float(weights[0])]


@pytest.fixture(autouse=True)
def _empty_memory():
    fsspec.filesystem("memory").store.clear()


class Trainer(DataParallelTrainer):
    """Calls ``hook`` before each epoch, when the checkpoint of the last one is written."""

    def on_epoch_start(self, epoch, **kwargs):
        self.checkpointer.wait()
        self.hook(epoch)


def train(url, epochs, name="run", on_epoch_start=lambda epoch: None, **options):
    settings = {"backend": "inline", "progress": False, "callbacks": Checkpoint(), **options}
    with Trainer(1, worker=Worker, checkpoint_dir=url, name=name, **settings) as trainer:
        trainer.hook = on_epoch_start
        trainer.train(epochs=epochs)
        return trainer.model_weights(), trainer


def list_names(url):
    return [copy.path.name for copy in FsspecStorage(url).list()]


def read_events(name="run"):
    lines = open(f"runs/{name}/events.jsonl").read().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("url", [URL, "elsewhere/checkpoints"])
def test_run_continues_from_copies_on_a_machine_without_its_directory(url):
    train(url, 5, keep_last=2)
    assert list_names(url) == ["epoch-00000003", "epoch-00000004"]
    shutil.rmtree("runs")
    resumed, trainer = train(url, 7, resume="auto", keep_last=2)
    assert (trainer.epoch, len(trainer.history)) == (7, 7)
    assert [r["epoch"] for r in trainer.run.read_metrics()] == list(range(7))
    whole, _ = train(None, 7, name="whole")
    assert resumed == whole
    assert list_names(url) == ["epoch-00000005", "epoch-00000006"]


def test_auto_starts_without_checkpoints():
    _, trainer = train(URL, 2, name=None, resume="auto")
    assert trainer.epoch == 2
    assert list_names(URL) == ["epoch-00000000", "epoch-00000001"]


def test_new_run_does_not_mix_with_checkpoints_of_a_different_one():
    train(URL, 1)
    with pytest.raises(FileExistsError, match="resume=True"):
        train(URL, 1, name="other")
    assert list_names(URL) == ["epoch-00000000"]


def test_best_copy_is_kept():
    train(URL, 5, keep_last=1, keep_best=("loss", "max"))
    assert list_names(URL) == ["epoch-00000000", "epoch-00000004"]


class Unreachable(FsspecStorage):
    """Fails to write the file ``fails_at``."""

    fails_at = "manifest.json"

    def __init__(self, url):
        super().__init__(url)
        system, put_file = self._system, self._system.put_file

        class System:
            def __getattr__(self, name):
                return getattr(system, name)

            def put_file(_, source, target, **options):
                if target.endswith(str(self.fails_at)):
                    raise OSError("connection refused")
                put_file(source, target, **options)

        self._system = System()


@pytest.mark.parametrize("file", ["state.json", "manifest.json"])
def test_failed_copy_warns_once_and_keeps_the_copy_before(monkeypatch, file):
    train(URL, 1)
    monkeypatch.setattr("miniray.train.run.checkpointer.FsspecStorage", Unreachable)
    monkeypatch.setattr(Unreachable, "fails_at", file)
    with pytest.warns(UserWarning, match="connection refused") as warned:
        _, trainer = train(URL, 4, resume=True)
    assert trainer.epoch == 4
    assert len([w for w in warned if "connection refused" in str(w.message)]) == 1
    assert list_names(URL) == ["epoch-00000000"]
    failed = [e for e in read_events() if e["event"] == "checkpoint_copy_failed"]
    assert len(failed) == 3
    monkeypatch.setattr(Unreachable, "fails_at", None)
    resumed, _ = train(URL, 5, resume=True)  # the run directory has the newest
    whole, _ = train(None, 5, name="whole")
    assert resumed == whole
    assert list_names(URL) == ["epoch-00000000", "epoch-00000004"]
    assert len(fsspec.filesystem("memory").ls("/bucket/checkpoints")) == 2  # nothing incomplete


def test_damaged_copy_is_named_and_the_one_before_it_used():
    train(URL, 3)
    shutil.rmtree("runs")
    path = "/bucket/checkpoints/epoch-00000002/state.json"
    fsspec.filesystem("memory").pipe_file(path, b"{}")
    with pytest.warns(UserWarning, match="epoch-00000002"):
        _, trainer = train(URL, 3, resume=True)
    assert [r["epoch"] for r in trainer.history] == [0, 1, 2]
    assert read_events()[0]["event"] == "started_from"


def test_storage_that_cannot_be_read_ends_the_start(monkeypatch):
    def fail(self):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(FsspecStorage, "list", fail)
    with pytest.raises(CheckpointError, match="no route to host") as caught:
        train(URL, 1, resume="auto")
    assert caught.value.entry == URL


def test_copy_of_the_same_name_is_replaced(tmp_path):
    for value in (1, 2):
        store = CheckpointStore(tmp_path / str(value), storage=FsspecStorage(URL))
        store.save(0, {"value": value})
    (copy,) = FsspecStorage(URL).list()
    assert copy.serial == 2
    path = FsspecStorage(URL).read(copy, tmp_path)
    assert CheckpointStore(tmp_path).load(path)[1] == {"value": 2}
