"""Steps with nothing to learn from, NaN, and reward functions that fail: named, or skipped."""

import math

import pytest
import torch

from miniray.rl import (
    CausalLM,
    GRPOConfig,
    GRPOTrainer,
    KLPenalty,
    NonFiniteError,
    NoTokensError,
    PPOConfig,
    PPOTrainer,
    RewardError,
    RewardTimeoutError,
    Sampling,
)
from tests.rl.models_for_tests import TOKENIZER, make_model, rows
from tests.rl.trainers_for_tests import BANDITS, SMALL, Bandit, make, pull


def test_equal_rewards_teach_nothing_and_say_so():
    config = GRPOConfig(**SMALL, kl=KLPenalty(0))
    with make(reward=lambda row, text: 0.3, config=config) as trainer:
        result = trainer.train(steps=1)
        weights = trainer.model_weights()
    assert result["flat_groups"] == 1
    assert result["policy_loss"] == 0
    assert result["grad_norm"] == 0
    torch.manual_seed(7)
    for name, value in CausalLM(make_model(), TOKENIZER).state_dict().items():
        assert torch.equal(weights[name], value)


class Silent(Bandit):
    """Says nothing to image 1."""

    def generate(self, rows, seeds, sampling):
        made = super().generate(rows, seeds, sampling)
        made.responses = [
            r[: 0 if row["image"] == b"\x01" else None]
            for r, row in zip(made.responses, rows, strict=True)
        ]
        return made


@pytest.mark.parametrize("kind", [GRPOTrainer, PPOTrainer])
@pytest.mark.parametrize("agg", ["token-mean", "seq-mean-token-mean"])
def test_empty_responses_are_counted_and_harmless(kind, agg):
    config = (GRPOConfig if kind is GRPOTrainer else PPOConfig)(
        prompts_per_step=2, rollouts=8, agg=agg, epochs=2
    )
    with make(kind, policy=Silent, reward=pull, data=BANDITS, config=config) as trainer:
        result = trainer.train(steps=2)
    assert result["empty_responses"] == 8
    assert result["response_tokens"] == 0.5
    assert math.isfinite(result["loss"])


@pytest.mark.parametrize("how", ["filtered", "empty"])
def test_a_step_without_tokens_is_named_or_skipped(how):
    if how == "filtered":
        settings = {"sampling": Sampling(max_new_tokens=6, max_prompt_tokens=2)}
    else:
        settings = {"policy": Silent, "reward": pull, "data": BANDITS[1:] * 4}
    with pytest.raises(NoTokensError) as caught:
        make(**settings).train(steps=1)
    assert caught.value.step == 0
    with make(**settings, on_error="skip") as trainer:
        result = trainer.train(steps=2)
    assert result["skipped_updates"] == 1
    assert result["counts"]["tokens"] == 0
    assert result.get("filtered_prompts") == (4 if how == "filtered" else None)


def test_workers_that_learn_on_their_own_may_have_no_rows_in_the_last_step_of_an_epoch():
    with make(data=rows(10), num_workers=3, sync="weights") as trainer:
        result = trainer.train(steps=4)
    assert [line["counts"]["prompts"] for line in result.history] == [4, 4, 2, 4]
    assert not any("skipped_updates" in line for line in result.history)


def test_a_response_without_others_is_not_a_flat_group():
    with make(config=GRPOConfig(prompts_per_step=4, rollouts=1, kl=KLPenalty(0))) as trainer:
        result = trainer.train(steps=1)
    assert result["flat_groups"] == 0
    assert result["policy_loss"] == pytest.approx(-result["reward"])  # the reward is the advantage


def test_long_prompts_are_left_out_and_counted():
    data = [*rows(3), {"prompt": "1234567890+1"}]
    with make(data=data, sampling=Sampling(max_new_tokens=4, max_prompt_tokens=6)) as trainer:
        result = trainer.train(steps=1)
    assert result["filtered_prompts"] == 1
    assert result["counts"]["sequences"] == 12


class Broken(Bandit):
    """NaN for image 1, from the start."""

    def log_probs(self, batch):
        bad = torch.tensor(
            [row["image"] == b"\x01" for row in batch.rows], device=self.table.device
        )
        return super().log_probs(batch).masked_fill(bad[:, None], math.nan)


@pytest.mark.parametrize("several", [False, True])
def test_nan_log_probs_are_named_or_skipped(several):
    config = GRPOConfig(
        prompts_per_step=2, rollouts=4, epochs=1 + several, kl=KLPenalty(0.1 * several)
    )
    settings = {"policy": Broken, "reward": pull, "data": BANDITS, "config": config}
    pattern = r"image=<1 bytes>, best='?2"
    with pytest.raises(NonFiniteError, match=pattern) as caught:
        make(**settings).train(steps=1)
    assert (caught.value.workers, caught.value.worker, caught.value.step) == ((0,), 0, 0)
    with make(**settings, on_error="skip") as trainer:
        result = trainer.train(steps=1)
        assert trainer.model_weights()["table"].isfinite().all()
    assert result["skipped_nonfinite"] == 4
    assert result["counts"]["sequences"] == 4
    assert math.isfinite(result["loss"])


class Exploding(Bandit):
    """Finite numbers whose gradient is not."""

    def log_probs(self, batch):
        made = super().log_probs(batch)
        return made + 0 * (self.table.sum() * 0).sqrt()


def test_a_gradient_that_is_not_finite_changes_no_weight(raises):
    settings = {"policy": Exploding, "reward": pull, "data": BANDITS}
    config = GRPOConfig(prompts_per_step=2, rollouts=8)
    with raises(NonFiniteError) as caught:
        make(**settings, config=config).train(steps=1)
    assert (caught.value.workers, caught.value.step) == ((), 0)
    with make(**settings, config=config, on_error="skip") as trainer:
        assert trainer.train(steps=2)["skipped_updates"] == 1
        assert trainer.model_weights()["table"].tolist() == [[0, 0, 0], [0, 0, 0]]


class Unsure(Bandit):
    """Has finite log-probs and NaN as entropies, so that only the loss shows it."""

    def log_probs(self, batch):
        made = super().log_probs(batch)
        return made, made * math.nan


def test_a_loss_that_is_not_finite_names_the_workers():
    config = GRPOConfig(prompts_per_step=2, rollouts=8, entropy_coef=0.1)
    with pytest.raises(NonFiniteError) as caught:
        make(policy=Unsure, reward=pull, data=BANDITS, config=config).train(steps=1)
    assert (caught.value.workers, caught.value.step) == ((0,), 0)


def test_a_reward_function_that_raises_or_hangs():
    def raises(row, text):
        raise LookupError(row["prompt"])

    with pytest.raises(RewardError, match=r"sequence 0\b.*LookupError") as caught:
        make(reward=raises).train(steps=1)
    error = caught.value
    assert (error.worker, error.step, error.epoch) == (0, 0, None)

    def hangs(row, text):
        while True:
            pass

    with pytest.raises(RewardTimeoutError, match=r"0\.2 s.*test_degenerate"):
        make(reward=hangs, reward_timeout=0.2).train(steps=1)
    with make(reward=raises, on_error="skip") as trainer:
        result = trainer.train(steps=1)
    assert result["skipped_rewards"] == 16
    assert result["skipped_updates"] == 1
