"""How much better an action was than expected: GAE, GRPO, RLOO, and whitening.

Pure functions on tensors of shape (sequences, tokens) with a mask of the same shape, 1 where the
policy chose the token. What is masked has no part in any result and comes back as 0, whatever it
was, NaN included. Nothing here is differentiated: results have no gradient.

- GAE: Schulman et al., https://arxiv.org/abs/1506.02438
- GRPO: Shao et al., https://arxiv.org/abs/2402.03300; without the division by the deviation it is
  Dr. GRPO, https://arxiv.org/abs/2503.20783
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
    """(advantages, returns) by generalised advantage estimation.

    A gap in the mask (what a tool or another speaker said) is stepped over: the token before it is
    followed by the one after it, and the gap's rewards and values do not count. So a reward must be
    on a token of the policy's own. Advantages are not whitened.
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
    """(count, sum, sum of squares) in double precision: what ranks add up before they whiten."""
    same_shape(x=x, mask=mask)
    taken = x.detach()[mask.bool()].double()
    count = torch.tensor(float(taken.numel()), dtype=torch.float64, device=x.device)
    return torch.stack((count, taken.sum(), taken.square().sum()))


def whiten(
    x: Tensor, mask: Tensor, stats: Tensor | Sequence[float] | None = None, *, eps: float = 1e-8
) -> Tensor:
    """``x`` with mean 0 and variance 1 (unbiased) over what the mask selects.

    ``stats`` are the ``moments`` to use, summed over all ranks; by default those of ``x`` itself.
    A single number has no variance and becomes 0.
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
    """An advantage for each sequence: its reward against the mean of its group's.

    ``rewards`` has one number a sequence, and sequences of one prompt have the same group id: a
    number, a text, anything hashable. With ``norm_std`` it is divided by the group's standard
    deviation (unbiased) + ``eps``. A group of one has nothing to be compared with: mean 0,
    deviation 1, so its reward is its advantage.
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
    """An advantage for each sequence: its reward against the mean of the *others* of its group.

    A group of one has no others: its reward is its advantage.
    """
    rewards = _floats(rewards)
    index, counts, sums = _groups(rewards, group_ids)
    own = counts[index]
    others = (sums[index] - rewards) / (own - 1).clamp(min=1)
    return torch.where(own > 1, rewards - others, rewards)


def spread(per_sequence: Tensor, mask: Tensor) -> Tensor:
    """One number a sequence as one a token: the same on each of its tokens, 0 where masked."""
    return selected(per_sequence[:, None].expand(mask.shape), mask.bool())


def _floats(x: Tensor) -> Tensor:
    """Without a gradient; what is right or wrong, or a whole number, as a float."""
    return x.detach() if x.is_floating_point() else x.detach().float()


def _groups(
    rewards: Tensor, group_ids: Tensor | Sequence[Hashable]
) -> tuple[Tensor, Tensor, Tensor]:
    """(index of each sequence's group, sequences in each group, sum of rewards in each group)."""
    if not isinstance(group_ids, Tensor):
        seen: dict[Hashable, int] = {}
        group_ids = [seen.setdefault(group, len(seen)) for group in group_ids]
    ids = torch.as_tensor(group_ids, device=rewards.device)
    if rewards.ndim != 1 or ids.shape != rewards.shape:
        raise ValueError(
            "rewards must be one number a sequence and group_ids one id a sequence; shapes are "
            f"{tuple(rewards.shape)} and {tuple(ids.shape)}"
        )
    _, index, counts = torch.unique(ids, return_inverse=True, return_counts=True)
    sums = torch.zeros(len(counts), dtype=rewards.dtype, device=rewards.device)
    return index, counts, sums.index_add_(0, index, rewards)
