"""Log-probs and entropies a block at a time, against the plain formulas; with gradients."""

import subprocess
import sys

import pytest
import torch

from miniray.rl import losses
from miniray.rl.models import logprobs


def plain(logits, tokens, temperature):
    scaled = logits[:, : tokens.shape[1]].float() / temperature
    own = scaled.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    return own, losses.entropy(scaled)


@pytest.mark.parametrize("block", [5, 40, 1 << 19])  # part of a sequence, one, all
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("wanted", ["log-probs", "entropies", "both"])
def test_blocks_give_the_plain_formulas(block, temperature, wanted, monkeypatch):
    monkeypatch.setitem(logprobs._BLOCK, "cpu", block)
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 8, 11, generator=random)
    tokens = torch.randint(11, (5, 7), generator=random)
    weights = torch.randn(2, 5, 7, generator=random)
    weights *= torch.tensor([wanted != "entropies", wanted != "log-probs"])[:, None, None]
    gradients = []
    for function in (plain, logprobs.chosen_log_probs):
        leaf = logits.clone().requires_grad_()
        made = function(leaf, tokens, temperature)
        sum((w * m).sum() for w, m in zip(weights, made, strict=True) if w.any()).backward()
        gradients.append((*made, leaf.grad))
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert (gradients[1][2][:, 7] == 0).all()  # the column that is about no token


def test_an_excluded_token_has_no_part_in_anything():
    logits = torch.tensor([[[0.0, 0.0, -torch.inf]]], requires_grad=True)
    logp, entropies = logprobs.chosen_log_probs(logits, torch.tensor([[1]]))
    assert logp.item() == pytest.approx(-0.6931472)
    assert entropies.item() == pytest.approx(0.6931472)
    (logp + entropies).sum().backward()
    assert logits.grad.tolist() == [[[-0.5, 0.5, 0.0]]]


def test_half_precision_is_computed_in_single():
    logits = torch.randn(2, 3, 50, dtype=torch.bfloat16, requires_grad=True)
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
    logp, _ = logprobs.chosen_log_probs(logits, tokens)
    assert logp.dtype == torch.float32
    torch.testing.assert_close(logp, plain(logits, tokens, 1.0)[0])
    logp.sum().backward()
    assert logits.grad.dtype == torch.bfloat16


def test_nothing_to_do():
    for shape in ((0, 1, 5), (2, 1, 5)):
        logits = torch.zeros(shape, requires_grad=True)
        logp, entropies = logprobs.chosen_log_probs(logits, torch.zeros(shape[0], 0).long())
        assert logp.shape == entropies.shape == (shape[0], 0)
        logp.sum().backward()
        assert (logits.grad == 0).all()


def test_the_driver_does_without_torch():
    """It costs a second and the memory of a process, and a driver only calls workers."""
    code = (
        "import sys; from miniray.rl import GRPOConfig, GRPOTrainer, KLPenalty, Sampling; "
        "GRPOTrainer(print, print, [{}], config=GRPOConfig(kl=KLPenalty()), sampling=Sampling()); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
