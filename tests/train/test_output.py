"""Each line of a worker's output starts with ``[Rank r/N]``, once, whatever wrote it."""

import os
import sys

import pytest

import miniray
from miniray.train import DataParallelTrainer, DDPTrainer

pytest.importorskip("torch")

from tests.train.ddp_for_tests import Looper, Stepper


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


class Printing:
    def __init__(self, worker_id):
        super().__init__(worker_id)
        print("printed")
        print("two\nlines", file=sys.stderr)
        os.write(1, b"written by a library\n")


class PrintingStepper(Printing, Stepper):
    pass


class PrintingLooper(Printing, Looper):
    pass


@pytest.mark.parametrize(
    ("trainer", "worker"), [(DDPTrainer, PrintingStepper), (DataParallelTrainer, PrintingLooper)]
)
def test_each_line_of_a_worker_has_one_label(trainer, worker, capfd):
    with miniray.init(backend="local", num_workers=2), trainer(2, worker=worker) as running:
        running.train(epochs=1)
        folder = running.run.path / "ranks"
        logs = [(folder / f"{rank}.log").read_text().splitlines() for rank in range(2)]
    shown = "".join(capfd.readouterr()).splitlines()
    for rank, log in enumerate(logs):
        label = f"[Rank {rank}/2]"
        texts = ["printed", "two", "lines"]
        assert sorted(log) == sorted(f"{label} {text}" for text in texts)
        lines = [line for line in shown if label in line]
        assert sorted(lines) == sorted(f"{label} {t}" for t in [*texts, "written by a library"])
