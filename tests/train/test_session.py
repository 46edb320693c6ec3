"""Engine leases, and the report at the end of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

import miniray
from miniray.runs import report_writer
from miniray.train import BaseTrainer
from miniray.train.run.session import EngineLease


class Worker:
    def train_epoch(self, epoch):
        return {"loss": 1.0}


def train(run_dir):
    with BaseTrainer(
        1, worker=Worker, run_dir=run_dir, progress=False, backend="inline"
    ) as trainer:
        trainer.train(epochs=1)


def test_last_lease_shuts_down_the_engine_that_the_first_started():
    first, second = EngineLease("inline"), EngineLease(None)
    assert not first.release()
    assert miniray.is_initialized()
    assert second.release()
    assert not miniray.is_initialized()


def test_engine_of_the_user_keeps_running():
    miniray.init(backend="inline")
    try:
        assert not EngineLease(None).release()
        assert miniray.is_initialized()
    finally:
        miniray.shutdown()


def test_lease_of_an_engine_that_is_gone_shuts_nothing_down():
    lease = EngineLease("inline")
    miniray.shutdown()
    miniray.init(backend="inline")
    try:
        assert not lease.release()
        assert miniray.is_initialized()
    finally:
        miniray.shutdown()


def test_different_engine_raises():
    miniray.init(backend="inline")
    try:
        with pytest.raises(RuntimeError, match=r"'local'.*'inline'"):
            EngineLease("local")
    finally:
        miniray.shutdown()


def test_registered_writer_writes_the_report(tmp_path, monkeypatch):
    written = []

    def write(run_dir, path=None):
        written.append(run_dir)
        return Path(run_dir) / "report.txt"

    monkeypatch.setattr(report_writer, "_writer", None)
    report_writer.register_report_writer(write)
    train(tmp_path / "run")
    assert written == [tmp_path / "run"]


def test_report_that_cannot_be_written_does_not_fail_the_run(tmp_path, monkeypatch, capsys):
    def write(run_dir, path=None):
        raise OSError("disk full")

    monkeypatch.setattr(report_writer, "_writer", write)
    train(tmp_path / "run")
    assert "disk full" in capsys.readouterr().err
