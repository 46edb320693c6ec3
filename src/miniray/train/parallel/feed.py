"""Distribute batches to the ranks of one replica.

The rank with the first stage loads the batches. It sends the inputs to the shards of that stage,
and the targets to those of the last one. Other ranks therefore don't need access to the data, and
targets always match the inputs, even with random augmentation. All ranks receive the number of
samples of each batch, and the end of the epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from miniray.train.lockstep.mesh import stages_through_host
from miniray.train.parallel.plan.job import Layout, Place
from miniray.train.workers.data.batches import count_tokens, move_batch

_DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
_MOST_DIMENSIONS = 8
_END = -1


def split_batch(batch: Any) -> tuple[tuple[Any, ...], Any]:
    """Return (inputs, target) of a batch: tensors in a tuple, list or dict, the target last."""
    if isinstance(batch, dict):
        batch = tuple(batch.values())
    if (
        isinstance(batch, (tuple, list))
        and len(batch) >= 2
        and all(isinstance(value, torch.Tensor) and value.dim() for value in batch)
        and len({len(value) for value in batch}) == 1
    ):
        return tuple(batch[:-1]), batch[-1]
    what = type(batch).__name__
    if isinstance(batch, (tuple, list)):
        shown = [
            str(list(value.shape)) if isinstance(value, torch.Tensor) else type(value).__name__
            for value in batch
        ]
        what = f"{what} of {', '.join(shown) or 'nothing'}"
    raise TypeError(
        "a batch must be (input, ..., target) or a dict of columns, with tensors of equal length "
        f"and the target last, not a {what}. Use a collate_fn to convert batches"
    )


class Feed:
    """Sends batches from the rank that loads to the others of its replica.

    ``last`` is the place of the last stage in the pipeline. Creating it is a collective.
    """

    def __init__(self, layout: Layout, place: Place, last: int, device: Any) -> None:
        copies = [dist.new_group(layout.copy_ranks(copy)) for copy in range(layout.data)]
        shards = range(layout.tensor)
        self.group, self.device = copies[place.data], device
        self.source = layout.rank(place.data, 0, 0)
        self._input_ranks = [layout.rank(place.data, 0, shard) for shard in shards]
        self._target_ranks = [layout.rank(place.data, last, shard) for shard in shards]
        self._alone = layout.pipeline == layout.tensor == 1
        self._rank: int = dist.get_rank()
        self.tokens: Any = 0  # of the batch that this rank loaded last
        self._under_way: list[tuple[Any, Any]] = []  # what was sent, and the tensor it is sent from

    @property
    def loads(self) -> bool:
        return self._rank == self.source

    def batches(self, items: Iterator[Any] | None) -> Iterator[tuple[int, Any, Any]]:
        """Yield samples, inputs and target of each batch. Values that aren't needed are None.

        ``items`` are the batches on the source. None takes the place of a batch that only other
        replicas have, whose number of samples is 0.
        """
        while True:
            batch = self._next(items) if self.loads else None
            count, inputs, target = self._share(batch)
            if count == _END:
                return
            yield count, inputs, target

    def _next(self, items: Any) -> Any:
        """Return samples, inputs and target of the next batch on the rank that loads."""
        for item in items:
            if item is None:
                return 0, (), None
            inputs, target = split_batch(item)
            self.tokens = count_tokens(item)
            return len(target), inputs, target
        return _END, (), None

    def _share(self, batch: Any) -> tuple[int, Any, Any]:
        if self._alone:
            count, inputs, target = batch
            return count, *move_batch((inputs, target), self.device)
        return self._receive() if batch is None else self._send(*batch)

    def _send(self, count: int, inputs: Any, target: Any) -> tuple[int, Any, Any]:
        """Send a batch while this rank computes, after the previous batch has arrived."""
        for work, _ in self._under_way:
            work.wait()
        header = torch.tensor([count, len(inputs)], device=self.device)
        told = dist.broadcast(header, src=self.source, group=self.group, async_op=True)
        self._under_way = [(told, header)]
        if count <= 0:
            told.wait()
            return count, None, None
        inputs, target = move_batch((inputs, target), self.device)
        for ranks, values in ((self._input_ranks, inputs), (self._target_ranks, (target,))):
            for rank in ranks:
                if rank != self.source:
                    for value in values:
                        self._under_way += start_sending(value, rank)
        return count, inputs, target

    def _receive(self) -> tuple[int, Any, Any]:
        header = torch.zeros(2, dtype=torch.int64, device=self.device)
        dist.broadcast(header, src=self.source, group=self.group)
        count, number = header.tolist()
        inputs = target = None
        if count > 0 and self._rank in self._input_ranks:
            inputs = tuple(recv_tensor(self.source, self.device) for _ in range(number))
        if count > 0 and self._rank in self._target_ranks:
            target = recv_tensor(self.source, self.device)
        return count, inputs, target


def send_tensor(value: Any, rank: int) -> None:
    """Send a tensor of any shape and type to ``rank``, which calls ``recv_tensor``."""
    for work, _ in start_sending(value, rank):
        work.wait()


def start_sending(value: Any, rank: int) -> list[tuple[Any, Any]]:
    """Start ``send_tensor``. Return each work with its tensor, which must be kept until the end."""
    shape = list(value.shape)
    head = [_DTYPES.index(value.dtype), len(shape), *shape]
    head += [0] * (_MOST_DIMENSIONS + 2 - len(head))
    value = value.detach().contiguous()
    if stages_through_host(value.device):
        value = value.cpu()
    sent = (torch.tensor(head, device=value.device), value)
    return [(dist.isend(tensor, rank), tensor) for tensor in sent]


def recv_tensor(rank: int, device: Any) -> Any:
    """Return the tensor that ``rank`` has sent."""
    lands = torch.device("cpu") if stages_through_host(device) else device
    head = torch.empty(_MOST_DIMENSIONS + 2, dtype=torch.int64, device=lands)
    dist.recv(head, rank)
    kind, dimensions, *shape = head.tolist()
    value = torch.empty(shape[:dimensions], dtype=_DTYPES[kind], device=lands)
    dist.recv(value, rank)
    return value.to(device)
