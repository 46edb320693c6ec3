"""The same step on a Ray cluster."""

import os
import signal

import pytest
import torch

from miniray.rl import GRPOConfig, GRPOTrainer, KLPenalty, RLWorker, Sampling
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


class Killed(RLWorker):
    """Worker 0 kills itself in step 2, once."""

    marker = ""

    def _advantages(self, rollouts, kl_coef, step, metrics):
        super()._advantages(rollouts, kl_coef, step, metrics)
        if step == 1 and self.rank == 0 and not os.path.exists(self.marker):
            open(self.marker, "x").close()
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_lost_worker_on_ray_costs_a_step(tmp_path):
    pytest.importorskip("ray")

    class Mortal(Killed):
        marker = str(tmp_path / "killed")

    def train(worker_class, **options):
        trainer = type("Trainer", (GRPOTrainer,), {"worker_class": worker_class})
        config = GRPOConfig(prompts_per_step=4, rollouts=2, kl=KLPenalty(0.1))
        with trainer(
            make_model, digits, rows(8), tokenizer=TOKENIZER, config=config, optimizer=Momentum,
            sampling=Sampling(max_new_tokens=6), num_workers=2, seed=3, progress=False,
            backend="ray", **options,
        ) as made:  # fmt: skip
            made.train(steps=3)
            events = [e for e in made.run.read_events() if e["event"] == "ranks_restarted"]
            return made.model_weights(), events

    whole, _ = train(RLWorker)
    weights, (event,) = train(Mortal, max_failures=1)
    assert (event["rank"], event["died_at_step"], event["resumed_at_step"]) == (0, 2, 1)
    assert all(torch.equal(weights[name], value) for name, value in whole.items())
