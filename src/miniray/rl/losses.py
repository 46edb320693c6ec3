"""What is minimised: the clipped policy loss, the clipped value loss, KL estimates, entropy.

Pure functions on tensors of shape (sequences, tokens) with a mask of the same shape. What is masked
changes neither a result nor a gradient, whatever it holds.

- clipping: Schulman et al., https://arxiv.org/abs/1707.06347
- dual clipping: Ye et al., https://arxiv.org/abs/1912.09729
- k1, k2, k3: Schulman, http://joschu.net/blog/kl-approx.html
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from miniray.checks import check_choice
from miniray.rl.config import AGGREGATIONS, KL_KINDS, above, in_range

#: exp(20) is 5e8: beyond it a ratio says no more, and exp(89) is no float32.
_LARGEST_EXPONENT = 20.0


def same_shape(**tensors: Tensor) -> None:
    """Refuse tensors that would broadcast: (B, T) with (B, 1) gives numbers, and wrong ones."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1 or len(next(iter(shapes.values()))) != 2:
        raise ValueError(f"tensors must all be (sequences, tokens) of one shape, not {shapes}")


def selected(x: Tensor, chosen: Tensor) -> Tensor:
    """``x`` where chosen, else 0. Unlike a product with the mask this keeps NaN of padding out."""
    return torch.where(chosen, x, torch.zeros((), dtype=x.dtype, device=x.device))


def aggregate(x: Tensor, mask: Tensor, mode: str, *, global_count: float | None = None) -> Tensor:
    """``x`` as one number.

    ``token-mean`` counts every token the same, ``seq-mean-token-mean`` every sequence,
    ``seq-mean-token-sum`` is the mean over sequences of the sum over their tokens. Sequences
    without tokens do not count. Nothing at all gives 0.

    ``global_count`` is what to divide by (``count`` summed over all micro-batches and ranks), so
    that the results of the parts add up to the result of the whole.
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
    """What ``aggregate`` divides by: tokens, or sequences that have any."""
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
    """The clipped surrogate: (loss, what is worth watching).

    ``dual_clip`` (above 1) bounds the loss of a bad action that has become much more likely. The
    metrics are means over the tokens given: ``clip_fraction``, ``dual_clip_fraction`` and
    ``approx_kl`` (k1 between the old policy and this one).
    """
    same_shape(logp=logp, old_logp=old_logp, advantages=advantages, mask=mask)
    in_range("clip_low", clip_low, 0)
    in_range("clip_high", clip_high, 0)
    if dual_clip is not None:
        above("dual_clip", dual_clip, 1)
    chosen = mask.bool()
    # Masked before exp: the gradient of what is masked would be 0 * inf, which is NaN.
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
    """Half the squared error, at least that of values kept within ``clip`` of the old ones.

    Returns (loss, {"value_clip_fraction": share of the tokens where that made a difference}).
    """
    same_shape(values=values, old_values=old_values, returns=returns, mask=mask)
    chosen = mask.bool()
    values, old_values = selected(values, chosen), selected(old_values, chosen)
    returns = selected(returns, chosen)
    error = (values - returns).square()
    fraction = torch.zeros((), device=values.device)
    if clip is not None:
        in_range("clip", clip, 0)
        near = torch.minimum(torch.maximum(values, old_values - clip), old_values + clip)
        clipped = (near - returns).square()
        fraction = ((clipped > error) & chosen).sum() / chosen.sum().clamp(min=1)
        error = torch.maximum(error, clipped)
    loss = 0.5 * aggregate(error, mask, agg, global_count=global_count)
    return loss, {"value_clip_fraction": fraction}


def kl(logp: Tensor, ref_logp: Tensor, kind: str = "k3") -> Tensor:
    """An estimate, token by token, of how far the policy is from its reference.

    Of tokens the policy sampled: ``k1`` is unbiased and may be negative, ``k2`` is half the square
    of k1, ``k3`` is unbiased and never negative.
    """
    check_choice("kind", kind, KL_KINDS)
    if logp.shape != ref_logp.shape:
        raise ValueError(
            f"logp and ref_logp differ in shape: {tuple(logp.shape)}, {tuple(ref_logp.shape)}"
        )
    difference = logp - ref_logp
    if kind == "k1":
        return difference
    if kind == "k2":
        return 0.5 * difference.square()
    return torch.exp((-difference).clamp(max=_LARGEST_EXPONENT)) + difference - 1


def entropy(logits: Tensor) -> Tensor:
    """The entropy in nats of the distribution over the last dimension, -inf logits included."""
    logp = torch.log_softmax(logits.float(), dim=-1)
    # 0 * log 0 is 0; left alone it would be NaN.
    return -torch.where(logp == -math.inf, 0.0, logp.exp() * logp).sum(-1)
