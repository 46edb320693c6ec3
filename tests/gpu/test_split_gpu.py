"""Split models whose workers share a GPU: what they send goes through the host."""

import pytest

from miniray.train import ModelParallelTrainer, PipelineParallelTrainer
from tests.gpu.gpu_for_tests import A_GPU, HALF_A_GPU, ON_GPU
from tests.parallel.split_for_tests import (
    PARTS,
    TOLERANCE,
    Transformer,
    loss,
    make_data,
    make_layers,
    make_model,
    one_process,
)

torch = pytest.importorskip("torch")


def check_close(trainer, result, expected):
    losses, weights = expected
    found = [record["loss"] for record in result.history]
    assert found == pytest.approx(losses, abs=10 * TOLERANCE)
    for name, value in trainer.model_weights().items():
        torch.testing.assert_close(value, weights[name], rtol=0, atol=10 * TOLERANCE, msg=name)


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_a_pipeline_trains_as_one_process_does(schedule):
    expected = one_process(epochs=2, n=44, clip=0.5)
    with PipelineParallelTrainer(
        2,
        **PARTS,
        model=make_layers,
        data=make_data(44),
        val_data=make_data(13),
        schedule=schedule,
        clip_norm=0.5,
        resources_per_worker=HALF_A_GPU,
    ) as trainer:
        result = trainer.train(2)
        check_close(trainer, result, expected)
        scores, weights = trainer.evaluate(), trainer.model_weights()
    assert min(result.peak_activation_bytes) > 0
    plain = make_model().eval()
    plain.load_state_dict(weights)
    x, y = make_data(13).dataset.tensors
    assert scores["loss"] == pytest.approx(loss(plain(x), y).item(), abs=1e-3)


def test_whole_layers_are_dealt_out():
    expected = one_process(epochs=2, model=Transformer, clip=0.5)
    with ModelParallelTrainer(
        2,
        **PARTS,
        model=Transformer,
        data=make_data(),
        split="layers",
        clip_norm=0.5,
        resources_per_worker=HALF_A_GPU,
    ) as trainer:
        result = trainer.train(2)
        check_close(trainer, result, expected)


@pytest.mark.skipif(not ON_GPU, reason="on the CPU they may")
def test_workers_that_share_a_gpu_cannot_cut_layers():
    trainer = ModelParallelTrainer(
        2, **PARTS, model=Transformer, data=make_data(), resources_per_worker=HALF_A_GPU
    )
    with pytest.raises(ValueError, match=r"workers that share a GPU.* can.t shard layers"):
        trainer.train(1)


def test_one_worker_has_a_gpu_of_its_own():
    """Over NCCL, with all the parts of a layout and one worker in each."""
    expected = one_process(epochs=2, n=44, clip=0.5)
    with ModelParallelTrainer(
        1,
        **PARTS,
        model=make_model,
        data=make_data(44),
        clip_norm=0.5,
        resources_per_worker=A_GPU,
    ) as trainer:
        result = trainer.train(2)
        check_close(trainer, result, expected)
