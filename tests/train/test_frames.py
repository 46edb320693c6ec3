"""How many frames of ``miniray.train`` are between ``train`` and ``training_step``."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from miniray.core.refs import ActorMethod
from miniray.train import DDPTrainer
from tests.train.ddp_for_tests import Stepper


def list_frames(frame):
    """Return module and function of the frames of ``miniray.train``, outermost first."""
    names = []
    while frame is not None:
        if "/miniray/train/" in frame.f_code.co_filename:
            names.append(f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}")
        frame = frame.f_back
    return names[::-1]


class Profiled(Stepper):
    """Records the frames of ``miniray.train`` when its first step begins."""

    def __init__(self, worker_id):
        super().__init__(worker_id)
        self.frames = None
        sys.setprofile(self.profile)

    def profile(self, frame, event, arg):
        is_step = event == "call" and frame.f_code is Profiled.training_step.__code__
        if is_step and self.frames is None:
            self.frames = list_frames(frame)
            sys.setprofile(None)

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx)

    def get_frames(self):
        return self.frames


def test_ddp_step_is_a_few_frames_away_from_train():
    """6 on the driver, from ``train`` to the call of the ranks, and 4 in the worker."""
    driver = []

    def profile(frame, event, arg):
        is_call = event == "call" and frame.f_code is ActorMethod.remote.__code__
        if is_call and frame.f_locals["self"]._spec.name.endswith(".run_rank_epoch"):
            driver.append(list_frames(frame))

    with DDPTrainer(1, worker=Profiled, progress=False) as trainer:
        sys.setprofile(profile)
        try:
            trainer.train(epochs=1)
        finally:
            sys.setprofile(None)
        (worker,) = trainer.call_workers("get_frames")
    assert len(driver) == 1
    assert driver[0][0] == "trainer.train"
    assert driver[0][-1] == "ranks.call"
    assert len(driver[0]) <= 6, driver[0]
    assert worker[0] == "rank.run_rank_epoch"
    assert len(worker) <= 4, worker
