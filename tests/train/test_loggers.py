"""Loggers that write files, the list of loggers of a trainer, and what trainers do with them."""

import csv
import json
import sys
import types

import numpy as np
import pytest
import torch

from miniray.train import (
    BaseTrainer,
    Callback,
    Checkpoint,
    CSVLogger,
    DataParallelTrainer,
    Logger,
    RunDirectory,
    TensorBoardLogger,
)
from miniray.train.run.loggers.base import LoggedRun, NewSteps
from miniray.train.run.loggers.logger_list import LoggerList
from miniray.train.run.loggers.system import SystemMetrics
from tests.train.workers_for_tests import Counter

pytestmark = pytest.mark.usefixtures("_light_workers")


def write(logger, folder, records, **fields):
    """One attempt of a run. A record is ``(step, epoch, metrics)``."""
    logger.open(LoggedRun(folder, "name", **fields))
    logger.log_config({"lr": 0.1, "kwargs": {"dataset": "cifar10", "amp": True}})
    for step, epoch, metrics in records:
        logger.log(step, epoch, metrics)
    logger.close()


def by_epoch(*losses, first=0):
    return [(None, epoch, {"loss": loss}) for epoch, loss in enumerate(losses, start=first)]


def by_step(*steps, epoch=0, loss=1.0):
    return [(step, epoch, {"loss": loss}) for step in steps]


# -- CSV -------------------------------------------------------------------------------------------


def table(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_csv_has_one_row_per_epoch_in_the_run_directory(tmp_path):
    write(CSVLogger(), tmp_path, by_epoch(0.5, np.float64(0.25)))
    assert (tmp_path / "metrics.csv").read_text().split() == ["epoch,loss", "0,0.5", "1,0.25"]


def test_csv_columns_may_appear_and_disappear(tmp_path):
    path = tmp_path / "deep" / "log.csv"
    results = [{"loss": 1}, {"loss": 2, "val": 3}, {"val": float("nan")}, {"ids": [1, "a,b"]}]
    write(CSVLogger(path), tmp_path, [(None, i, result) for i, result in enumerate(results)])
    rows = table(path)
    assert list(rows[0]) == ["epoch", "loss", "val", "ids"]
    assert [list(row.values()) for row in rows] == [
        ["0", "1", "", ""],
        ["1", "2", "3", ""],
        ["2", "", "NaN", ""],
        ["3", "", "", '[1, "a,b"]'],
    ]
    assert [p.name for p in path.parent.iterdir()] == ["log.csv"]


def test_csv_replaces_rows_of_repeated_epochs(tmp_path):
    path = tmp_path / "metrics.csv"
    write(CSVLogger(), tmp_path, by_epoch(1, 2, 3))
    write(CSVLogger(), tmp_path, [(None, 2, {"loss": 20, "acc": 0.5})])
    assert [(r["epoch"], r["loss"], r["acc"]) for r in table(path)] == [
        ("0", "1", ""),
        ("1", "2", ""),
        ("2", "20", "0.5"),
    ]
    write(CSVLogger(), tmp_path, by_epoch(7))
    assert [r["loss"] for r in table(path)] == ["7"]


def test_csv_replaces_rows_when_a_run_goes_back_to_an_earlier_step(tmp_path):
    write(CSVLogger(), tmp_path, [*by_step(10, 20, 30), *by_step(20, 30, 40, loss=2.0)])
    assert [(r["step"], r["loss"]) for r in table(tmp_path / "metrics.csv")] == [
        ("10", "1.0"),
        ("20", "2.0"),
        ("30", "2.0"),
        ("40", "2.0"),
    ]


def test_csv_keeps_records_of_one_step_with_different_metrics(tmp_path):
    records = [*by_step(10, 20), (20, 0, {"val_loss": 3.0})]
    write(CSVLogger(), tmp_path, records)
    rows = table(tmp_path / "metrics.csv")
    assert [(r["step"], r["loss"], r["val_loss"]) for r in rows] == [
        ("10", "1.0", ""),
        ("20", "1.0", ""),
        ("20", "", "3.0"),
    ]


# -- TensorBoard -----------------------------------------------------------------------------------


def read_events(directory):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    read = accumulator.EventAccumulator(str(directory))
    read.Reload()
    return read


def scalars(directory):
    read = read_events(directory)
    tags = read.Tags()["scalars"]
    return {tag: [(e.step, e.value) for e in read.Scalars(tag)] for tag in tags}


def test_tensorboard_reads_scalars_and_configuration(tmp_path):
    pytest.importorskip("tensorboard")
    records = [
        (None, 0, {"epoch": 0, "loss": torch.tensor(0.5), "name": "x", "counts": {"tokens": 8}}),
        (None, 1, {"epoch": 1, "loss": 0.25, "synced": True, "big": 10**400}),
    ]
    write(TensorBoardLogger(), tmp_path, records)
    assert scalars(tmp_path / "tensorboard") == {
        "loss": [(0, 0.5), (1, 0.25)],
        "counts/tokens": [(0, 8.0)],
        "synced": [(1, 1.0)],
        "big": [(1, float("inf"))],
    }
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    read = read_events(tmp_path / "tensorboard")
    stored = read.SummaryMetadata("_hparams_/session_start_info").plugin_data
    assert stored.plugin_name == "hparams"
    hparams = HParamsPluginData.FromString(stored.content).session_start_info.hparams
    assert hparams["lr"].number_value == 0.1
    assert hparams["kwargs.dataset"].string_value == "cifar10"
    assert hparams["kwargs.amp"].bool_value is True


def test_tensorboard_shows_repeated_steps_once(tmp_path):
    pytest.importorskip("tensorboard")
    directory = tmp_path / "events"
    write(TensorBoardLogger(directory), tmp_path, by_step(10, 20, 30))
    # Resumed from step 10; then a rank is lost, and the run goes back to step 20.
    again = [*by_step(20, 30, 40, loss=2.0), *by_step(30, 40, 50, loss=3.0)]
    write(TensorBoardLogger(directory), tmp_path, again)
    assert scalars(directory) == {
        "loss": [(10, 1.0), (20, 2.0), (30, 3.0), (40, 3.0), (50, 3.0)],
    }
    assert read_events(directory).PluginTagToContent("hparams")


# -- tools that can't delete steps -----------------------------------------------------------------


def select(run, *positions):
    steps = NewSteps(run)
    return [steps.select(position, {"loss": 1.0}) for position in positions]


def test_only_steps_above_the_last_one_are_new(tmp_path):
    new, restarted = {"loss": 1.0}, {"loss": 1.0, "restarts": 1}
    run = LoggedRun(tmp_path, "name")
    assert select(run, 10, 20, 10, 20, 30) == [new, new, {}, {}, restarted]
    run = LoggedRun(tmp_path, "name", run_id="a", reached=20, restarts=1)
    assert select(run, 10, 20, 30) == [{}, {}, restarted]


def test_a_step_may_have_several_records_with_different_metrics(tmp_path):
    steps = NewSteps(LoggedRun(tmp_path, "name"))
    assert steps.select(10, {"loss": 1.0, "lr": 0.1}) == {"loss": 1.0, "lr": 0.1}
    assert steps.select(10, {"loss": 0.9, "val_loss": 2.0}) == {"val_loss": 2.0}
    assert steps.select(10, {"val_loss": 2.0}) == {}


def test_restarts_of_ranks_are_added_up(tmp_path):
    steps = NewSteps(LoggedRun(tmp_path, "name", restarts=1))
    assert steps.select(0, {"restarts": 2}) == {"restarts": 3}
    assert steps.select(1, {"loss": 1.0}) == {"loss": 1.0, "restarts": 3}


def test_a_restart_that_repeats_steps_counts_once(tmp_path):
    """The record of the epoch has the restarts of ranks, also of those that repeated no step."""
    steps = NewSteps(LoggedRun(tmp_path, "name"))
    assert steps.select(20, {"loss": 1.0}) == {"loss": 1.0}
    assert steps.select(15, {"loss": 1.0}) == {}
    assert steps.select(30, {"loss": 1.0}) == {"loss": 1.0, "restarts": 1}
    end = {"epoch_loss": 1.0, "restarts": 2}
    assert steps.select(30, end) == end


# -- system metrics --------------------------------------------------------------------------------


def test_system_metrics_are_sampled_once_per_second():
    system = SystemMetrics()
    found = system.sample()
    assert 0 <= found["system/cpu_percent"] <= 100
    assert 0 < found["system/memory_percent"] <= 100
    assert found["system/memory_gb"] > 0
    assert system.sample() == {}


class FakeNVML(types.ModuleType):
    """Two GPUs. The second one doesn't report utilization."""

    class NVMLError(Exception):
        pass

    def __init__(self, has_driver=True):
        super().__init__("pynvml")
        self.has_driver = has_driver

    def nvmlInit(self):
        if not self.has_driver:
            raise self.NVMLError

    def nvmlDeviceGetCount(self):
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetUtilizationRates(self, index):
        if index == 1:
            raise self.NVMLError
        return types.SimpleNamespace(gpu=75)

    def nvmlDeviceGetMemoryInfo(self, index):
        return types.SimpleNamespace(used=2_000_000_000)


def test_system_metrics_include_gpus(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNVML())
    found = {k: v for k, v in SystemMetrics().sample().items() if "gpu" in k}
    assert found == {"system/gpu0_percent": 75.0, "system/gpu0_memory_gb": 2.0}
    monkeypatch.setitem(sys.modules, "pynvml", FakeNVML(has_driver=False))
    assert not [name for name in SystemMetrics().sample() if "gpu" in name]


# -- the list --------------------------------------------------------------------------------------


class Recorder(Logger):
    """Records its calls, and raises in one of its methods. It can't be a key of a dict."""

    __hash__ = None

    def __init__(self, fails=None, run_id=None):
        self.calls, self.fails, self.run_id = [], fails, run_id
        self.runs = []

    def _record(self, method, *arguments):
        self.calls.append((method, *arguments))
        if method == self.fails:
            raise OSError(f"no {method}")

    def open(self, run):
        self.runs.append(run)
        self._record("open")
        return self.run_id

    def log_config(self, config):
        self._record("log_config", config)

    def log(self, step, epoch, metrics):
        self._record("log", step, epoch, metrics["loss"])

    def log_artifact(self, path):
        self._record("log_artifact", path.name)

    def close(self):
        self._record("close")

    @property
    def methods(self):
        return [call[0] for call in self.calls]


def make(tmp_path, loggers, trainer=BaseTrainer, **options):
    options = {"run_dir": tmp_path / "run", "progress": False, "backend": "inline", **options}
    return trainer(2, worker=Counter, loggers=loggers, **options)


def train(tmp_path, loggers, epochs=2, resume=False, **options):
    with make(tmp_path, loggers, **options) as trainer:
        return trainer.train(epochs, resume=resume, lr=0.5)


def events(result, kind):
    return [e for e in RunDirectory(result.run_dir).read_events() if e["event"] == kind]


def test_a_trainer_calls_its_loggers_in_order(tmp_path):
    recorder = Recorder()
    result = train(tmp_path, recorder)
    assert recorder.methods == ["open", "log_config", "log", "log", "log_artifact", "close"]
    config = recorder.calls[1][1]
    assert (config["trainer"], config["num_workers"]) == ("BaseTrainer", 2)
    assert config["kwargs"] == {"lr": 0.5}
    assert recorder.calls[2:4] == [("log", None, 0, 1.5), ("log", None, 1, 1.0)]
    assert recorder.calls[4] == ("log_artifact", "report.html")
    assert (recorder.runs[0].path, recorder.runs[0].state) == (result.run_dir, "finished")
    assert "system/cpu_percent" not in result.history[0]
    assert RunDirectory(result.run_dir).read_metrics() == result.history


def test_records_with_a_step_are_logged_at_it(tmp_path):
    run = RunDirectory.open(tmp_path / "run")
    run.write_run({"num_workers": 1})
    recorder = Recorder()
    loggers = LoggerList([recorder])
    loggers.open(run, {})
    for fields in ({"step": 10}, {"step": 20}, {}, {"step": 30}):
        loggers.log({"epoch": 0, "loss": 1.0, **fields})
    loggers.close()
    logged = [call[1] for call in recorder.calls if call[0] == "log"]
    assert logged == [10, 20, 20, 30]  # the third one follows step 20, such as an evaluation


def test_the_mean_of_steps_of_workers_is_a_metric(tmp_path):
    class Stepped(BaseTrainer):
        def on_epoch_end(self, epoch, result, **kwargs):
            result["step"] = 100.0

    recorder = Recorder()
    train(tmp_path, [recorder, "csv"], trainer=Stepped)
    assert recorder.calls[2:4] == [("log", None, 0, 1.5), ("log", None, 1, 1.0)]
    assert [row["step"] for row in table(tmp_path / "run" / "metrics.csv")] == ["100.0"] * 2


@pytest.mark.parametrize("method", ["open", "log_config", "log", "log_artifact", "close"])
def test_a_failing_logger_is_disabled_and_the_run_continues(tmp_path, method):
    failing, healthy = Recorder(fails=method), Recorder()
    with pytest.warns(UserWarning, match=rf"Recorder\.{method}\(\)") as caught:
        result = train(tmp_path, [failing, healthy], epochs=3)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    (event,) = events(result, "logger_failed")
    assert (event["logger"], event["method"]) == ("Recorder", method)
    assert event["error"] == f"OSError: no {method}"
    assert failing.methods.count(method) == 1
    assert failing.methods[-1] == ("open" if method == "open" else "close")
    assert healthy.methods.count("log") == 3
    assert (result.epochs, RunDirectory(result.run_dir).status()) == (3, "finished")


def test_loggers_are_closed_after_a_failure(tmp_path):
    class Failing(BaseTrainer):
        def on_epoch_end(self, epoch, result, **kwargs):
            raise KeyError("mine")

    recorder = Recorder()
    with pytest.raises(KeyError, match="mine"):
        train(tmp_path, recorder, trainer=Failing)
    assert recorder.methods == ["open", "log_config", "log", "log_artifact", "close"]
    assert recorder.runs[0].state == "failed"


def test_a_resumed_run_has_the_same_id_and_knows_what_was_reached(tmp_path):
    class Interrupted(Callback):
        def on_epoch_end(self, trainer, epoch, result, **kwargs):
            if epoch == 2:
                raise KeyboardInterrupt

    first, other = Recorder(run_id="id-1"), Recorder(run_id="id-2")
    callbacks = [Checkpoint(every=2), Interrupted()]
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, [first, other], epochs=3, callbacks=callbacks)
    ids = json.loads((tmp_path / "run" / "loggers.json").read_text())
    assert ids == {"Recorder": "id-1", "Recorder-2": "id-2"}
    again, new = Recorder(run_id="id-1"), CSVLogger()
    train(tmp_path, [again, new], epochs=5, resume=True)
    run = again.runs[0]
    assert (run.run_id, run.reached, run.restarts) == ("id-1", 2, 1)
    assert [call[2] for call in again.calls if call[0] == "log"] == [2, 3, 4]
    assert first.runs[0].run_id is None
    assert first.runs[0].state == "interrupted"


def test_train_may_be_called_again(tmp_path):
    recorder = Recorder(run_id="one")
    with make(tmp_path, [recorder, "csv"]) as trainer:
        trainer.train(1)
        trainer.train(1)
    assert [(run.run_id, run.reached, run.restarts) for run in recorder.runs] == [
        (None, None, 0),
        ("one", 0, 0),
    ]
    assert [row["epoch"] for row in table(tmp_path / "run" / "metrics.csv")] == ["0", "1"]


def test_a_full_disk_does_not_hide_the_failing_logger(tmp_path, monkeypatch):
    run = RunDirectory.open(tmp_path / "run")
    run.write_run({"num_workers": 1})
    loggers = LoggerList([Recorder(fails="log")])
    loggers.open(run, {})

    def fail(event):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run, "append_event", fail)
    with pytest.warns(UserWarning, match=r"Recorder\.log\(\)"):
        loggers.log({"epoch": 0, "loss": 1.0})
    loggers.close()


# -- the option ------------------------------------------------------------------------------------


@pytest.mark.parametrize("trainer", [BaseTrainer, DataParallelTrainer])
def test_unknown_loggers_raise_in_the_constructor(trainer, golden):
    messages = []
    for name in ("tensorbord", "tb", "jsonl", "xyz"):
        with pytest.raises(ValueError) as caught:
            trainer(worker=Counter, loggers=["csv", name])
        messages.append(str(caught.value))
    for wrong in (CSVLogger, Callback(), 3):
        with pytest.raises(TypeError) as caught:
            trainer(worker=Counter, loggers=[wrong])
        messages.append(str(caught.value).partition(" at 0x")[0])
    golden("unknown_loggers.txt", "\n".join(messages) + "\n")


@pytest.mark.parametrize(
    ("name", "package"), [("tensorboard", "tensorboard"), ("wandb", "wandb"), ("mlflow", "mlflow")]
)
def test_a_missing_package_raises_in_the_constructor(monkeypatch, name, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError) as caught:
        BaseTrainer(worker=Counter, loggers=[name])
    assert f"pip install 'miniray[{name}]'" in str(caught.value)


def test_loggers_in_callbacks_are_deprecated(tmp_path):
    with pytest.warns(DeprecationWarning, match=r"loggers=\[CSVLogger\(\.\.\.\)\]") as caught:
        trainer = make(tmp_path, "csv", callbacks=[CSVLogger(tmp_path / "log.csv"), Checkpoint()])
    assert caught[0].filename == __file__
    assert [type(callback) for callback in trainer.callbacks] == [Checkpoint]
    with trainer:
        trainer.train(2)
    assert table(tmp_path / "log.csv") == table(tmp_path / "run" / "metrics.csv")
    assert [row["loss"] for row in table(tmp_path / "log.csv")] == ["1.5", "1.0"]


def test_names_of_version_0_1():
    from miniray.train import TensorBoard, callbacks

    assert callbacks.CSVLogger is CSVLogger
    assert callbacks.TensorBoard is TensorBoard is TensorBoardLogger
