"""The same numbers and gradients as TRL's and verl's own functions, on random inputs with masks.

Neither is needed by miniray; these tests are skipped where they are not installed.
"""

import importlib
import types

import numpy as np
import pytest
import torch

from miniray.rl import AdaptiveKL, advantages, losses

SEEDS = range(5)


def peer(name):
    try:
        return importlib.import_module(name)
    except ImportError as error:  # the package, or something it needs
        pytest.skip(f"{name}: {error}")


pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")


@pytest.fixture(scope="module")
def verl():
    return peer("verl.trainer.ppo.core_algos")


@pytest.fixture(scope="module")
def verl_functional():
    return peer("verl.utils.torch_functional")


@pytest.fixture(scope="module")
def trl_grpo():
    return peer("trl.trainer.grpo_trainer")


def inputs(seed, *, gaps=True):
    """(log-probs, old ones, reference ones, advantages, mask): 6 sequences of up to 9 tokens."""
    torch.manual_seed(seed)
    shape = (6, 9)
    lengths = torch.randint(1, 10, (6, 1))
    mask = (torch.arange(9) < lengths).float()
    if gaps:
        mask = mask * (torch.rand(shape) < 0.8)
        mask[:, 0] = 1
    logp = -torch.rand(shape) * 3
    old = logp + 0.5 * torch.randn(shape)
    reference = logp + 0.5 * torch.randn(shape)
    return logp, old, reference, 2 * torch.randn(shape), mask


def gradient(function, x):
    x = x.clone().requires_grad_()
    value = function(x)
    value.backward()
    return value.detach(), x.grad


def assert_same(mine, theirs, x):
    value, slope = gradient(mine, x)
    their_value, their_slope = gradient(theirs, x)
    torch.testing.assert_close(value, their_value, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(slope, their_slope, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", SEEDS)
def test_gae_and_whitening_as_in_verl(verl, seed):
    rewards, values, _, _, mask = inputs(seed)
    theirs, their_returns = verl.compute_gae_advantage_return(rewards, values, mask, 0.97, 0.9)
    mine, returns = advantages.gae(rewards, values, mask, 0.97, 0.9)
    chosen = mask.bool()
    torch.testing.assert_close(returns[chosen], their_returns[chosen], rtol=1e-4, atol=1e-5)
    whitened = advantages.whiten(mine, mask)
    torch.testing.assert_close(whitened[chosen], theirs[chosen], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("norm_std", [True, False])
def test_group_advantages_as_in_verl(verl, seed, norm_std):
    _, _, _, rewards, mask = inputs(seed)
    ids = np.array([0, 1, 0, 2, 1, 0])
    mine = advantages.grpo((rewards * mask).sum(-1), ids, norm_std=norm_std)
    theirs, _ = verl.compute_grpo_outcome_advantage(
        rewards * mask, mask, ids, norm_adv_by_std_in_grpo=norm_std
    )
    torch.testing.assert_close(advantages.spread(mine, mask), theirs)
    theirs, _ = verl.compute_rloo_outcome_advantage(rewards * mask, mask, ids)
    mine = advantages.rloo((rewards * mask).sum(-1), ids)
    torch.testing.assert_close(advantages.spread(mine, mask), theirs)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("agg", losses.AGGREGATIONS)
def test_the_policy_loss_as_in_verl(verl, seed, agg):
    logp, old, _, scores, mask = inputs(seed)

    def mine(x):
        return losses.policy_loss(
            x, old, scores, mask, clip_low=0.1, clip_high=0.3, dual_clip=3, agg=agg
        )[0]

    def theirs(x):
        return verl.compute_policy_loss(
            old, x, scores, mask, cliprange_low=0.1, cliprange_high=0.3, loss_agg_mode=agg
        )[0]

    assert_same(mine, theirs, logp)
    seen = losses.policy_loss(logp, old, scores, mask, dual_clip=3)[1]
    _, clipped, distance, dual = verl.compute_policy_loss(old, logp, scores, mask, cliprange=0.2)
    torch.testing.assert_close(seen["clip_fraction"], clipped)
    torch.testing.assert_close(seen["approx_kl"], distance)
    torch.testing.assert_close(seen["dual_clip_fraction"], dual)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_value_loss_as_in_verl(verl, seed):
    values, old, returns, _, mask = inputs(seed)
    assert_same(
        lambda x: losses.value_loss(x, old, returns, mask, clip=0.3)[0],
        lambda x: verl.compute_value_loss(x, returns, old, mask, cliprange_value=0.3)[0],
        values,
    )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", losses.KL_KINDS)
def test_kl_as_in_verl(verl, seed, kind):
    # verl cuts k3 off at 10, which numbers as near as these do not reach.
    logp, _, reference, _, mask = inputs(seed)
    assert_same(
        lambda x: losses.aggregate(losses.kl(x, reference, kind), mask, "token-mean"),
        lambda x: verl.agg_loss(verl.kl_penalty(x, reference, kind), mask, "token-mean"),
        logp,
    )


def test_the_adaptive_coefficient_as_in_verl(verl):
    mine = AdaptiveKL(0.1, target=0.05, horizon=500)
    theirs = verl.AdaptiveKLController(0.1, 0.05, 500)
    for distance in (0.01, 0.3, 0.05, 0.055, 0.0):
        theirs.update(distance, 32)
        assert mine.update(distance, 32) == pytest.approx(theirs.value)


def test_entropy_as_in_verl(verl_functional):
    logits = torch.randn(4, 7, 50)
    torch.testing.assert_close(
        losses.entropy(logits), verl_functional.entropy_from_logits(logits), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("loss_type", "agg"), [("grpo", "seq-mean-token-mean"), ("bnpo", "token-mean")]
)
def test_the_loss_as_in_trl(trl_grpo, seed, loss_type, agg):
    """TRL's whole loss, KL to the reference included, with its model call replaced by log-probs."""
    logp, old, reference, scores, mask = inputs(seed)
    scores = scores[:, 0]
    ids = torch.ones(mask.shape, dtype=torch.long)

    def mine(x):
        spread = advantages.spread(scores, mask)
        loss, _ = losses.policy_loss(x, old, spread, mask, clip_low=0.1, clip_high=0.3, agg=agg)
        return loss + 0.04 * losses.aggregate(losses.kl(x, reference, "k3"), mask, agg)

    def theirs(x):
        trainer = _Settings(
            _get_per_token_logps_and_entropies=lambda *a, **k: (x, torch.zeros_like(x), None),
            accelerator=_Settings(
                gather=lambda t: t, reduce=lambda t, reduction: t, num_processes=1
            ),
            args=_Settings(),
            model=_Settings(training=True),
            _metrics={"train": _Anything(), "eval": _Anything()},
            top_entropy_quantile=1.0,
            importance_sampling_level="token",
            beta=0.04,
            loss_type=loss_type,
            epsilon_low=0.1,
            epsilon_high=0.3,
            current_gradient_accumulation_steps=1,
        )
        return trl_grpo.GRPOTrainer._compute_loss(
            trainer,
            None,
            {
                "prompt_ids": ids,
                "prompt_mask": ids,
                "completion_ids": ids,
                "completion_mask": mask,
                "advantages": scores,
                "old_per_token_logps": old,
                "ref_per_token_logps": reference,
            },
        )

    assert_same(mine, theirs, logp)


class _Settings(types.SimpleNamespace):
    """Everything that is not said is off."""

    def __getattr__(self, name):
        return None


class _Anything(dict):
    """Metrics that are never read."""

    def __missing__(self, key):
        return self.setdefault(key, [])
