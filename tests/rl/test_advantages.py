"""Advantages against numbers worked out by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miniray.rl import advantages

NAN = math.nan


def tensor(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def test_gae_of_a_reward_on_the_last_token():
    made, returns = advantages.gae(
        tensor([0, 0, 0, 1]), tensor([0.5] * 4), torch.ones(1, 4), gamma=1, lam=0.95
    )
    torch.testing.assert_close(made, tensor([0.4286875, 0.45125, 0.475, 0.5]))
    torch.testing.assert_close(returns, made + 0.5)


def test_gae_steps_over_a_gap_and_ignores_what_is_masked():
    # Without the gap: tokens with values .2 and .6, reward 1 on the second.
    # Second: 1 - .6 = .4. First: .9 * .6 - .2 + .9 * .5 * .4 = .34 + .18 = .52
    mask = tensor([0, 1, 0, 0, 1, 0])
    values = tensor([NAN, 0.2, 9, NAN, 0.6, 7])
    rewards = tensor([5, 0, NAN, 3, 1, 2])
    made, returns = advantages.gae(rewards, values, mask, gamma=0.9, lam=0.5)
    torch.testing.assert_close(made, tensor([0, 0.52, 0, 0, 0.4, 0]))
    torch.testing.assert_close(returns, tensor([0, 0.72, 0, 0, 1.0, 0]))


def test_gae_has_no_gradient_and_takes_responses_of_no_tokens():
    values = torch.zeros(2, 3, requires_grad=True)
    made, returns = advantages.gae(torch.ones(2, 3), values, torch.ones(2, 3))
    assert not made.requires_grad
    assert not returns.requires_grad
    assert advantages.gae(*[torch.zeros(2, 0)] * 3)[0].shape == (2, 0)


def test_shapes_that_would_broadcast_are_refused():
    with pytest.raises(ValueError, match=r"'values': \(2, 1\)"):
        advantages.gae(torch.ones(2, 3), torch.ones(2, 1), torch.ones(2, 3))


def test_whitening_uses_the_unbiased_variance_of_what_is_selected():
    # 1, 2, 6: mean 3, squares 4 + 1 + 9 = 14, variance 7.
    made = advantages.whiten(tensor([1, 2, NAN, 6]), tensor([1, 1, 0, 1]))
    torch.testing.assert_close(made, tensor([-2, -1, 0, 3]) / 7**0.5)


def test_whitening_of_parts_with_summed_moments_is_whitening_of_the_whole():
    x, mask = torch.randn(6, 5, dtype=torch.float64) + 3, torch.rand(6, 5) < 0.7
    parts = [(x[:1], mask[:1]), (x[1:4], mask[1:4]), (x[4:], mask[4:])]
    stats = sum(advantages.moments(*part) for part in parts)
    made = torch.cat([advantages.whiten(*part, stats) for part in parts])
    torch.testing.assert_close(made, advantages.whiten(x, mask))
    assert made[mask].mean().abs() < 1e-9
    assert made[mask].var().item() == pytest.approx(1)


@pytest.mark.parametrize("mask", [[0, 0], [1, 0]])
def test_whitening_of_nothing_or_of_one_number_is_zero(mask):
    assert advantages.whiten(tensor([5, 7]), tensor(mask)).tolist() == [[0, 0]]


def test_whitening_of_equal_numbers_is_zero_and_not_noise():
    made = advantages.whiten(torch.full((2, 3), 0.1), torch.ones(2, 3))
    assert made.abs().max() < 1e-3


def test_grpo_in_a_group():
    made = advantages.grpo(torch.tensor([1, 0, 0, 1, 0.5]), [4] * 5)
    torch.testing.assert_close(made, torch.tensor([1, -1, -1, 1, 0]) * 0.999998)


def test_grpo_with_groups_mixed_up():
    # Group 7: 1, 3: mean 2, deviation √2. Group 2: 4 alone. Group 9: 5, 5.
    made = advantages.grpo(tensor(1, 4, 5, 3, 5), torch.tensor([7, 2, 9, 7, 9]), eps=0)
    torch.testing.assert_close(made[[0, 1, 3]], tensor(-(0.5**0.5), 4, 0.5**0.5))
    flat = advantages.grpo(tensor(1, 4, 5, 3, 5), torch.tensor([7, 2, 9, 7, 9]))
    assert flat[[2, 4]].tolist() == [0, 0]


@pytest.mark.parametrize("kind", [torch.int64, torch.bool, torch.float64])
def test_right_or_wrong_is_a_reward_and_groups_may_have_names(kind):
    rewards, names = torch.tensor([1, 1, 0, 0, 1]).to(kind), ["b", "a", "b", "a", "b"]
    made = advantages.grpo(rewards, names, norm_std=False)
    torch.testing.assert_close(made, torch.tensor([1 / 3, 0.5, -2 / 3, -0.5, 1 / 3]).to(made))
    assert advantages.grpo(rewards, names).is_floating_point()
    made = advantages.rloo(rewards, names)
    torch.testing.assert_close(made, torch.tensor([0.5, 1, -1, -1, 0.5]).to(made))
    torch.testing.assert_close(
        advantages.whiten(rewards[None], torch.ones(1, 5)).float(),
        advantages.whiten(rewards[None].float(), torch.ones(1, 5)),
    )


def test_grpo_without_the_deviation():
    assert advantages.grpo(tensor(1, 3), [0, 0], norm_std=False).tolist() == [-1, 1]


def test_rloo_compares_with_the_others():
    # 6 against the mean of 0 and 3; alone: itself.
    assert advantages.rloo(tensor(6, 0, 3, 8), [1, 1, 1, 2]).tolist() == [4.5, -4.5, 0, 8]


@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.floats(-100, 100, allow_nan=False, width=32)), min_size=1
    ),
    st.randoms(use_true_random=False),
)
def test_group_advantages_sum_to_zero_and_do_not_depend_on_order(pairs, shuffler):
    ids, rewards = [i for i, _ in pairs], tensor(*[r for _, r in pairs])
    for function in (advantages.grpo, advantages.rloo):
        made = function(rewards, ids)
        for group in set(ids):
            members = [k for k, i in enumerate(ids) if i == group]
            if len(members) > 1:
                assert made[members].sum().abs() < 1e-6
        order = list(range(len(ids)))
        shuffler.shuffle(order)
        again = function(rewards[order], [ids[k] for k in order])
        torch.testing.assert_close(again, made[order], rtol=1e-4, atol=1e-4)


def test_group_ids_must_fit():
    with pytest.raises(ValueError, match=r"\(2,\).*\(3,\)"):
        advantages.grpo(torch.ones(2), [0, 0, 1])


def test_spread_is_zero_on_padding():
    made = advantages.spread(torch.tensor([2.0, NAN]), tensor([1, 0], [0, 0]))
    assert made.tolist() == [[2, 0], [0, 0]]
