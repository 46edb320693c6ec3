"""Weights & Biases without a server, and MLflow with a local directory: read what they stored."""

import json
import math
import struct
import sys
import time

import pytest

from miniray.train import BaseTrainer, Callback, Checkpoint, MLflowLogger, RunDirectory, WandbLogger
from miniray.train.run.loggers.base import LoggedRun
from tests.train.workers_for_tests import Counter

pytestmark = pytest.mark.usefixtures("_light_workers")


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    """No server, and nothing that these tools report to their makers."""
    for name in ("WANDB_MODE", "WANDB_PROJECT", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")


class Interrupted(Callback):
    def on_epoch_end(self, trainer, epoch, result, **kwargs):
        if epoch == 2:
            raise KeyboardInterrupt


def train_twice(tmp_path, make_logger):
    """Interrupt a run in epoch 2, after the checkpoint of epoch 1. Resume it up to epoch 4."""
    options = {"run_dir": tmp_path / "run", "progress": False, "backend": "inline"}
    callbacks = [Checkpoint(every=2), Interrupted()]
    trainer = BaseTrainer(2, worker=Counter, callbacks=callbacks, loggers=make_logger(), **options)
    with trainer, pytest.raises(KeyboardInterrupt):
        trainer.train(3, lr=0.5)
    with BaseTrainer(2, worker=Counter, loggers=make_logger(), **options) as trainer:
        return trainer.train(5, resume=True, lr=0.5)


# -- Weights & Biases ------------------------------------------------------------------------------


def read_finished(path, timeout=20):
    """Return the records of a run that has finished. W&B writes the last ones a little later."""
    deadline = time.monotonic() + timeout
    while True:
        records = read_wandb(path)
        if any(record.HasField("exit") for record in records):
            return records
        assert time.monotonic() < deadline, f"{path} has {len(records)} records and no end"
        time.sleep(0.02)


def read_wandb(path):
    """Return the records of a ``.wandb`` file: blocks of 32 KB, as in LevelDB's logs."""
    from wandb.proto import wandb_internal_pb2

    data, records, whole = path.read_bytes(), [], b""
    at = 7  # the file's own header
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        if kind == 0:
            break
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # the whole record, or its last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            records.append(record)
            whole = b""
    return records


def history(records):
    rows = []
    for record in records:
        if record.HasField("history"):
            items = record.history.item
            row = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items}
            rows.append({**row, "_step": record.history.step.num or row.get("_step", 0)})
    return rows


def test_wandb_offline(tmp_path):
    pytest.importorskip("wandb")
    result = train_twice(tmp_path, lambda: WandbLogger("demo", mode="offline", tags=["a"]))
    files = sorted((result.run_dir / "wandb").glob("offline-run-*/*.wandb"))  # by time
    first, second = map(read_finished, files)
    starts = [next(r.run for r in records if r.HasField("run")) for records in (first, second)]
    ids = json.loads((result.run_dir / "loggers.json").read_text())
    assert {start.run_id for start in starts} == {ids["WandbLogger"]}
    assert (starts[0].project, starts[0].display_name, list(starts[0].tags)) == (
        "demo",
        "run",
        ["a"],
    )
    assert [(row["_step"], row["loss"]) for row in history(first)] == [
        (0, 1.5),
        (1, 1.0),
        (2, pytest.approx(5 / 6)),
    ]
    # Epoch 2 is repeated, and isn't sent again.
    rows = [row for row in history(second) if "loss" in row]
    assert [(row["_step"], row["restarts"]) for row in rows] == [(3, 1), (4, 1)]
    assert history(first)[0]["system/memory_gb"] > 0
    sent = {u.key: json.loads(u.value_json) for r in first for u in r.config.update}
    sent |= {u.key: json.loads(u.value_json) for r in first for u in r.run.config.update}
    assert sent["num_workers"] == 2
    assert sent["kwargs"] == {"lr": 0.5}
    artifacts = [r.request.log_artifact.artifact for r in second]
    artifacts += [r.artifact for r in second]
    assert "report" in {artifact.type for artifact in artifacts}
    exits = [next(r.exit.exit_code for r in rs if r.HasField("exit")) for rs in (first, second)]
    assert exits == [1, 0]


def test_wandb_options_are_checked_in_the_constructor():
    pytest.importorskip("wandb")
    with pytest.raises(TypeError, match=r"'entitty'.*'entity'"):
        WandbLogger("demo", entitty="x")


def test_a_wandb_run_of_the_script_is_used_and_stays_open(tmp_path):
    wandb = pytest.importorskip("wandb")
    with wandb.init(mode="offline", dir=tmp_path, id="mine") as run:
        options = {"progress": False, "backend": "inline", "loggers": "wandb"}
        with BaseTrainer(1, worker=Counter, run_dir=tmp_path / "run", **options) as trainer:
            trainer.train(2)
        assert wandb.run is run
        assert (run.summary["loss"], run.step) == (1.0, 1)  # the last step may get more metrics


# -- MLflow ----------------------------------------------------------------------------------------


def test_mlflow_in_a_local_directory(tmp_path):
    tracking = pytest.importorskip("mlflow.tracking")
    result = train_twice(tmp_path, lambda: "mlflow")
    client = tracking.MlflowClient((tmp_path / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("miniray")
    (run,) = client.search_runs([experiment.experiment_id])
    ids = json.loads((result.run_dir / "loggers.json").read_text())
    assert run.info.run_id == ids["MLflowLogger"]
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    points = client.get_metric_history(run.info.run_id, "loss")
    assert [(point.step, point.value) for point in points] == [
        (record["epoch"], record["loss"]) for record in result.history
    ]
    restarts = client.get_metric_history(run.info.run_id, "restarts")
    assert [(point.step, point.value) for point in restarts] == [(3, 1), (4, 1)]
    assert (run.data.params["num_workers"], run.data.params["kwargs.lr"]) == ("2", "0.5")
    assert "system/cpu_percent" in run.data.metrics
    assert [file.path for file in client.list_artifacts(run.info.run_id)] == ["report.html"]


def test_mlflow_accepts_any_names_and_numbers(tmp_path):
    tracking = pytest.importorskip("mlflow.tracking")
    logger = MLflowLogger("demo", tmp_path / "store")
    run_id = logger.open(LoggedRun(tmp_path, "odd"))
    logger.log_config({"betas (Adam)": [0.9, 0.999], "none": None, "text": "x" * 10_000})
    logger.log(10, 0, {"mAP@50": 0.5, "loss": float("nan"), "big": 10**400, "name": "x"})
    logger.close()
    data = tracking.MlflowClient((tmp_path / "store").as_uri()).get_run(run_id).data
    assert (data.metrics["mAP_50"], data.metrics["big"]) == (0.5, math.inf)
    assert math.isnan(data.metrics["loss"])
    assert data.params["betas _Adam_"] == "[0.9, 0.999]"
    assert sorted(data.params) == ["betas _Adam_", "text"]


def test_mlflow_needs_sqlalchemy_for_a_database(monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.setitem(sys.modules, "sqlalchemy", None)
    with pytest.raises(ImportError, match="pip install mlflow"):
        MLflowLogger(tracking_uri="sqlite:///runs.db")


class Lost:
    """Metrics in the background that don't reach the server."""

    def wait(self):
        raise ConnectionError("no server")


def test_mlflow_errors_in_the_background_disable_the_logger(tmp_path, monkeypatch):
    tracking = pytest.importorskip("mlflow.tracking")
    monkeypatch.setattr(tracking.MlflowClient, "log_batch", lambda *_, **__: Lost())
    options = {"progress": False, "backend": "inline", "loggers": "mlflow"}
    trainer = BaseTrainer(1, worker=Counter, run_dir=tmp_path / "run", **options)
    with trainer, pytest.warns(UserWarning, match=r"MLflowLogger\.close\(\)"):
        result = trainer.train(2)
    assert (result.epochs, RunDirectory(result.run_dir).status()) == (2, "finished")


def test_mlflow_without_its_server(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    logger = MLflowLogger("demo", tracking_uri="http://127.0.0.1:9")
    options = {"progress": False, "backend": "inline", "loggers": [logger]}
    trainer = BaseTrainer(1, worker=Counter, run_dir=tmp_path / "run", **options)
    with trainer, pytest.warns(UserWarning, match=r"MLflowLogger\.open\(\)"):
        result = trainer.train(2)
    events = RunDirectory(result.run_dir).read_events()
    assert [e["method"] for e in events if e["event"] == "logger_failed"] == ["open"]
    assert result.epochs == 2
