"""The training whose steps ``doctor.py`` measures, on the CPU and on a GPU.

Each of the two makes its model in a process group of one rank and gives a function that trains a
block of steps and says what a step took.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import median
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as optimizers
from torch.utils.data import DataLoader, TensorDataset, dataloader

BATCH_SIZE = 16
STEPS = 32  # of a block
GPU_WIDTH, GPU_LAYERS, GPU_SECONDS = 4096, 6, 0.005

#: Trains a block of steps: figure → seconds of a step.
Block = Callable[[], dict[str, float]]


def on_cpu(folder: Path) -> Block:
    """A small step over gloo: "cpu" is the CPU time of the thread."""
    torch.set_num_threads(1)
    model = _model(folder, "gloo", [(64, 256), (256, 256), (256, 1)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def block() -> dict[str, float]:
        times: list[float] = []
        loader = _loader(torch.randn(STEPS * BATCH_SIZE, 64))
        began = time.thread_time()
        for x in loader:
            optimizer.zero_grad()
            loss = model(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            dist.all_reduce(loss.detach())
            now = time.thread_time()
            times.append(now - began)
            began = now
        return {"cpu": median(times[2:])}  # the first find cold caches

    return block


def on_gpu(folder: Path) -> Block:
    """A step of 5 ms over NCCL, in bfloat16.

    "cpu" is the CPU time of handing one over while the GPU is idle; "clock" what a step takes when
    the GPU always has the next.
    """
    if not torch.cuda.is_available():
        raise SystemExit("--gpu needs a GPU that torch can use")
    torch.cuda.set_device(0)
    model = _model(folder, "nccl", [(GPU_WIDTH, GPU_WIDTH)] * GPU_LAYERS, "cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    tokens = 64  # a sample

    def step(ids: Any, table: Any) -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            x = table[ids.to("cuda", non_blocking=True)].flatten(0, 1)
            loss = model(x).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss.detach())

    def block() -> dict[str, float]:
        table = torch.randn(2 * BATCH_SIZE, tokens, GPU_WIDTH, device="cuda", dtype=torch.bfloat16)
        loader = _loader(torch.arange(2 * STEPS * BATCH_SIZE) % len(table))
        handing_over: list[float] = []
        torch.cuda.synchronize()
        began_clock, began = time.perf_counter(), time.thread_time()
        for index, ids in enumerate(loader):
            step(ids, table)
            if index < STEPS:
                handing_over.append(time.thread_time() - began)
                torch.cuda.synchronize()
                began_clock, began = time.perf_counter(), time.thread_time()
        torch.cuda.synchronize()
        clock = (time.perf_counter() - began_clock) / STEPS
        return {"cpu": median(handing_over[2:]), "clock": clock}

    for _ in range(4):  # as much work as takes the GPU 5 ms
        tokens = max(16, round(tokens * GPU_SECONDS / block()["clock"] / 16) * 16)
    return block


def _model(folder: Path, backend: str, sizes: list[tuple[int, int]], device: str = "cpu") -> Any:
    torch.manual_seed(0)
    store = dist.FileStore(str(folder / "store"), 1)
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    layers: list[torch.nn.Module] = []
    for index, (inputs, outputs) in enumerate(sizes):
        layers += [torch.nn.ReLU()] * (index > 0) + [torch.nn.Linear(inputs, outputs)]
    return DistributedDataParallel(torch.nn.Sequential(*layers).to(device))


def leave() -> None:
    """Leave the process group."""
    dist.destroy_process_group()


@contextlib.contextmanager
def as_it_is() -> Iterator[None]:
    """Within it torch has its own functions again, not those that ``attach`` put in their place."""
    base = dataloader._BaseDataLoaderIter
    places: list[tuple[Any, str]] = [
        (torch.autograd, "backward"),
        (dist, "all_reduce"),
        (DistributedDataParallel, "forward"),
        (DataLoader, "__iter__"),
        (base, "__next__"),
        (base, "_next_index"),
    ]
    changed = [(owner, name, getattr(owner, name)) for owner, name in places]
    hooks = optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks
    kept = [dict(those) for those in hooks]
    for owner, name, function in changed:
        setattr(owner, name, function.__wrapped__)
    for those in hooks:
        those.clear()
    try:
        yield
    finally:
        for owner, name, function in changed:
            setattr(owner, name, function)
        for those, mine in zip(hooks, kept, strict=True):
            those.update(mine)


def _loader(values: Any) -> Any:
    return DataLoader(TensorDataset(values), batch_size=BATCH_SIZE, collate_fn=_first)


def _first(samples: list[Any]) -> Any:
    return torch.stack([sample[0] for sample in samples])
