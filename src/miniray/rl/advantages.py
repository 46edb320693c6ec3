"""Compute advantages: GAE, GRPO, RLOO and whitening.

The functions are pure. They accept tensors of shape (sequences, tokens) and a mask of the same
shape, which is 1 for tokens that the policy sampled. Masked values, including NaN, don't affect the
results and are returned as 0. The results don't require gradients.

- GAE: Schulman et al., https://arxiv.org/abs/1506.02438
- GRPO: Shao et al., https://arxiv.org/abs/2402.03300; without the division by the standard
  deviation: Dr. GRPO, https://arxiv.org/abs/2503.20783
- RLOO: Ahmadian et al., https://arxiv.org/abs/2402.14740
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from miniray.rl.losses import same_shape, selected


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float = 1.0, lam: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return (advantages, returns), computed by generalized advantage estimation.

    Gaps in the mask, such as the output of a tool, are skipped: the token before a gap is followed
    by the token after it, and rewards and values in the gap are ignored. Rewards must therefore be
    on tokens that the policy sampled. Advantages aren't whitened.
    """
    same_shape(rewards=rewards, values=values, mask=mask)
    chosen = mask.bool()
    rewards, values = selected(rewards.detach(), chosen), selected(values.detach(), chosen)
    advantages = torch.zeros_like(values)
    next_value = next_advantage = values.new_zeros(len(values))
    for t in range(values.shape[1] - 1, -1, -1):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        here = delta + gamma * lam * next_advantage
        next_value = torch.where(chosen[:, t], values[:, t], next_value)
        next_advantage = torch.where(chosen[:, t], here, next_advantage)
        advantages[:, t] = next_advantage
    advantages = selected(advantages, chosen)
    return advantages, advantages + values


def moments(x: Tensor, mask: Tensor) -> Tensor:
    """Return (count, sum, sum of squares) in double precision. Ranks sum them before ``whiten``."""
    same_shape(x=x, mask=mask)
    taken = x.detach()[mask.bool()].double()
    count = torch.tensor(float(taken.numel()), dtype=torch.float64, device=x.device)
    return torch.stack((count, taken.sum(), taken.square().sum()))


def whiten(
    x: Tensor, mask: Tensor, stats: Tensor | Sequence[float] | None = None, *, eps: float = 1e-8
) -> Tensor:
    """Return ``x`` scaled to mean 0 and variance 1 (unbiased) over the values the mask selects.

    ``stats`` are the ``moments`` to use, summed over all ranks. The default is the moments of
    ``x``. A single value has no variance and becomes 0.
    """
    given = moments(x, mask) if stats is None else stats
    count, total, squares = (float(s) for s in given)
    if count < 1:
        return torch.zeros_like(x)
    mean = total / count
    variance = max(0.0, squares - total * mean) / (count - 1) if count > 1 else 0.0
    scale = (variance + eps) ** -0.5
    return selected((_floats(x) - mean) * scale, mask.bool())


def grpo(
    rewards: Tensor,
    group_ids: Tensor | Sequence[Hashable],
    *,
    norm_std: bool = True,
    eps: float = 1e-6,
) -> Tensor:
    """Return the advantage of each sequence: its reward minus the mean reward of its group.

    ``rewards`` has one value per sequence. Sequences of the same prompt have the same group ID,
    which can be any hashable value. With ``norm_std``, advantages are divided by the group's
    standard deviation (unbiased) plus ``eps``. For groups with a single sequence, the mean is taken
    as 0 and the deviation as 1, so the advantage is the reward.
    """
    rewards = _floats(rewards)
    index, counts, sums = _groups(rewards, group_ids)
    alone = counts == 1
    mean = torch.where(alone, 0.0, sums / counts)
    centred = rewards - mean[index]
    if not norm_std:
        return centred
    squares = torch.zeros_like(sums).index_add_(0, index, centred.square())
    deviation = (squares / (counts - 1).clamp(min=1)).sqrt()
    deviation = torch.where(alone, 1.0, deviation)
    return centred / (deviation[index] + eps)


def rloo(rewards: Tensor, group_ids: Tensor | Sequence[Hashable]) -> Tensor:
    """Return the advantage of each sequence: its reward minus the mean of the others in its group.

    The advantage of a group's only sequence is its reward.
    """
    rewards = _floats(rewards)
    index, counts, sums = _groups(rewards, group_ids)
    own = counts[index]
    others = (sums[index] - rewards) / (own - 1).clamp(min=1)
    return torch.where(own > 1, rewards - others, rewards)


def spread(per_sequence: Tensor, mask: Tensor) -> Tensor:
    """Expand one value per sequence to one value per token, with 0 for masked tokens."""
    return selected(per_sequence[:, None].expand(mask.shape), mask.bool())


def _floats(x: Tensor) -> Tensor:
    """Return ``x`` detached, with booleans and integers converted to floats."""
    return x.detach() if x.is_floating_point() else x.detach().float()


def _groups(
    rewards: Tensor, group_ids: Tensor | Sequence[Hashable]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the group index of each sequence, and the size and the reward sum of each group."""
    if not isinstance(group_ids, Tensor):
        seen: dict[Hashable, int] = {}
        group_ids = [seen.setdefault(group, len(seen)) for group in group_ids]
    ids = torch.as_tensor(group_ids, device=rewards.device)
    if rewards.ndim != 1 or ids.shape != rewards.shape:
        raise ValueError(
            "rewards and group_ids must have one value per sequence, but their shapes are "
            f"{tuple(rewards.shape)} and {tuple(ids.shape)}"
        )
    _, index, counts = torch.unique(ids, return_inverse=True, return_counts=True)
    sums = torch.zeros(len(counts), dtype=rewards.dtype, device=rewards.device)
    return index, counts, sums.index_add_(0, index, rewards)
