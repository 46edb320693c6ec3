"""Steps with CUDA: snapshots of GPU tensors, restarts, and resumes inside an epoch."""

import os
import signal

import pytest

from miniray.train import Checkpoint, DDPTrainer
from tests.gpu.gpu_for_tests import A_GPU, HALF_A_GPU, ON_GPU, OnGpu
from tests.train.ddp_for_tests import SEED

torch = pytest.importorskip("torch")

ROWS = 96  # 12 steps of two ranks with batches of 4
EVERY = 2


class Mortal(OnGpu):
    """Kills itself on the rank ``victim`` in the step ``fatal`` of the process, once."""

    def __init__(self, worker_id=0, n=ROWS, victim=None, fatal=0):
        super().__init__(worker_id, n=n)
        self.fatal = fatal if worker_id == victim else None
        self.steps = 0

    def training_step(self, batch, batch_idx):
        self.steps += 1
        if self.steps == self.fatal and not os.path.exists("killed"):
            open("killed", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)


def train(name, workers, length, train_options=None, **options):
    """Return the result, the weights and the events of a run."""
    resources = A_GPU if workers == 1 else HALF_A_GPU
    options = {"worker": Mortal, "seed": SEED, "progress": False, **options}
    with DDPTrainer(workers, run_dir=name, resources_per_worker=resources, **options) as trainer:
        result = trainer.train(**length, n=ROWS, **train_options or {})
        return result, trainer.model_weights(), trainer.run.read_events()


def check_equal(found, expected):
    assert [r["loss"] for r in found[0].history] == [r["loss"] for r in expected[0].history]
    assert all(torch.equal(found[1][name], value) for name, value in expected[1].items())


@pytest.mark.parametrize("shard", ["none", "full"])
@pytest.mark.parametrize("workers", [1, 2])
def test_killed_rank_costs_the_steps_since_its_snapshot(workers, shard):
    """One worker uses NCCL, two that share the GPU use gloo."""
    expected = train("undisturbed", workers, {"epochs": 2}, shard=shard)
    found = train(
        "killed-run",
        workers,
        {"epochs": 2},
        {"victim": workers - 1, "fatal": 9},
        shard=shard,
        max_failures=1,
        snapshot_every=EVERY,
    )
    check_equal(found, expected)
    (restart,) = [event for event in found[2] if event["event"] == "ranks_restarted"]
    assert restart["rank"] == workers - 1
    assert restart["resumed_at_step"] > 0
    assert restart["died_at_step"] is None or 0 <= restart["lost_steps"] <= EVERY


@pytest.mark.parametrize("shard", ["none", "full"])
def test_resume_inside_an_epoch_has_the_bits_of_a_whole_run(shard):
    expected = train("whole", 2, {"steps": 16}, shard=shard)
    train("parts", 2, {"steps": 7}, shard=shard, callbacks=Checkpoint(every_steps=7))
    found = train("parts", 2, {"steps": 16}, {"resume": "auto"}, shard=shard)
    check_equal(found, expected)


def test_fp16_scaler_resumes_inside_an_epoch():
    options = {"precision": "fp16" if ON_GPU else "fp32"}
    expected = train("whole", 1, {"steps": 30}, **options)
    train("parts", 1, {"steps": 11}, callbacks=Checkpoint(every_steps=11), **options)
    found = train("parts", 1, {"steps": 30}, {"resume": "auto"}, **options)
    check_equal(found, expected)


def test_log_records_have_the_memory_of_the_gpu():
    with DDPTrainer(
        1, worker=Mortal, seed=SEED, progress=False, log_every=2, resources_per_worker=A_GPU
    ) as trainer:
        trainer.train(epochs=1, n=ROWS)
        records = trainer.run.read_steps()
    assert records[-1]["step"] == ROWS // 4
    assert all(record["grad_norm"] >= 0 for record in records if "grad_norm" in record)
    if ON_GPU:
        assert all(record["gpu_memory_mb"] > 0 for record in records)
