"""What is known of a rank's training: steps, samples, loaders, models, its GPU. See ``model``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import NamedTuple


class Site(NamedTuple):
    """A line of the user's code: the first frame outside of torch, miniray and the like."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line}" if self.file else "?"


NOWHERE = Site("", 0, "")


def site_from(text: str) -> Site:
    """Return the site of the text that the recorder keeps, "file\\0line\\0function"."""
    file, _, rest = text.partition("\0")
    line, _, function = rest.partition("\0")
    number = int(line) if line.isascii() and line.isdigit() and len(line) < 10 else 0
    return Site(file, number, function) if file else NOWHERE


@dataclasses.dataclass(frozen=True)
class Steps:
    """Times of one step, or sums over several consecutive ones.

    ``seconds`` is from the end of the step before to the end of this one and is the sum of the four
    parts. A rank that others wait for has large ``data`` or ``compute``; those that wait have large
    ``backward`` (DDP averages gradients in there) or ``collective``.
    """

    step: int  #: number of the last step (the first step of an attempt is 1)
    count: int  #: number of steps
    epoch: int
    ended: float
    seconds: float
    data: float  #: waiting for the DataLoader
    backward: float
    collective: float  #: inside collectives called from Python, and barriers
    loss: float | None  #: of the last step
    batch_size: int  #: of the last step
    attempt: int = 0  #: number of the attempt; a rank that is restarted begins the next one

    @property
    def compute(self) -> float:
        """What is left: forward, optimizer and the user's own code."""
        return max(0.0, self.seconds - self.data - self.backward - self.collective)


@dataclasses.dataclass(frozen=True)
class SamplePass:
    """Which samples one pass over one loader had. Compare passes of equal (loader, epoch)."""

    loader: int  #: index into ``RankRecord.loaders``; -1 for ids given to ``doctor.step``
    epoch: int  #: how many passes over this loader the rank had begun before
    count: int  #: samples so far, repeated ones included
    ids: tuple[int, ...]  #: the first 4096, in their order

    @property
    def is_exact(self) -> bool:
        """Whether ``ids`` has all of them."""
        return self.count == len(self.ids)


@dataclasses.dataclass(frozen=True)
class Loader:
    """One ``torch.utils.data.DataLoader`` the rank iterated, in the order of first use."""

    index: int
    dataset: str  #: its type's name
    length: int | None  #: len(dataset); None for an iterable one
    batches: int | None  #: len(loader)
    batch_size: int | None
    num_workers: int
    drop_last: bool
    persistent_workers: bool
    sampler: str  #: "DistributedSampler", "RandomSampler", "SequentialSampler", ...
    replicas: int | None  #: the sampler's num_replicas, where it has them
    sampler_rank: int | None
    shuffle: bool | None
    seed: int | None
    set_epoch_calls: int
    passes: int  #: passes begun
    finished: int  #: passes run to the end
    last_batches: int  #: batches of the last finished pass
    empty_batches: int
    trained: bool  #: a backward happened during a pass
    #: Digests of the tensors in the first batch of the first pass. Two ranks with equal ids but
    #: different digests number different data alike (each has a part of its own).
    first_batch: tuple[str, ...]
    site: Site


@dataclasses.dataclass(frozen=True)
class Model:
    """One model wrapped in DistributedDataParallel."""

    name: str
    parameters: int  #: parameter tensors that need a gradient
    elements: int
    digest: str  #: of names, shapes and dtypes, in order: equal on all ranks, or the models differ
    names: tuple[str, ...]  #: "weight (4, 8) float32", the first 64
    buffers: int
    find_unused: bool
    static_graph: bool
    device: str
    site: Site
    #: Parameters that got no gradient in the last backward that was looked at, and its step.
    unused: tuple[str, ...]
    unused_step: int


@dataclasses.dataclass(frozen=True)
class Gpu:
    """NVML's figures of the rank's GPU. Utilisation reads 100 % on hung NCCL jobs; power tells."""

    index: int  #: as NVML numbers them, whatever CUDA_VISIBLE_DEVICES says
    name: str
    uuid: str
    memory_used: int  #: bytes in use on the GPU by all processes
    memory_total: int
    process_memory: int  #: bytes torch's allocator holds in this process
    utilisation: int  #: per cent
    power: float  #: watts
    power_limit: float


@dataclasses.dataclass(frozen=True)
class NonFinite:
    """The first loss that was NaN or infinite."""

    step: int
    epoch: int
    value: float
    samples: tuple[int, ...]  #: ids of the batch, where known
    site: Site
    at: float
