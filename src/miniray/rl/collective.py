"""Sum counts, moments and gradients over the workers of a step.

``Alone`` is for a single worker, or for workers that train independently between weight syncs.
``Together`` sums over a process group. If a worker crashes, the sums of the others raise
``PeerLostError`` immediately instead of waiting for a timeout.
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
        return self.rank << 32  # a separate range of numbers for each worker


class Together:
    """The process group that this worker has joined (``miniray.train.lockstep.process_group``).

    gloo sums on the CPU and NCCL on the GPU. Tensors on a different device are copied to it and
    back.
    """

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        nccl = dist.get_backend() == "nccl"
        self._device = torch.device("cuda", torch.cuda.current_device()) if nccl else "cpu"

    def sum(self, tensor: Tensor, what: str) -> Tensor:
        """Sum ``tensor`` over all workers in place, and return it.

        ``what`` describes the tensor in errors.
        """
        staged = tensor.to(self._device)
        try:
            dist.all_reduce(staged)
        except RuntimeError as error:
            raise PeerLostError(
                f"Worker {self.rank} of {self.size}: the sum of {what} over all workers didn't "
                f"complete ({error}). Check which worker failed first.",
                worker=self.rank,
                rank=self.rank,
            ) from error
        if staged is not tensor:
            tensor.copy_(staged)
        return tensor

    def offset(self, count: int) -> int:
        """Return the sum of the counts of the workers with a lower rank."""
        counts = torch.zeros(self.size, dtype=torch.int64)
        counts[self.rank] = count
        return int(self.sum(counts, "prompt counts")[: self.rank].sum())


Collective = Alone | Together


def sum_gradients(
    parameters: Sequence[torch.nn.Parameter], collective: Collective, what: str
) -> None:
    """Sum the gradients of all workers, in one flat tensor per device and dtype.

    A parameter with a gradient on any worker has one on all workers afterwards. The gradients of
    other parameters stay None, so that optimizers skip them.
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
