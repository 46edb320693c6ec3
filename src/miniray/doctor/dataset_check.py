"""Who gets which samples, and may the dataset go to loader workers? Before training. (P3, P7)

::

    print(doctor.check_dataset(dataset, world_size=4, batch_size=8).text())

Nothing is loaded: only indices are dealt out, as the sampler would do it, and the dataset's
attributes are looked at. A DataLoader may be given in place of a dataset; its own sampler is asked
then.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from miniray.doctor.dataset_findings import judge
from miniray.doctor.dataset_shares import Setup, Share, Taken, dealt, of_loader, share_of
from miniray.doctor.findings import Finding, Severity, by_weight, plural
from miniray.doctor.handles import find_handles
from miniray.doctor.loader_facts import length_of


@dataclasses.dataclass(frozen=True)
class DataReport:
    """The answer, a share a rank, and what is wrong with it. ``exit_code`` is 1 for findings."""

    setup: Setup
    shares: tuple[Share, ...]
    findings: tuple[Finding, ...]
    notes: tuple[Finding, ...]

    @property
    def exit_code(self) -> int:
        return 1 if self.findings else 0

    def text(self, width: int = 80) -> str:
        from miniray.doctor.render import finding_lines, wrapped

        setup = self.setup
        head = "an unknown number of samples" if setup.length is None else _count(setup.length)
        parts = [f"{head} for {plural(setup.world_size, 'rank')}"]
        if setup.batch_size is not None:
            parts.append(f"batch size {setup.batch_size}")
        if setup.sampler:
            parts.append(setup.sampler)
        if setup.where:
            parts.append(setup.where)
        lines = [wrapped(", ".join(parts), width)]
        lines += [wrapped(share.line(), width, "  ") for share in self.shares[:16]]
        if len(self.shares) > 16:
            lines.append(f"  … and {len(self.shares) - 16} ranks more")
        for finding in [*self.findings, *self.notes]:
            lines += ["", wrapped(f"{finding.severity.word}: {finding.title}", width)]
            lines += finding_lines(finding, width)
        if not self.findings:
            lines += ["", "nothing wrong"]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        return {
            "setup": dataclasses.asdict(self.setup),
            "ranks": [
                {
                    "rank": share.rank,
                    "samples": share.samples,
                    "batches": share.batches,
                    "last_batch": share.last_batch,
                    "dropped": share.dropped,
                    "first": list(share.given.ids[:64]),
                }
                for share in self.shares
            ],
            "findings": [finding.to_json() for finding in self.findings],
            "notes": [finding.to_json() for finding in self.notes],
        }


def check_dataset(
    data: Any,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    batch_size: int | None = None,
    drop_last: bool = False,
    num_workers: int = 0,
) -> DataReport:
    """Deal the samples of a dataset, or of a torch DataLoader, out to all ranks and look at it.

    A plain dataset is dealt out as ``DistributedSampler`` does; ``batch_size``, ``drop_last`` and
    ``num_workers`` say what the loader will be like. A DataLoader knows these itself.
    ``world_size`` is by default what the environment or the process group says. With ``rank`` only
    that rank's share is shown; all are compared. ``TypeError`` for a dataset without a length, and
    for a loader whose sampler gives no numbers.
    """
    world = _world_size() if world_size is None else world_size
    if world < 1:
        raise ValueError(f"world_size must be at least 1, not {world}")
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, not {batch_size}")
    if rank is not None and not 0 <= rank < world:
        raise ValueError(f"rank must be at least 0 and less than world_size {world}, not {rank}")
    if hasattr(data, "dataset") and hasattr(data, "batch_sampler"):
        setup, taken = of_loader(data, world)
        dataset = data.dataset
    else:
        length = length_of(data)
        if length is None:
            kind = type(data).__name__
            raise TypeError(f"{kind} has no length: which samples a rank gets cannot be told")
        setup = Setup(length, world, batch_size, drop_last, num_workers)
        each = {r: dealt(length, world, r) for r in range(world)}
        taken = {r: Taken(ids, len(ids)) for r, ids in each.items()}
        dataset = data
    shares = [share_of(r, given, setup.batch_size, setup.drop_last) for r, given in taken.items()]
    handles = [str(handle) for handle in find_handles(dataset) if not handle.forks]
    found = by_weight(judge(setup, shares, handles))
    shown = tuple(share for share in shares if rank is None or share.rank == rank)
    return report(setup, shown, found)


def report(setup: Setup, shares: Sequence[Share], found: Iterable[Finding]) -> DataReport:
    every = tuple(found)
    notes = tuple(f for f in every if f.severity is Severity.NOTE)
    return DataReport(setup, tuple(shares), tuple(f for f in every if f not in notes), notes)


def _world_size() -> int:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_world_size())
    return int(os.environ.get("WORLD_SIZE", "1"))


def _count(length: int) -> str:
    return plural(length, "sample") if length < 10_000 else f"{length:,} samples"
