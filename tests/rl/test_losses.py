"""Losses and KL estimates against numbers worked out by hand; gradients too."""

import math

import pytest
import torch

from miniray.rl import AdaptiveKL, losses

NAN, INF = math.nan, math.inf


def row(*values):
    return torch.tensor([values], dtype=torch.float64)


ONES = row(1, 1, 1)


def test_the_clipped_surrogate():
    logp = row(0.5, 1, 1.5).log().requires_grad_()
    loss, seen = losses.policy_loss(logp, row(0, 0, 0), row(1, -1, 2), ONES)
    assert loss.item() == pytest.approx(-1.9 / 3)  # -.5, 1, and -2 * 1.2 where 1.5 is clipped
    loss.backward()
    # d/dlogp of -A * ratio is -A * ratio; the clipped one has no gradient.
    torch.testing.assert_close(logp.grad, row(-0.5, 1, 0) / 3)
    assert seen["clip_fraction"].item() == pytest.approx(1 / 3)
    assert seen["approx_kl"].item() == pytest.approx(-math.log(0.75) / 3)


def test_clip_low_and_high_are_apart():
    logp = row(0.5, 2).log()
    loss, _ = losses.policy_loss(
        logp, row(0, 0), row(-1, 1), row(1, 1), clip_low=0.3, clip_high=0.6
    )
    assert loss.item() == pytest.approx((0.7 - 1.6) / 2)


def test_dual_clip_bounds_the_loss_of_a_bad_action():
    arguments = (row(math.log(5)), row(0), row(-1), row(1))
    assert losses.policy_loss(*arguments)[0].item() == pytest.approx(5)
    loss, seen = losses.policy_loss(*arguments, dual_clip=3)
    assert loss.item() == pytest.approx(3)
    assert seen["dual_clip_fraction"] == 1
    good, _ = losses.policy_loss(row(math.log(5)), row(0), row(1), row(1), dual_clip=3)
    assert good.item() == pytest.approx(-1.2)  # good actions are not bounded by it


def test_a_ratio_beyond_all_bounds_stays_finite():
    logp = row(500.0).requires_grad_()
    loss, _ = losses.policy_loss(logp, row(-500.0), row(-1), row(1))
    loss.backward()
    assert loss.item() == pytest.approx(math.exp(20))
    assert logp.grad.isfinite().all()


@pytest.mark.parametrize("garbage", [NAN, INF, -INF])
def test_padding_changes_neither_loss_nor_gradient(garbage):
    mask = row(1, 0, 1)
    logp = row(0.1, garbage, 0.3).requires_grad_()
    loss, seen = losses.policy_loss(logp, row(0, garbage, 0), row(1, garbage, -2), mask)
    loss.backward()
    plain = row(0.1, 0.3).requires_grad_()
    wanted, same = losses.policy_loss(plain, row(0, 0), row(1, -2), row(1, 1))
    wanted.backward()
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(logp.grad[:, [0, 2]], plain.grad)
    assert logp.grad[0, 1] == 0
    assert seen == same


def test_the_value_loss_is_clipped():
    loss, seen = losses.value_loss(row(1), row(0), row(2), row(1))
    assert loss.item() == 1.125  # .5 is further from 2 than 1 is
    assert seen["value_clip_fraction"] == 1
    assert losses.value_loss(row(1), row(0), row(2), row(1), clip=None)[0].item() == 0.5
    values = row(1, NAN).requires_grad_()
    losses.value_loss(values, row(0, NAN), row(2, NAN), row(1, 0), clip=None)[0].backward()
    assert values.grad.tolist() == [[-1, 0]]


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [("k1", [-1, 14, 29]), ("k2", [0.5, 98, 420.5]), ("k3", [math.e - 2, 13 + 8.3e-7, 28])],
)
def test_kl_estimates(kind, wanted):
    made = losses.kl(row(-1, -1, -1), row(0, -15, -30), kind)
    torch.testing.assert_close(made, row(*wanted), rtol=0, atol=1e-6)


def test_k3_of_a_token_the_reference_thinks_likely_stays_finite():
    assert losses.kl(row(-1000), row(0), "k3").isfinite().all()


def test_k1_and_k3_are_unbiased():
    p, q = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.2, 0.6]).double()
    true = (p * (p / q).log()).sum()
    for kind in ("k1", "k3"):
        mean = (p * losses.kl(p.log()[None], q.log()[None], kind)[0]).sum()
        torch.testing.assert_close(mean, true)


X = torch.tensor([[1.0, 2, 3], [4, NAN, NAN], [NAN, NAN, NAN]])
MASK = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]])


@pytest.mark.parametrize(
    ("mode", "wanted"),
    [("token-mean", 10 / 4), ("seq-mean-token-mean", 6 / 2), ("seq-mean-token-sum", 10 / 2)],
)
def test_aggregation(mode, wanted):
    assert losses.aggregate(X, MASK, mode).item() == pytest.approx(wanted)
    count = losses.count(MASK, mode)
    rows = [slice(i, i + 1) for i in range(3)]
    parts = [losses.aggregate(X[i], MASK[i], mode, global_count=count) for i in rows]
    assert sum(parts).item() == pytest.approx(wanted)
    assert losses.aggregate(X, 0 * MASK, mode).item() == 0


def test_what_is_not_known_is_refused():
    with pytest.raises(ValueError, match="token-mean"):
        losses.aggregate(X, MASK, "mean")
    with pytest.raises(ValueError, match="'k1', 'k2', 'k3'"):
        losses.kl(X, X, "kl")
    with pytest.raises(ValueError, match="dual_clip"):
        losses.policy_loss(X, X, X, MASK, dual_clip=1.0)


def test_entropy():
    logits = torch.tensor([[0.0, 0, 0, 0], [0, 0, -INF, -INF], [50, 0, 0, 0]])
    torch.testing.assert_close(
        losses.entropy(logits), torch.tensor([math.log(4), math.log(2), 0]), rtol=0, atol=1e-6
    )


def test_the_adaptive_coefficient():
    control = AdaptiveKL(0.2, target=6, horizon=1000)
    assert control.update(6.6, 100) == pytest.approx(0.2 * 1.01)  # error .1, tenth of the horizon
    assert control.update(60, 100) == pytest.approx(0.2 * 1.01 * 1.02)  # error is clipped at .2
    assert control.update(0, 500) == pytest.approx(0.2 * 1.01 * 1.02 * 0.9)
    other = AdaptiveKL(1, target=6, horizon=1000)
    other.load_state_dict(control.state_dict())
    assert other.coefficient == control.coefficient
    assert other.update(0, 10**9) == 0  # never negative
    with pytest.raises(ValueError, match="nan"):
        control.update(NAN, 1)
