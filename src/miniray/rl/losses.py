"""Losses: the clipped policy loss, the clipped value loss, KL estimates and entropy.

The functions are pure. They accept tensors of shape (sequences, tokens) and a mask of the same
shape. Masked values, including NaN, affect neither results nor gradients.

- clipping: Schulman et al., https://arxiv.org/abs/1707.06347
- dual clipping: Ye et al., https://arxiv.org/abs/1912.09729
- k1, k2, k3: Schulman, http://joschu.net/blog/kl-approx.html
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from miniray.checks import check_choice, check_number
from miniray.rl.config import AGGREGATIONS, KL_KINDS

#: Limit of exponents: larger ratios carry no information, and exp(89) overflows in float32.
_LARGEST_EXPONENT = 20.0


def same_shape(**tensors: Tensor) -> None:
    """Raise ``ValueError`` for tensors of different shapes, which would broadcast silently."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1 or len(next(iter(shapes.values()))) != 2:
        raise ValueError(f"tensors must have the same shape (sequences, tokens), not {shapes}")


def selected(x: Tensor, chosen: Tensor) -> Tensor:
    """Return ``x`` with 0 for values that aren't chosen, even if they are NaN."""
    return torch.where(chosen, x, torch.zeros((), dtype=x.dtype, device=x.device))


def aggregate(x: Tensor, mask: Tensor, mode: str, *, global_count: float | None = None) -> Tensor:
    """Aggregate ``x`` into a scalar.

    Sequences without tokens are ignored. If there are no tokens at all, the result is 0.

    Args:
        x: Values per token.
        mask: Mask of the tokens to use.
        mode: ``"token-mean"`` averages over all tokens, ``"seq-mean-token-mean"`` averages the
            means of sequences, and ``"seq-mean-token-sum"`` averages the sums of sequences.
        global_count: Divisor: ``count`` summed over all micro-batches and ranks. The results of the
            micro-batches then add up to the result for all of them.
    """
    same_shape(x=x, mask=mask)
    check_choice("mode", mode, AGGREGATIONS)
    chosen = mask.bool()
    divisor = count(mask, mode) if global_count is None else global_count
    sums = selected(x, chosen).sum(-1)
    if mode == "seq-mean-token-mean":
        sums = sums / chosen.sum(-1).clamp(min=1)
    return sums.sum() / max(divisor, 1.0)


def count(mask: Tensor, mode: str) -> float:
    """Return the divisor of ``aggregate``: the number of tokens, or of sequences with tokens."""
    check_choice("mode", mode, AGGREGATIONS)
    chosen = mask.bool()
    return float(chosen.sum() if mode == "token-mean" else chosen.any(-1).sum())


def policy_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    agg: str = "token-mean",
    global_count: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the clipped surrogate loss and its metrics.

    ``dual_clip`` (above 1) bounds the loss of tokens with a negative advantage that have become
    much more likely. The metrics are means over tokens: ``clip_fraction``, ``dual_clip_fraction``
    and ``approx_kl`` (the k1 estimate between the old and the current policy).
    """
    same_shape(logp=logp, old_logp=old_logp, advantages=advantages, mask=mask)
    check_number("clip_low", clip_low, 0)
    check_number("clip_high", clip_high, 0)
    if dual_clip is not None:
        check_number("dual_clip", dual_clip, 1, open_low=True)
    chosen = mask.bool()
    # Mask before exp: otherwise, the gradient of masked tokens could be 0 * inf, which is NaN.
    change = selected(logp, chosen) - selected(old_logp, chosen)
    change = change.clamp(-_LARGEST_EXPONENT, _LARGEST_EXPONENT)
    advantages = selected(advantages, chosen)
    ratio = change.exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(plain, clipped)
    bounded = torch.zeros_like(chosen)
    if dual_clip is not None:
        bound = -advantages * dual_clip
        bounded = (advantages < 0) & (loss > bound) & chosen
        loss = torch.where(advantages < 0, torch.minimum(loss, bound), loss)
    with torch.no_grad():
        tokens = chosen.sum().clamp(min=1)
        metrics = {
            "clip_fraction": ((clipped > plain) & chosen).sum() / tokens,
            "dual_clip_fraction": bounded.sum() / tokens,
            "approx_kl": -change.sum() / tokens,
        }
    return aggregate(loss, mask, agg, global_count=global_count), metrics


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    clip: float | None = 0.5,
    agg: str = "token-mean",
    global_count: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the clipped value loss and its metrics.

    The loss of a token is half the squared error of the value, or of the value clipped to within
    ``clip`` of the old one, whichever is larger. The metric ``value_clip_fraction`` is the share of
    tokens for which the clipped error is larger.
    """
    same_shape(values=values, old_values=old_values, returns=returns, mask=mask)
    chosen = mask.bool()
    values, old_values = selected(values, chosen), selected(old_values, chosen)
    returns = selected(returns, chosen)
    error = (values - returns).square()
    fraction = torch.zeros((), device=values.device)
    if clip is not None:
        check_number("clip", clip, 0)
        near = torch.minimum(torch.maximum(values, old_values - clip), old_values + clip)
        clipped = (near - returns).square()
        fraction = ((clipped > error) & chosen).sum() / chosen.sum().clamp(min=1)
        error = torch.maximum(error, clipped)
    loss = 0.5 * aggregate(error, mask, agg, global_count=global_count)
    return loss, {"value_clip_fraction": fraction}


def kl(logp: Tensor, ref_logp: Tensor, kind: str = "k3") -> Tensor:
    """Return an estimate per token of the KL divergence between the policy and its reference.

    The tokens must be sampled from the policy. ``k1`` is unbiased and can be negative, ``k2`` is
    half the square of k1, and ``k3`` is unbiased and never negative.
    """
    check_choice("kind", kind, KL_KINDS)
    if logp.shape != ref_logp.shape:
        raise ValueError(
            "logp and ref_logp must have the same shape, not "
            f"{tuple(logp.shape)} and {tuple(ref_logp.shape)}"
        )
    difference = logp - ref_logp
    if kind == "k1":
        return difference
    if kind == "k2":
        return 0.5 * difference.square()
    return torch.exp((-difference).clamp(max=_LARGEST_EXPONENT)) + difference - 1


def entropy(logits: Tensor) -> Tensor:
    """Return the entropy in nats of the distribution over the last dimension.

    Logits may be -inf.
    """
    logp = torch.log_softmax(logits.float(), dim=-1)
    # Replace 0 * log(0), which is NaN, by 0.
    return -torch.where(logp == -math.inf, 0.0, logp.exp() * logp).sum(-1)
