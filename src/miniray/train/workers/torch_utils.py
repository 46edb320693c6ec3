"""Functions of ``TorchWorker``: sharding of loaders, batches, means and state."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import math
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from numbers import Number
from typing import Any

import numpy as np

_EVAL_BATCH = 256


# -- loaders ---------------------------------------------------------------------------------------


def shard(loader: Any, shard_id: int, num_shards: int) -> Any:
    """Return a loader like this one over the rows of one shard.

    These are the rows ``shard_id``, ``shard_id + num_shards``, … of a torch loader. A loader of
    miniray.data shards itself unless it was created with ``rank`` and ``world_size``. Every row is
    in exactly one shard. Raise ``TypeError`` for a loader that can't be sharded.
    """
    from torch.utils.data import (
        BatchSampler,
        DataLoader,
        IterableDataset,
        RandomSampler,
        SequentialSampler,
        Subset,
    )

    if num_shards == 1:
        return loader
    if is_shardable(loader):
        return loader if loader.is_sharded else loader.shard(shard_id, num_shards)
    if is_over_shard(loader):
        return loader
    problem = ""
    if not isinstance(loader, DataLoader):
        problem = f"it is a {type(loader).__name__}"
    elif isinstance(loader.dataset, IterableDataset):
        problem = "its dataset is an IterableDataset"
    elif loader.batch_size is None:
        problem = "it has no batch_size, or a custom batch sampler"
    elif type(loader.sampler) not in (RandomSampler, SequentialSampler) or (
        isinstance(loader.sampler, RandomSampler)
        and (loader.sampler.replacement or len(loader.sampler) != len(loader.dataset))
    ):
        problem = "it has a custom sampler"
    if problem:
        raise TypeError(
            f"this loader can't be sharded: {problem}. Implement load_data_shard(self, shard_id, "
            "num_shards) in the worker, and create self.train_loader there"
        )
    rows = Subset(loader.dataset, range(shard_id, len(loader.dataset), num_shards))
    sampler: Any = SequentialSampler(rows)
    if isinstance(loader.sampler, RandomSampler) and len(rows):
        sampler = RandomSampler(rows, generator=loader.sampler.generator)
    batches = BatchSampler(sampler, loader.batch_size, loader.drop_last)
    # Copy the loader, because a subclass may need further arguments. A loader doesn't allow the
    # assignments. Its running processes (persistent_workers) have all rows.
    own = copy.copy(loader)
    vars(own).update(dataset=rows, sampler=sampler, batch_sampler=batches, _iterator=None)
    return own


def describe_custom_sampling(loader: Any) -> str:
    """Return a description of the custom sampling of a loader, or "" if it has none."""
    from torch.utils.data import IterableDataset, RandomSampler, SequentialSampler

    sampler = loader.sampler
    if isinstance(loader.dataset, IterableDataset):
        return f"an IterableDataset ({type(loader.dataset).__qualname__})"
    if loader.batch_sampler is None:
        return "batch_size=None"
    if loader.batch_size is None:
        return f"a custom batch sampler ({type(loader.batch_sampler).__qualname__})"
    if type(sampler) is SequentialSampler or (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and sampler.num_samples == len(loader.dataset)
    ):
        return ""
    return f"a custom sampler ({type(sampler).__qualname__})"


def is_shardable(data: Any) -> bool:
    """Return whether ``data`` is a loader or dataset of miniray.data."""
    return all(hasattr(data, name) for name in ("is_sharded", "has_started", "shard"))


def is_over_shard(loader: Any) -> bool:
    """Return whether a torch loader reads a dataset of miniray.data that is already sharded."""
    data: Any = getattr(loader, "dataset", None)
    return is_shardable(data) and bool(data.is_sharded)


def check_not_started(data: Any, name: str, num_shards: int) -> None:
    """Raise ``ValueError`` if iteration over ``data`` started before it could be sharded."""
    if num_shards > 1 and is_shardable(data) and data.has_started and not data.is_sharded:
        raise ValueError(
            f"{name} was iterated before it was sharded, so each of the {num_shards} workers has"
            " read all rows. Pass rank= and world_size= to its dataset, or iterate over a different"
            " dataset before training"
        )


def loader_over(data: Any, like: Any) -> Any:
    """Return a loader of ``data``: a dataset, a sequence of rows, or columns of tensors."""
    import torch
    from torch.utils.data import DataLoader, StackDataset, TensorDataset

    if isinstance(data, tuple) and all(hasattr(column, "shape") for column in data):
        columns = (c if isinstance(c, torch.Tensor) else torch.tensor(c) for c in data)
        data = TensorDataset(*columns)
    elif isinstance(data, Mapping):
        data = StackDataset(**data)
    size = getattr(like, "batch_size", None) or _EVAL_BATCH
    return DataLoader(data, batch_size=size, collate_fn=getattr(like, "collate_fn", None))


def loader_state(loader: Any, has_position: bool = True) -> dict[str, Any]:
    """Return the loader's position, if it has a ``state_dict``, and its random state."""
    own = loader.state_dict() if has_position and hasattr(loader, "state_dict") else None
    generator = getattr(loader, "generator", None)
    return {
        "own": own,
        "generator": None if generator is None else generator.get_state(),
        "running": getattr(loader, "_iterator", None) is not None,
    }


def load_loader_state(loader: Any, state: Mapping[str, Any]) -> None:
    if state.get("running") and getattr(loader, "persistent_workers", False):
        iter(loader)  # start its processes now, because starting them draws random numbers
    if state["own"] is not None and hasattr(loader, "load_state_dict"):
        loader.load_state_dict(state["own"])
    generator = getattr(loader, "generator", None)
    if state["generator"] is not None and generator is not None:
        generator.set_state(state["generator"])


# -- batches ---------------------------------------------------------------------------------------


def device_of(model: Any) -> Any:
    """Return the device of the model's first parameter, or None if it has no parameters."""
    first = next(iter(model.parameters()), None)
    return None if first is None else first.device


def moved(batch: Any, device: Any) -> Any:
    """Return ``batch`` with all tensors moved to ``device``."""
    if device is None:
        return batch
    if hasattr(batch, "to"):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        there = {key: moved(value, device) for key, value in batch.items()}
        if type(batch) is dict or not isinstance(batch, MutableMapping):
            return there
        own = copy.copy(batch)  # a user's class, which may have further attributes
        own.update(there)
        return own
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(moved(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(moved(value, device) for value in batch)
    if _is_record(batch):
        own = copy.copy(batch)
        for name, value in vars(batch).items():
            object.__setattr__(own, name, moved(value, device))  # also if it is frozen
        return own
    return batch


def _is_record(batch: Any) -> bool:
    return dataclasses.is_dataclass(batch) and hasattr(batch, "__dict__")


def count_tokens(batch: Any) -> Any:
    """Return the number of tokens of a batch with ``attention_mask`` or ``input_ids``, else 0.

    It may be a tensor, so that no step waits for a GPU.
    """
    if not isinstance(batch, Mapping):
        return 0
    mask: Any = batch.get("attention_mask")
    ids: Any = batch.get("input_ids")
    if hasattr(mask, "sum"):
        return mask.sum()
    return ids.numel() if hasattr(ids, "numel") else 0


def length(batch: Any) -> int:
    """Return the number of samples of a batch: the length of its first tensor, or of a column."""
    if getattr(batch, "shape", None):
        return int(batch.shape[0])
    if _is_record(batch):
        batch = vars(batch)
    if not isinstance(batch, (Mapping, list, tuple)):
        return 1
    items = list(batch.values() if isinstance(batch, Mapping) else batch)
    for item in items:
        if getattr(item, "shape", None):
            return int(item.shape[0])
    for item in items:
        if isinstance(batch, Mapping) and _is_ragged(item):
            return len(item)
        if isinstance(item, (Mapping, list, tuple)) or hasattr(item, "shape"):
            return length(item)
    return len(batch)


def _is_ragged(column: Any) -> bool:
    """Return whether a column has a list of plain values for each row."""
    first = column[0] if isinstance(column, list) and column else None
    return isinstance(first, list) and not any(hasattr(value, "shape") for value in first[:1])


def step_of(method: Callable[..., Any]) -> Callable[[Any, int], Any]:
    """Return ``method`` as a function of batch and index, even if it accepts only the batch."""
    try:
        inspect.signature(method).bind(None, 0)
    except TypeError:
        return lambda batch, batch_idx: method(batch)
    return method


def as_dict(value: Any, method: str) -> dict[str, Any]:
    """Return the result of a step as a dict. Raise ``TypeError`` if it has no loss."""
    values = dict(value) if isinstance(value, Mapping) else {"loss": value}
    if method == "training_step" and not hasattr(values.get("loss"), "backward"):
        raise TypeError(f"{method}() must return the loss, or a dict with it, not {value!r}")
    return values


class Means:
    """Sums of metrics over samples. Tensors are summed on their device, without a GPU sync."""

    def __init__(self) -> None:
        self._sums: dict[str, Any] = {}
        self._counts: dict[str, Any] = {}
        self._samples = 0

    def add(self, values: Mapping[str, Any], samples: int) -> None:
        """Add values that are means over ``samples``, or pairs of a sum and a count.

        Raises:
            TypeError: A value is neither.
        """
        self._samples += samples
        for name, value in values.items():
            is_pair = isinstance(value, (tuple, list))
            total, count = value if is_pair and len(value) == 2 else (value, samples)
            if not (_is_number(total) and _is_number(count)):
                raise TypeError(
                    f"{name!r} must be a number, the mean over the batch, or a pair (sum, count), "
                    f"not {_describe_value(value)}"
                )
            total = total if is_pair else total * samples
            total = total.detach() if hasattr(total, "detach") else total
            count = count.detach() if hasattr(count, "detach") else count
            self._sums[name] = self._sums.get(name, 0) + total
            self._counts[name] = self._counts.get(name, 0) + count

    @property
    def samples(self) -> int:
        """Number of samples added."""
        return self._samples

    def state_dict(self) -> dict[str, Any]:
        """Return the exact sums, including tensors."""
        return {"sums": dict(self._sums), "counts": dict(self._counts), "samples": self._samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._sums, self._counts = dict(state["sums"]), dict(state["counts"])
        self._samples = state["samples"]

    def sums(self) -> dict[str, Any]:
        """Return a pair of sum and count per metric, and ``num_samples``."""
        names = self._sums
        pairs = {name: (float(self._sums[name]), float(self._counts[name])) for name in names}
        return {**pairs, "num_samples": self._samples}

    def means(self) -> dict[str, Any]:
        """Return the means and ``num_samples``. Metrics without samples are omitted."""
        sums = self.sums()
        del sums["num_samples"]
        means = {name: total / count for name, (total, count) in sums.items() if count}
        return {**means, "num_samples": self._samples}


def _is_number(value: Any) -> bool:
    shape = getattr(value, "shape", None)  # don't read values, which may be on a GPU
    return isinstance(value, Number) if shape is None else math.prod(shape) == 1


def _describe_value(value: Any) -> str:
    if hasattr(value, "shape"):
        return f"a {type(value).__name__} of shape {list(value.shape)}"
    return f"{value!r:.80}"


def get_scheduler_interval(worker: Any, default: str = "epoch") -> str | None:
    """Return when ``worker.scheduler`` is stepped, ``"epoch"`` or ``"step"``; None without one."""
    if getattr(worker, "scheduler", None) is None:
        return None
    interval: str = getattr(worker, "scheduler_interval", default)
    if interval not in ("epoch", "step"):
        raise ValueError(f'scheduler_interval must be "epoch" or "step", not {interval!r}')
    return interval


def step_scheduler(scheduler: Any, loss: float | None) -> None:
    """Step the learning rate scheduler, if there is one, at the end of an epoch.

    A ``ReduceLROnPlateau`` isn't stepped after an epoch without samples, which has no loss.
    """
    if scheduler is None:
        return
    from torch.optim.lr_scheduler import ReduceLROnPlateau

    if not isinstance(scheduler, ReduceLROnPlateau):
        scheduler.step()
    elif loss is not None:
        scheduler.step(loss)


def measure_step(model: Any, optimizer: Any) -> dict[str, float]:
    """Return learning rate, gradient norm and memory after a step."""
    import torch

    group = optimizer.param_groups[0]
    found = {"lr": float(group["lr"])} if "lr" in group else {}
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if gradients:
        found["grad_norm"] = float(torch.nn.utils.get_total_norm(gradients))
    device = device_of(model)
    return {**found, **measure_memory(torch.device("cpu") if device is None else device)}


def measure_memory(device: Any) -> dict[str, float]:
    """Return the memory of this process and its GPU, in MB."""
    import psutil
    import torch

    found = {"memory_mb": psutil.Process().memory_info().rss / 1e6}
    if device.type == "cuda":
        found["gpu_memory_mb"] = torch.cuda.max_memory_allocated(device) / 1e6
    return found


# -- what is saved ---------------------------------------------------------------------------------


def stateful(worker: Any, optimizers_only: bool = False) -> dict[str, Any]:
    """Return the worker's optimizers and learning rate schedulers by attribute name."""
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    kinds = (Optimizer,) if optimizers_only else (Optimizer, LRScheduler)
    return {name: part for name, part in sorted(vars(worker).items()) if isinstance(part, kinds)}


def random_state() -> dict[str, Any]:
    """Return the random states of Python, NumPy and torch."""
    import torch

    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": cuda,
    }


@contextlib.contextmanager
def keep_random_state() -> Iterator[None]:
    """Restore the random states at the end of the block."""
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)


@contextlib.contextmanager
def preserve_state(modules: Iterable[Any], loader: Any) -> Iterator[None]:
    """Restore random states, the modules' buffers and the loader's generator after the block."""
    owners = list(modules)
    buffers = [{k: b.clone() for k, b in module.named_buffers()} for module in owners]
    generator = getattr(loader, "generator", None)
    before = None if generator is None else generator.get_state()
    with keep_random_state():
        yield
    for module, values in zip(owners, buffers, strict=True):
        for name, buffer in module.named_buffers():
            buffer.copy_(values[name])
    if generator is not None:
        generator.set_state(before)


def set_random_state(state: Mapping[str, Any]) -> None:
    torch = sys.modules["torch"]
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all(state["cuda"])
