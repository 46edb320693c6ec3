"""Which samples each rank takes in which step, and how much each counts. Pure arithmetic.

An epoch is a row of *windows*: one optimizer step each, of up to ``accumulate`` micro-batches. A
micro-batch of all ranks together is ``world_size × batch_size`` samples of the epoch's order, dealt
out in turn (rank 0 of 4 gets 0, 4, 8, …). So the samples of a step do not depend on how many ranks
there are, as long as the product is the same.

Gradients are averaged over ranks. A loss that is a mean over the rank's samples is therefore
weighted with ``ranks taking part × own samples / samples of the window``: the result is the
gradient of the mean over all samples of the window, also where the last ones do not divide.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from miniray.data.plan import shard_indices


@dataclasses.dataclass(frozen=True)
class Window:
    """One optimizer step of one rank.

    Attributes:
        weights: what the loss of each of its micro-batches is multiplied with; empty where this
            rank has no samples left, 0 where it goes through its last ones again for company.
        join: some rank has none: the step is done inside of ``DDP.join``.
    """

    weights: tuple[float, ...]
    join: bool = False


class EpochPlan:
    """The windows of an epoch over ``n`` samples that miniray deals out.

    Every sample comes exactly once with ``uneven="join"``. ``"pad"`` repeats fewer than
    ``world_size`` samples so that all ranks have as many, ``"drop"`` leaves out fewer than that,
    ``"error"`` refuses. ``drop_last`` leaves out a last micro-batch that is not full.
    ``ValueError`` where a rank would have nothing to do in the whole epoch.
    """

    def __init__(
        self,
        n: int,
        batch_size: int,
        world_size: int,
        *,
        accumulate: int = 1,
        uneven: str = "join",
        drop_last: bool = False,
    ) -> None:
        self.n, self.batch_size, self.world_size = n, batch_size, world_size
        self.accumulate, self.uneven = accumulate, uneven
        over = n % world_size
        if uneven == "error" and over:
            counts = [(n - rank + world_size - 1) // world_size for rank in range(world_size)]
            shown = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(counts))
            raise ValueError(
                f"{n} samples do not divide by {world_size} ranks ({shown}); "
                'choose uneven="join", "pad" or "drop"'
            )
        used = n
        if over and uneven in ("pad", "drop"):
            used += world_size - over if uneven == "pad" else -over
        full = world_size * batch_size
        sizes = [full] * (used // full)
        tail = 0 if drop_last else used % full
        if tail:
            # A rank that has no part in a micro-batch cannot take part in its window's sum any
            # more, so such a tail goes to the micro-batch before: one sample more for some ranks.
            if tail < world_size and len(sizes) % accumulate:
                sizes[-1] += tail
            else:
                sizes.append(tail)
        self.sizes = sizes
        if not sizes or sizes[0] < world_size:
            idle = world_size - (sizes[0] if sizes else 0)
            last = f"rank {world_size - 1} has" if idle == 1 else f"{idle} ranks have"
            why = f"a full batch takes {full}" if drop_last else f"{world_size} ranks"
            raise ValueError(f"{last} 0 batches: {n} samples are too few ({why})")

    def windows(self, rank: int, in_step: bool = False) -> Iterator[Window]:
        """This rank's share of each optimizer step.

        ``in_step``: all ranks are needed for every step. One without samples then has a micro-batch
        that weighs nothing, and the average is over all ranks.
        """
        for start in range(0, len(self.sizes), self.accumulate):
            sizes = self.sizes[start : start + self.accumulate]
            taking_part = self.world_size if in_step else min(self.world_size, *sizes)
            total = sum(sizes)
            own = [self._own(size, rank) for size in sizes]
            weights = tuple(taking_part * size / total for size in own if size or in_step)
            yield Window(weights, join=taking_part < self.world_size)

    def batches(self, rank: int, epoch: int, *, shuffle: bool, seed: int) -> Iterator[list[int]]:
        """The samples of each of this rank's micro-batches."""
        even: Any = self.uneven if self.uneven in ("pad", "drop") else "exact"
        rows = shard_indices(
            self.n,
            rank,
            self.world_size,
            mode="strided",
            seed=seed,
            shuffle=shuffle,
            epoch=epoch,
            even=even,
        )
        at = 0
        for size in self.sizes:
            own = self._own(size, rank)
            if own:
                yield rows[at : at + own].tolist()
            at += own

    def count(self, rank: int) -> int:
        """How many micro-batches this rank has."""
        return sum(1 for size in self.sizes if self._own(size, rank))

    def _own(self, size: int, rank: int) -> int:
        return max(0, -(-(size - rank) // self.world_size))


def counted_windows(counts: Sequence[int], rank: int, accumulate: int, uneven: str) -> list[Window]:
    """Windows where every rank brings batches of its own, ``counts`` of them.

    Each counts the same within a window: how many samples they have is not known beforehand.
    ``ValueError`` names the ranks where ``counts`` differ and that is not wanted, or cannot be had.
    """
    fewest, most = min(counts), max(counts)
    shown = ", ".join(f"rank {r} has {count}" for r, count in enumerate(counts))
    if fewest == 0:
        raise ValueError(f"{shown} batches: every rank needs at least one")
    if fewest != most:
        if uneven == "error":
            raise ValueError(f'{shown} batches; choose uneven="join" or "drop"')
        if uneven == "pad":
            raise ValueError(
                f'{shown} batches: uneven="pad" needs miniray to share out the samples; leave out '
                'load_data_shard(), or choose "join" or "drop"'
            )
        if uneven == "join" and accumulate > 1:
            raise ValueError(
                f"{shown} batches: with accumulate={accumulate} ranks would end in the middle of a "
                'step; choose uneven="drop", or leave out load_data_shard() and miniray shares out '
                "the samples"
            )
    own = fewest if uneven == "drop" else counts[rank]
    windows = []
    for start in range(0, fewest if uneven == "drop" else most, accumulate):
        micro = max(0, min(accumulate, own - start))
        joining = uneven == "join" and start + accumulate > fewest and fewest != most
        windows.append(Window((1.0 / micro,) * micro if micro else (), join=joining))
    return windows
