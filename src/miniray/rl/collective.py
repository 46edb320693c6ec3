"""What the workers of a step add up among themselves: counts, moments, gradients.

``Alone`` is a worker that adds up nothing: the only one, or one of several that train on their own
between syncs of weights. ``Together`` sums over a process group. A worker that dies takes the
others' sums with it: they raise ``PeerLostError`` at once and not after a time-out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from miniray.errors import PeerLostError


class Alone:
    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.size = 1

    def sum(self, tensor: Tensor, what: str) -> Tensor:
        return tensor

    def offset(self, count: int) -> int:
        return self.rank << 32  # numbers of its own, whatever the others have


class Together:
    """The process group that this worker has joined (``miniray.train.lockstep.process_group``).

    gloo sums on the CPU and NCCL on the GPU; tensors that are elsewhere are copied there and back.
    """

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        nccl = dist.get_backend() == "nccl"
        self._device = torch.device("cuda", torch.cuda.current_device()) if nccl else "cpu"

    def sum(self, tensor: Tensor, what: str) -> Tensor:
        """``tensor`` summed over all workers, in place. ``what`` is for the error."""
        staged = tensor.to(self._device)
        try:
            dist.all_reduce(staged)
        except RuntimeError as error:
            raise PeerLostError(
                f"worker {self.rank} of {self.size}: the sum of {what} over all workers did not "
                f"complete ({error}); look for the worker that failed first",
                worker=self.rank,
                rank=self.rank,
            ) from error
        if staged is not tensor:
            tensor.copy_(staged)
        return tensor

    def offset(self, count: int) -> int:
        """How many the workers before this one have, if each has ``count`` of its own."""
        counts = torch.zeros(self.size, dtype=torch.int64)
        counts[self.rank] = count
        return int(self.sum(counts, "prompt counts")[: self.rank].sum())


Collective = Alone | Together


def sum_gradients(
    parameters: Sequence[torch.nn.Parameter], collective: Collective, what: str
) -> None:
    """Add up the gradients of all workers, in one flat tensor for each type.

    A parameter that has a gradient on some worker has one on all afterwards; one that has none
    anywhere has none, so that an optimizer leaves it alone.
    """
    if collective.size == 1:
        return
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.nn.Parameter]] = {}
    for parameter in parameters:
        kinds.setdefault((parameter.device, parameter.dtype), []).append(parameter)
    for (device, dtype), members in kinds.items():
        there = torch.tensor([float(p.grad is not None) for p in members], device=device)
        flat = torch.cat(
            [
                (torch.zeros_like(p) if p.grad is None else p.grad).detach().reshape(-1)
                for p in members
            ]
            + [there.to(dtype)]
        )
        collective.sum(flat, what)
        *parts, there = flat.split([*(p.numel() for p in members), len(members)])
        for parameter, part, somewhere in zip(members, parts, there.tolist(), strict=True):
            if somewhere:
                parameter.grad = part.view_as(parameter)
