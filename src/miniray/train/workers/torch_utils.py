"""Functions that ``TorchWorker`` and ranks share: steps, means, schedulers, measurements, state."""

from __future__ import annotations

import contextlib
import inspect
import math
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from numbers import Number
from typing import Any

import numpy as np

# -- steps -----------------------------------------------------------------------------------------


def device_of(model: Any) -> Any:
    """Return the device of the model's first parameter, or None if it has no parameters."""
    first = next(iter(model.parameters()), None)
    return None if first is None else first.device


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


def configure_scheduler(worker: Any, total_steps: int | None) -> None:
    """Set ``worker.scheduler`` to the result of its ``configure_scheduler``, if it has one."""
    if hasattr(worker, "configure_scheduler"):
        worker.scheduler = worker.configure_scheduler(worker.optimizer, total_steps)


def get_scheduler_interval(worker: Any) -> str | None:
    """Return when ``worker.scheduler`` is stepped, ``"epoch"`` or ``"step"``; None without one.

    That of ``configure_scheduler`` is stepped after each step, unless the class says otherwise.
    """
    if getattr(worker, "scheduler", None) is None:
        return None
    default = "step" if hasattr(worker, "configure_scheduler") else "epoch"
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


def step_schedule(scheduler: Any) -> None:
    """Step the learning rate scheduler after an optimizer step.

    A ``OneCycleLR`` raises an error if it is stepped after its end, which would end a run that has
    more steps than were planned, for example because it continues on fewer workers. Its learning
    rate stays at the minimum instead.
    """
    from torch.optim.lr_scheduler import OneCycleLR

    if not isinstance(scheduler, OneCycleLR):
        scheduler.step()
        return
    if scheduler.last_epoch < scheduler.total_steps:
        scheduler.step()
    else:
        warnings.warn(
            f"the OneCycleLR has ended after total_steps={scheduler.total_steps}: training "
            "continues with its minimum learning rate",
            stacklevel=2,
        )
    if scheduler.last_epoch >= scheduler.total_steps:  # torch goes beyond the minimum here
        for group in scheduler.optimizer.param_groups:
            group["lr"] = group["min_lr"]


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
    version, numbers, gauss = random.getstate()
    return {
        "python": (version, np.array(numbers, np.uint32), gauss),  # an array is stored quickly
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
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(map(int, numbers)), gauss))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all(state["cuda"])
