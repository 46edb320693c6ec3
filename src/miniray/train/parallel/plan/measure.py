"""Costs of layers: time of a microbatch forward and backward, weights, kept activations.

They are measured once, on one rank, with a microbatch of the user's data, before anything is split.
Gradients, running statistics and random numbers of the layers don't change. A layer whose output
isn't one tensor, or a loss that isn't one number, raises ``TypeError``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from miniray.train.lockstep.mesh import local
from miniray.train.parallel.plan.layers import ListedLayers, TracedLayers

_REPEATS = 3


@dataclasses.dataclass(frozen=True)
class LayerCost:
    """Costs of a layer: ``seconds`` of a microbatch in both directions, bytes of activations."""

    name: str
    parameters: int
    parameter_bytes: int
    seconds: float
    activations: int


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):  # type: ignore[misc]
    """Counts the bytes that autograd keeps for backward passes of the code in its context.

    Every storage is counted once. ``known`` are tensors that aren't counted, such as weights.
    """

    def __init__(self, known: Sequence[torch.Tensor] = ()) -> None:
        super().__init__(self._pack, lambda tensor: tensor)
        self.bytes = 0
        self._seen = {_storage(tensor) for tensor in known}

    def __enter__(self) -> SavedBytes:
        super().__enter__()
        return self

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        plain = _plain(tensor)
        key = _storage(plain)
        if key not in self._seen:
            self._seen.add(key)
            self.bytes += plain.untyped_storage().nbytes()
        # Detach outputs, which would otherwise keep their graph alive.
        return tensor if tensor.is_leaf else tensor.detach()


def _plain(tensor: Any) -> Any:
    """Return this rank's part of a DTensor, or the tensor that a collective will fill."""
    mine = local(tensor)
    return getattr(mine, "elem", mine)


def _storage(tensor: Any) -> int:
    return int(_plain(tensor).untyped_storage().data_ptr())


def measure(
    layers: ListedLayers | TracedLayers, inputs: Sequence[Any], target: Any, loss: Any, device: Any
) -> list[LayerCost]:
    """Return the cost of every layer. Raise ``TypeError`` if one can't be trained."""
    with torch.random.fork_rng():
        if isinstance(layers, TracedLayers):
            costs, output = _measure_traced(layers, inputs, device)
        else:
            costs, output = _measure_listed(layers, inputs, device)
        check_value(loss(output, target))
    return costs


def _measure_listed(
    layers: ListedLayers, inputs: Sequence[Any], device: Any
) -> tuple[list[LayerCost], Any]:
    costs: list[LayerCost] = []
    alike: dict[str, list[int]] = {}
    values = tuple(inputs)
    for index, name in enumerate(layers.names):
        layer = layers.build(index).to(device)
        with preserve_state(layer):
            layer.train()
            values = tuple(
                v.detach().requires_grad_(v.is_floating_point() and index > 0) for v in values
            )
            what = f"layer {name} ({type(layer).__name__})"
            try:
                with SavedBytes(list(layer.parameters())) as saved:
                    output = layer(*values)
            except RuntimeError as error:  # torch's, of shapes that do not fit: it names no layer
                given = ", ".join(str(tuple(value.shape)) for value in values)
                raise RuntimeError(f"{what} fails on an input of shape {given}: {error}") from error
            check_output(output, what)
            seconds = min(_time_once(layer, values, device) for _ in range(_REPEATS))
        costs.append(_cost(name, list(layer.parameters()), seconds, saved.bytes))
        shapes = [tuple(value.shape) for value in (*values, *layer.parameters())]
        alike.setdefault(f"{layer!r} {shapes}", []).append(index)
        values = (output,)
    # Equal layers take equally long. Differences are noise.
    for indices in alike.values():
        best = min(costs[i].seconds for i in indices)
        for i in indices:
            costs[i] = dataclasses.replace(costs[i], seconds=best)
    return costs, values[0]


def _time_once(layer: nn.Module, values: tuple[Any, ...], device: Any) -> float:
    _wait_for(device)
    began = time.perf_counter()
    output = layer(*values)
    wanted = [t for t in (*values, *layer.parameters()) if t.requires_grad]
    if wanted and output.requires_grad:
        torch.autograd.grad(output, wanted, torch.ones_like(output), allow_unused=True)
    _wait_for(device)
    return time.perf_counter() - began


def _measure_traced(
    layers: TracedLayers, inputs: Sequence[Any], device: Any
) -> tuple[list[LayerCost], Any]:
    """Measure the layers in the whole model. Its start and end are part of the outer layers."""
    model = layers.model.to(device)
    began: dict[str, float] = {}
    ended: dict[str, float] = {}
    handles = []
    for name in layers.names:
        module = model.get_submodule(name)
        handles.append(module.register_forward_pre_hook(_marker(began, name, device)))
        handles.append(module.register_forward_hook(_marker(ended, name, device)))
    try:
        with preserve_state(model):
            model.train()
            model(*inputs)
            start = time.perf_counter()
            with SavedBytes(list(model.parameters())) as saved:
                output = model(*inputs)
            _wait_for(device)
            end = time.perf_counter()
    finally:
        for handle in handles:
            handle.remove()
    check_output(output, f"the model ({type(model).__name__})")
    silent = [name for name in layers.names if name not in ended]
    if silent:
        raise TypeError(f"{silent[0]} is never called by {type(model).__name__}.forward()")
    costs = []
    for index, name in enumerate(layers.names):
        low = start if index == 0 else began[name]
        high = end if index == len(layers.names) - 1 else ended[name]
        # Backward is about twice forward; only the proportions matter.
        weights = [weight for _, weight in layers.weights_of(index)]
        share = saved.bytes // len(layers.names)
        costs.append(_cost(name, weights, 3 * (high - low), share))
    return costs, output


def _marker(times: dict[str, float], name: str, device: Any) -> Callable[..., None]:
    def mark(*_: Any) -> None:
        _wait_for(device)
        times[name] = time.perf_counter()

    return mark


def _cost(name: str, weights: Sequence[Any], seconds: float, activations: int) -> LayerCost:
    count, size = sum(w.numel() for w in weights), sum(w.nbytes for w in weights)
    return LayerCost(name, count, size, seconds, activations)


def check_output(output: Any, what: str) -> None:
    """Raise ``TypeError`` unless the output is one tensor, which can be sent to the next stage."""
    if not isinstance(output, torch.Tensor):
        raise TypeError(
            f"{what} must return one tensor, because stages send one tensor to the next stage, not "
            f"a {type(output).__name__}. Return only the tensor (output[0], output.logits), and "
            "recompute other values in the layers that need them"
        )


def check_value(value: Any) -> None:
    """Raise ``TypeError`` unless a loss is a number that depends on the model."""
    if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.requires_grad:
        what = f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else ""
        raise TypeError(
            "loss(output, target) must return a scalar tensor that depends on the model, not "
            f"{what or repr(value)[:80]}"
        )


@contextlib.contextmanager
def preserve_state(module: nn.Module) -> Iterator[None]:
    """Restore the buffers and the mode of the module at the end of the context."""
    training, kept = module.training, {k: b.clone() for k, b in module.named_buffers()}
    try:
        yield
    finally:
        module.train(training)
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                if name in kept and not torch.equal(buffer, kept[name]):
                    buffer.copy_(kept[name])


def _wait_for(device: Any) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
