"""Tracebacks show the frames of the user, and the rank or worker, file and line."""

import os
import random
import re
import subprocess
import sys
import textwrap
import traceback

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import miniray
from miniray import tracebacks
from miniray.errors import TaskError
from miniray.train import DataParallelTrainer, DDPTrainer

MINIRAY = os.path.dirname(miniray.__file__)
TORCH = os.path.dirname(torch.__file__)


@pytest.fixture(autouse=True)
def _without_debug(monkeypatch):
    monkeypatch.delenv("MINIRAY_DEBUG", raising=False)


def normalize(text):
    """Return a formatted traceback without what depends on the machine and the Python version."""
    lines = [line for line in text.splitlines() if not re.fullmatch(r"[ |]*[~^]+", line)]
    text = "\n".join(line.rstrip() for line in lines) + "\n"
    text = re.sub(r'File "[^"]*/', 'File "', text)
    text = re.sub(r"(pid|line) \d+", r"\1 N", text)
    return re.sub(r"\d+ frames? of", "N frames of", text)


def format_exception(error):
    return drop_public_frame("".join(traceback.format_exception(error)))


def drop_public_frame(text):
    """Before Python 3.11, the frame of the public function can't be removed from a traceback."""
    if sys.version_info >= (3, 11):
        return text
    return re.sub(rf'  File "{MINIRAY}[^\n]*\n    [^\n]*\n', "", text, count=1)


def train(trainer):
    with trainer:
        trainer.train(epochs=1)


class Worker:
    def __init__(self, worker_id):
        self.worker_id = worker_id

    def train_epoch(self, epoch):
        if self.worker_id == 1:
            raise ValueError("wrong")
        return {"loss": 0.0}

    def evaluate(self):
        raise KeyError("accuracy")

    def get_weights(self):
        return [torch.zeros(1)]

    def set_weights(self, weights):
        pass


class RankWorker:
    def __init__(self, worker_id):
        self.worker_id = worker_id
        self.model = torch.nn.Linear(3, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.train_loader = DataLoader(TensorDataset(torch.ones(8, 3)), batch_size=2)

    def training_step(self, batch, batch_idx):
        (x,) = batch
        return self.model(x[:, self.worker_id :]).mean()


@miniray.remote
def divide(a, b):
    return a / b


@miniray.remote
def chain():
    try:
        {}["key"]
    except KeyError as error:
        raise RuntimeError("first line\nsecond line") from error


@miniray.remote
def nested():
    return miniray.get(divide.remote(1, 0))


@miniray.remote
def many():
    raise ExceptionGroup("two", [ValueError("a"), TypeError("b")])  # noqa: F821


@pytest.fixture(scope="module")
def _engine():
    with miniray.init(num_cpus=4):
        yield


def raised_by(function):
    with pytest.raises(TaskError) as caught:
        miniray.get(function.remote())
    return caught.value


FRAMES = f"""\
Traceback (most recent call last):
  File "{MINIRAY}/core/local/executors.py", line 79, in run
    value = function(*args, **kwargs)
  File "/home/me/train.py", line 5, in training_step
    return self.model(x)
  File "/env/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1, in _call_impl
    return forward_call(*args, **kwargs)
  [Previous line repeated 7 more times]
  File "/env/lib/python3.11/site-packages/mine/model.py", line 3, in forward
    return self.encode(x,
                       y)
  File "/env/lib/python3.11/json/decoder.py", line 2, in decode
    raise ValueError
ValueError: the text
  File "x.txt", line 3
    in a message
"""
NO_USER_FRAMES = f"""\
Traceback (most recent call last):
  File "{MINIRAY}/core/local/executors.py", line 79, in run
    value = function(*args, **kwargs)
  File "{MINIRAY}/train/ddp/loop.py", line 79, in run
    raise TypeError
TypeError: wrong
"""


def test_fold_keeps_frames_of_the_user_and_other_packages(golden):
    golden("traceback_folded.txt", normalize(tracebacks.fold(FRAMES)))


def test_fold_without_user_frames_keeps_the_innermost(golden):
    golden("traceback_miniray_only.txt", normalize(tracebacks.fold(NO_USER_FRAMES)))


def test_location_is_the_innermost_frame_of_the_user():
    location = 'File "/env/lib/python3.11/site-packages/mine/model.py", line 3, in forward'
    assert tracebacks.find_location(FRAMES) == location
    last = f'File "{MINIRAY}/train/ddp/loop.py", line 79, in run'
    assert tracebacks.find_location(NO_USER_FRAMES) == last
    assert tracebacks.find_location("ValueError: no frames") == ""


@pytest.mark.parametrize(
    ("file", "library"),
    [
        (f"{MINIRAY}/core/session.py", "miniray"),
        ("/far/lib/python3.12/site-packages/miniray/core/session.py", "miniray"),
        (f"{TORCH}/nn/modules/module.py", "torch"),
        ("/usr/lib/python3/dist-packages/torch/_tensor.py", "torch"),
        ("python/ray/_raylet.pyx", "ray"),
        (os.__file__, "Python"),
        ("<frozen importlib._bootstrap>", "Python"),
        ("/env/lib/python3.11/site-packages/mine/model.py", None),
        ("/home/me/torch/train.py", None),
        ("<stdin>", None),
    ],
)
def test_library_of_a_file(file, library):
    assert tracebacks.find_library(file) == library


@pytest.mark.usefixtures("_engine")
@pytest.mark.parametrize("function", [chain, nested], ids=["chain", "nested"])
def test_chained_and_nested_exceptions(function, golden):
    error = raised_by(function)
    golden(f"traceback_{function.__name__}.txt", normalize(format_exception(error)))


@pytest.mark.usefixtures("_engine")
@pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups are new in Python 3.11")
def test_exception_group(golden):
    error = raised_by(many)
    assert [type(e) for e in error.exceptions] == [ValueError, TypeError]
    golden("traceback_group.txt", normalize(str(error)))


@pytest.mark.usefixtures("_engine")
def test_caught_exception_has_type_cause_and_full_remote_traceback():
    error = raised_by(nested)
    assert isinstance(error, ZeroDivisionError)
    assert isinstance(error.cause, ZeroDivisionError)
    assert error.remote_traceback.count(f'File "{MINIRAY}') == 2
    assert "hidden" not in error.remote_traceback
    with pytest.raises(KeyError) as caught:
        raise KeyError("mine") from error
    assert caught.value.__cause__ is error
    assert f'File "{MINIRAY}' not in format_exception(caught.value)


@pytest.mark.usefixtures("_engine")
def test_await_hides_frames():
    import asyncio

    async def wait():
        await divide.remote(1, 0)

    with pytest.raises(ZeroDivisionError) as caught:
        asyncio.run(wait())
    assert f'File "{MINIRAY}' not in format_exception(caught.value)


def test_task_in_a_script(tmp_path, golden):
    """Folding works without an exception hook."""
    path = tmp_path / "script.py"
    path.write_text(
        textwrap.dedent(
            """
            import sys
            import miniray

            @miniray.remote
            def half(x):
                return x / 0

            miniray.init(num_cpus=1)
            assert sys.excepthook is sys.__excepthook__
            miniray.get(half.remote(1))
            """
        )
    )
    counts = []
    for debug in ("", "1"):
        environment = {**os.environ, "MINIRAY_DEBUG": debug}
        done = subprocess.run(
            [sys.executable, str(path)], capture_output=True, text=True, env=environment, timeout=50
        )
        assert done.returncode == 1
        counts.append(len(done.stderr.splitlines()))
        if not debug:
            golden("traceback_script.txt", normalize(drop_public_frame(done.stderr)))
    assert counts[0] < counts[1]


def test_data_parallel_worker(tmp_path, golden):
    trainer = DataParallelTrainer(2, worker=Worker, run_dir=tmp_path / "run", progress=False)
    with pytest.raises(ValueError, match="wrong") as caught:
        train(trainer)
    error = caught.value
    assert (error.worker, error.epoch) == (1, 0)
    golden("traceback_data_parallel.txt", normalize(format_exception(error)))


def test_evaluate_hides_frames(tmp_path):
    trainer = DataParallelTrainer(1, worker=Worker, run_dir=tmp_path / "run", progress=False)
    with trainer:
        trainer.train(epochs=1)
        with pytest.raises(KeyError) as caught:
            trainer.evaluate()
    assert f'File "{MINIRAY}' not in format_exception(caught.value)


def test_ddp_rank(tmp_path, monkeypatch, golden):
    """Count the lines of a one-line mistake, folded and with MINIRAY_DEBUG=1."""
    counts = []
    for debug in ("0", "1"):
        monkeypatch.setenv("MINIRAY_DEBUG", debug)
        trainer = DDPTrainer(2, worker=RankWorker, run_dir=tmp_path / debug, progress=False)
        with pytest.raises(RuntimeError) as caught:
            train(trainer)
        text = format_exception(caught.value)
        counts.append(len(text.splitlines()))
        if debug == "0":
            golden("traceback_ddp.txt", normalize(text))
            assert (caught.value.rank, caught.value.step) == (1, 0)
            assert caught.value.function.endswith(": RankWorker.training_step")
        assert normalize(text).splitlines()[-1].startswith("Rank 1, epoch 1, step 0: File ")
    assert counts[0] <= 20
    assert counts[1] > 60


class HookTrainer(DataParallelTrainer):
    mistake = staticmethod(lambda: None)

    def on_epoch_end(self, epoch, result, **kwargs):
        self.mistake()


@pytest.mark.parametrize(
    ("mistake", "files"),
    [
        (lambda: {}["key"], ["test_tracebacks.py"] * 4),
        (lambda: miniray.wait([1]), ["test_tracebacks.py"] * 4 + ["session.py"] * 2),
        (lambda: random.sample([1], 2), ["test_tracebacks.py"] * 4 + ["random.py"]),
    ],
    ids=["user", "argument", "library"],
)
def test_hook_on_the_driver(tmp_path, monkeypatch, mistake, files):
    """Frames between ``train`` and the user's hook are hidden, frames that the hook called stay."""
    monkeypatch.setattr(HookTrainer, "mistake", staticmethod(mistake))
    trainer = HookTrainer(1, worker=Worker, run_dir=tmp_path / "run", progress=False)
    with pytest.raises((KeyError, TypeError, ValueError)) as caught:
        train(trainer)
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert [os.path.basename(frame.filename) for frame in frames[: len(files)]] == files


def test_error_without_frames_of_the_user_stays_complete():
    """A builtin exception that miniray raises below no user code may be a bug."""
    with pytest.raises(TypeError) as caught:
        miniray.wait([1])
    error = caught.value.with_traceback(caught.value.__traceback__.tb_next)
    before = traceback.extract_tb(error.__traceback__)
    tracebacks.hide_frames(error)
    assert traceback.extract_tb(error.__traceback__) == before
