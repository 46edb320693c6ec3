"""DDPTrainer with CUDA: NCCL where a worker has a GPU of its own, gloo where two share one."""

import pytest

from miniray.doctor.reader import read_run
from miniray.errors import WorkerTimeoutError
from miniray.train import DDPTrainer
from tests.doctor.helpers import wait_until
from tests.gpu.gpu_for_tests import A_GPU, DEVICE, HALF_A_GPU, ON_GPU, OWN_BACKEND, OnGpu
from tests.train.ddp_for_tests import SEED, apart, one_process

torch = pytest.importorskip("torch")

OPTIONS = {"worker": OnGpu, "seed": SEED, "progress": False}
WHOLE = 3 * 67 * 4  # bytes of the weights and two moments of Adam


def test_bf16_on_a_gpu_of_its_own_goes_on_from_a_checkpoint():
    options = {**OPTIONS, "precision": "bf16", "clip_norm": 1.0, "resources_per_worker": A_GPU}
    with DDPTrainer(1, **options) as trainer:
        trainer.train(epochs=1, n=32)
        path = trainer.save_checkpoint()
        whole = trainer.train(epochs=1, n=32)
        weights, expected = trainer.model_weights(), one_process(32, 4, epochs=2, clip=1.0)[1]
        assert trainer.call_workers("whereabouts") == [(DEVICE, DEVICE, OWN_BACKEND, WHOLE)]
        scores = trainer.evaluate()
    assert {value.device.type for value in weights.values()} == {"cpu"}
    assert 0 < apart(weights, expected) < 0.05
    assert whole["loss"] < whole.history[0]["loss"]
    assert scores["num_samples"] == 9
    with DDPTrainer(1, run_dir="again", **options) as trainer:
        again = trainer.train(epochs=2, n=32, resume=path)
    assert again["loss"] == pytest.approx(whole["loss"], rel=1e-4)


def test_two_workers_share_a_gpu_and_their_boxes_have_its_figures():
    losses, expected = one_process(57, 8, epochs=2)
    with DDPTrainer(2, resources_per_worker=HALF_A_GPU, **OPTIONS) as trainer:
        result = trainer.train(epochs=2, n=57)
        assert apart(trainer.model_weights(), expected) < 1e-4
        assert trainer.call_workers("whereabouts") == [(DEVICE, DEVICE, "gloo", WHOLE)] * 2
        ranks = wait_until(lambda: measured(trainer.run.path))
    assert [record["loss"] for record in result.history] == pytest.approx(losses, abs=1e-4)
    assert [record.rank for record in ranks] == [0, 1]
    if ON_GPU:
        assert len({record.gpu.uuid for record in ranks}) == 1
        assert all(record.gpu.process_memory > 0 for record in ranks)


def measured(run_dir):
    """The ranks' records, once their GPU was measured: once a second."""
    found = list(read_run(run_dir))
    return found if not ON_GPU or all(record.gpu is not None for record in found) else None


@pytest.mark.parametrize("workers", [1, 2])
def test_a_sharded_model(workers):
    """On one worker over NCCL, on two that share the GPU over gloo."""
    losses, expected = one_process(57, 4 * workers, epochs=2, clip=0.5)
    resources = A_GPU if workers == 1 else HALF_A_GPU
    backend = OWN_BACKEND if workers == 1 else "gloo"
    with DDPTrainer(
        workers, shard="full", clip_norm=0.5, resources_per_worker=resources, **OPTIONS
    ) as trainer:
        result = trainer.train(epochs=1, n=57)
        path = trainer.save_checkpoint()
        result = trainer.train(epochs=1, n=57)
        assert apart(trainer.model_weights(), expected) < 1e-4
        found = trainer.call_workers("whereabouts")
        assert trainer.evaluate()["num_samples"] == 9
    assert [record["loss"] for record in result.history] == pytest.approx(losses, abs=1e-4)
    assert [where[:3] for where in found] == [(DEVICE, DEVICE, backend)] * workers
    assert sum(where[3] for where in found) == WHOLE
    with DDPTrainer(1, resources_per_worker=A_GPU, run_dir="whole", **OPTIONS) as trainer:
        trainer.train(epochs=0, n=57, resume=path)  # the state of a sharded model, in a whole one


def test_a_rank_that_hangs_beside_another_on_the_gpu_is_named():
    trainer = DDPTrainer(2, hang_timeout=4, resources_per_worker=HALF_A_GPU, **OPTIONS)
    with pytest.raises(WorkerTimeoutError, match="STUCK: rank 1") as failure:
        trainer.train(epochs=1, hang=True)
    assert failure.value.rank == 1
    assert "the line that hangs" in str(failure.value)
