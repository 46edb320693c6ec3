"""A user's model as a row of layers that can be built one by one.

A list of layers, or of functions that make them, is a row already, and so is ``nn.Sequential``. Any
other module is traced by torch (``torch.distributed.pipelining.pipeline``) and cut between the
members of its longest list of submodules; what comes before goes to the first stage, what comes
after to the last. Names of weights are those of the model in one piece: of a list, as in
``nn.Sequential(*layers)``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

__all__ = ["ListedLayers", "TracedLayers", "build_model", "read_layers", "seeded"]


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, torch's random numbers begin at ``seed``; outside nothing has changed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def build_model(model: Any, seed: int) -> Any:
    """What the user gave as the model, made now if it was a function. Equal on all ranks."""
    if isinstance(model, (nn.Module, list, tuple)):
        return model
    with seeded(seed):
        built = model()
    if not isinstance(built, (nn.Module, list, tuple)):
        raise TypeError(
            "model= must be a torch.nn.Module, a list of layers, or a function that returns one; "
            f"{_named(model)} returned a {type(built).__name__}"
        )
    return built


def read_layers(model: Any, seed: int) -> ListedLayers | TracedLayers:
    """``model`` as a row of layers. ``TypeError`` for what is none and cannot be cut."""
    built = build_model(model, seed)
    if isinstance(built, nn.Sequential):
        return ListedLayers(list(built._modules), list(built), seed)
    if isinstance(built, (list, tuple)):
        return ListedLayers([str(i) for i in range(len(built))], built, seed)
    return TracedLayers(built)


class ListedLayers:
    """Layers that follow one another. ``names`` are those of their weights' first part."""

    traced = False

    def __init__(self, names: Sequence[str], layers: Sequence[Any], seed: int) -> None:
        self.names = list(names)
        self._layers = list(layers)
        self._seed = seed
        if not self._layers:
            raise ValueError("model= has no layers")
        for name, layer in zip(self.names, self._layers, strict=True):
            if not isinstance(layer, nn.Module) and not callable(layer):
                raise TypeError(
                    f"layer {name} must be a torch.nn.Module or a function that makes one, not "
                    f"{layer!r}"
                )

    def __len__(self) -> int:
        return len(self._layers)

    def build(self, index: int) -> Any:
        """Layer ``index``; if it is made by a function, with a seed of its own."""
        layer = self._layers[index]
        if isinstance(layer, nn.Module):
            return layer
        with seeded(self._seed + index):
            built = layer()
        if not isinstance(built, nn.Module):
            raise TypeError(
                f"layer {self.names[index]}: {_named(layer)} must return a torch.nn.Module, not a "
                f"{type(built).__name__}"
            )
        return built

    def stages(self, bounds: Sequence[tuple[int, int]], wanted: Sequence[int], sample: Any) -> Any:
        """{stage: its module} for the stages in ``wanted``; no other layer is built."""
        del sample
        return {
            stage: nn.Sequential(
                dict_of((self.names[i], self.build(i)) for i in range(*bounds[stage]))
            )
            for stage in wanted
        }


class TracedLayers:
    """A module of any form, cut between the members of its longest list of submodules."""

    traced = True

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        name, found = _longest_list(model)
        if len(found) < 2:
            raise TypeError(
                f"{type(model).__name__} has no list of layers to cut between; pass the layers as "
                "a list, or use nn.Sequential or nn.ModuleList inside of the model"
            )
        self.names = [f"{name}.{key}" if name else key for key in found]

    def __len__(self) -> int:
        return len(self.names)

    def build(self, index: int) -> Any:
        return self.model.get_submodule(self.names[index])

    def stages(self, bounds: Sequence[tuple[int, int]], wanted: Sequence[int], sample: Any) -> Any:
        """{stage: its module}, as torch has cut the model for micro-batches like ``sample``."""
        from torch.distributed.pipelining import SplitPoint, pipeline

        cuts = {self.names[low]: SplitPoint.BEGINNING for low, _ in bounds[1:]}
        try:
            pipe = pipeline(self.model, mb_args=tuple(sample), split_spec=cuts)
        except Exception as error:
            raise TypeError(
                f"torch cannot trace {type(self.model).__name__} to cut it into stages; pass its "
                f"layers as a list instead ({type(error).__name__}: {error!s:.300})"
            ) from error
        _check_chain(pipe, type(self.model).__name__)
        return {stage: pipe.get_stage_module(stage) for stage in wanted}


def _check_chain(pipe: Any, model: str) -> None:
    """Refuse a model in which a stage needs more than the one before it gives: one tensor."""
    before: Any = None
    for node in pipe.split_gm.graph.nodes:
        if node.op != "call_module":
            continue
        if before is not None and list(node.all_input_nodes) != [before]:
            raise TypeError(
                f"a stage of {model} needs {[n.name for n in node.all_input_nodes]}, not only the "
                "one tensor that the stage before it gives; pass the layers as a list in which "
                "each takes the output of the one before"
            )
        before = node


def _longest_list(model: nn.Module) -> tuple[str, list[str]]:
    best: tuple[str, list[str]] = ("", [])
    for name, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > len(best[1]):
            best = (name, list(module._modules))
    return best


def dict_of(pairs: Any) -> Any:
    """An ordered dict, as ``nn.Sequential`` wants it to keep the names."""
    from collections import OrderedDict

    return OrderedDict(pairs)


def _named(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__)
