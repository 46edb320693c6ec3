"""PPO and GRPO on a GPU: a worker of its own, and two that share it."""

import math

import pytest

from miniray.rl import GRPOConfig, GRPOTrainer, PPOConfig, PPOTrainer
from tests.gpu.gpu_for_tests import A_GPU, DEVICE, HALF_A_GPU
from tests.rl.models_for_tests import rows
from tests.rl.trainers_for_tests import make

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True, scope="module")
def _import_transformers():
    """Import it here, because test processes that collect this file may not run it."""
    return pytest.importorskip("transformers")


@pytest.mark.parametrize("kind", [GRPOTrainer, PPOTrainer])
def test_the_reward_rises_in_bfloat16_on_a_gpu_of_its_own(kind):
    config = (GRPOConfig if kind is GRPOTrainer else PPOConfig)(
        prompts_per_step=8, rollouts=4, epochs=2, mini_batches=2, lr=1e-2
    )
    with make(
        kind,
        config=config,
        optimizer=None,
        eval_data=rows(5),
        device=DEVICE,
        precision="bf16",
        backend="local",
        resources_per_worker=A_GPU,
    ) as trainer:
        history = trainer.train(steps=12).history
        scores = trainer.evaluate()
    assert sum(line["reward"] for line in history[-3:]) / 3 > 0.85
    assert scores["reward"] > 0.85


def test_two_workers_that_share_a_gpu_make_the_step_of_one():
    found = []
    for workers, resources in ((1, A_GPU), (2, HALF_A_GPU)):
        with make(
            num_workers=workers, device=DEVICE, backend="local", resources_per_worker=resources
        ) as trainer:
            result = trainer.train(steps=1)
            found.append((result["loss"], trainer.model_weights()))
    (loss, weights), (other_loss, others) = found
    assert math.isfinite(loss)
    assert other_loss == pytest.approx(loss, abs=1e-4)
    for name, value in weights.items():
        torch.testing.assert_close(others[name], value, rtol=0, atol=1e-4, msg=name)
