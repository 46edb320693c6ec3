"""The same step on a Ray cluster."""

import pytest
import torch

from miniray.rl import GRPOConfig, GRPOTrainer, KLPenalty, Sampling
from tests.rl.models_for_tests import TOKENIZER, Momentum, digits, make_model, rows


def run(backend, workers):
    config = GRPOConfig(prompts_per_step=4, rollouts=2, mini_batches=2, kl=KLPenalty(0.1))
    with GRPOTrainer(
        make_model, digits, rows(8), tokenizer=TOKENIZER, config=config, optimizer=Momentum,
        sampling=Sampling(max_new_tokens=6), num_workers=workers, seed=3, backend=backend,
        eval_data=rows(3), eval_interval=2, progress=False,
    ) as trainer:  # fmt: skip
        result = trainer.train(steps=2)
        trainer.save_checkpoint()
        return result, trainer.model_weights()


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_two_workers_on_ray_make_the_update_that_one_makes_here():
    pytest.importorskip("ray")
    there, weights = run("ray", 2)
    here, wanted = run("inline", 1)
    for name in ("reward", "loss", "kl", "grad_norm", "val_reward"):
        assert there[name] == pytest.approx(here[name], rel=1e-4, abs=1e-6), name
    for name, value in wanted.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-3, atol=1e-4)
