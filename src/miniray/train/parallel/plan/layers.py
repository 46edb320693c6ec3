"""A user's model as a sequence of layers that can be built separately.

Lists of layers, lists of functions that return layers, and ``nn.Sequential`` are used as they are.
Any other module is traced by torch (``torch.distributed.pipelining.pipeline``) and divided between
the members of its longest list of submodules. Modules before this list belong to the first stage,
modules after it to the last. Weights have their names in the whole model; those of a list are named
as in ``nn.Sequential(*layers)``.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn


@contextlib.contextmanager
def seed_context(seed: int) -> Iterator[None]:
    """Return a context with torch's random numbers seeded. They are restored at its end."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def build_model(model: Any, seed: int) -> Any:
    """Return the model, or the result of the function that was passed. Equal on all ranks."""
    if isinstance(model, (nn.Module, list, tuple)):
        return model
    with seed_context(seed):
        built = model()
    if not isinstance(built, (nn.Module, list, tuple)):
        raise TypeError(
            "model= must be a torch.nn.Module, a list of layers, or a function that returns one; "
            f"{_get_name(model)} returned a {type(built).__name__}"
        )
    return built


def read_layers(model: Any, seed: int) -> ListedLayers | TracedLayers:
    """Return ``model`` as a sequence of layers. Raise ``TypeError`` if it can't be divided."""
    built = build_model(model, seed)
    if isinstance(built, nn.Sequential):
        return ListedLayers(list(built._modules), list(built), seed)
    if isinstance(built, (list, tuple)):
        return ListedLayers([str(i) for i in range(len(built))], built, seed)
    return TracedLayers(built)


def whole_model(model: Any, seed: int) -> nn.Module:
    """Return ``model`` as one module, with the names that its weights have in checkpoints."""
    built = build_model(model, seed)
    if isinstance(built, nn.Module):
        return built
    layers = ListedLayers([str(i) for i in range(len(built))], built, seed)
    return layers.row(0, len(layers))


class LayerSequence(nn.Sequential):  # type: ignore[misc]
    """Layers that follow one another. The first can have several inputs."""

    def forward(self, *inputs: Any) -> Any:
        for layer in self:
            inputs = (layer(*inputs),)
        return inputs[0]


class ListedLayers:
    """Layers that follow one another. ``names`` are the first parts of their weights' names."""

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
                    f"layer {name} must be a torch.nn.Module or a function that creates one, not "
                    f"{layer!r}"
                )

    def __len__(self) -> int:
        return len(self._layers)

    def build(self, index: int) -> Any:
        """Return layer ``index``. A function that returns it is called with a separate seed."""
        layer = self._layers[index]
        if isinstance(layer, nn.Module):
            return layer
        with seed_context(self._seed + index):
            built = layer()
        if not isinstance(built, nn.Module):
            raise TypeError(
                f"layer {self.names[index]}: {_get_name(layer)} must return a "
                f"torch.nn.Module, not a {type(built).__name__}"
            )
        return built

    def weights_of(self, index: int) -> list[tuple[str, Any]]:
        """Return names and weights of a layer that exists, and so can share them with others."""
        layer = self._layers[index]
        if not isinstance(layer, nn.Module):
            return []
        return list(layer.named_parameters(prefix=self.names[index]))

    def row(self, low: int, high: int) -> LayerSequence:
        """Return layers [low, high), with the names of their weights in the whole model."""
        return LayerSequence(OrderedDict((self.names[i], self.build(i)) for i in range(low, high)))

    def stages(self, bounds: Sequence[tuple[int, int]], wanted: Sequence[int], sample: Any) -> Any:
        """Return the modules of the stages in ``wanted``. No other layer is built."""
        del sample
        return {stage: self.row(*bounds[stage]) for stage in wanted}


class TracedLayers:
    """Any module, split between the members of its longest list of submodules."""

    traced = True

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        name, found = _longest_list(model)
        if len(found) < 2:
            raise TypeError(
                f"{type(model).__name__} has no list of layers that can be split into stages. Pass "
                "the layers as a list, or use nn.Sequential or nn.ModuleList in the model"
            )
        self.names = [f"{name}.{key}" if name else key for key in found]

    def __len__(self) -> int:
        return len(self.names)

    def build(self, index: int) -> Any:
        return self.model.get_submodule(self.names[index])

    def weights_of(self, index: int) -> list[tuple[str, Any]]:
        """Return names and weights of a layer.

        The first layer includes the weights that the model defines before it, the last those after.
        """
        return self._weights[index]

    @functools.cached_property
    def _weights(self) -> list[list[tuple[str, Any]]]:
        found: list[list[tuple[str, Any]]] = [[] for _ in self.names]
        into = found[0]
        for name, weight in self.model.named_parameters(remove_duplicate=False):
            mine = [i for i, layer in enumerate(self.names) if name.startswith(f"{layer}.")]
            (found[mine[0]] if mine else into).append((name, weight))
            into = found[-1] if mine else into
        return found

    def stages(
        self,
        bounds: Sequence[tuple[int, int]],
        wanted: Sequence[int],
        sample: Any,
        training: bool = True,
    ) -> Any:
        """Return the modules of stages that torch has traced for microbatches like ``sample``.

        They work for this number of samples only, and always use dropout or never, whatever the
        mode of the module.
        """
        from torch.distributed.pipelining import SplitPoint, pipeline

        self.model.train(training)
        cuts = {self.names[low]: SplitPoint.BEGINNING for low, _ in bounds[1:]}
        try:
            pipe = pipeline(self.model, mb_args=tuple(sample), split_spec=cuts)
        except Exception as error:
            raise TypeError(
                f"torch can't trace {type(self.model).__name__} to split it into stages. Pass its "
                f"layers as a list instead ({type(error).__name__}: {error!s:.300})"
            ) from error
        finally:
            for name in cuts:  # torch has marked them; the next time it would do so again
                layer = self.model.get_submodule(name)
                layer.forward = vars(layer).pop("_orig_forward", layer.forward)
        _check_chain(pipe, type(self.model).__name__)
        stages = {stage: pipe.get_stage_module(stage) for stage in wanted}
        saved = self.model.state_dict()
        for module in stages.values():
            for name, _ in module.named_buffers():
                if name not in saved:  # torch makes all of them such that are saved
                    owner, _, key = name.rpartition(".")
                    module.get_submodule(owner)._non_persistent_buffers_set.add(key)
        return stages

    def create_evaluation_stages(
        self,
        bounds: Sequence[tuple[int, int]],
        modules: Mapping[int, Any],
        sample: Any,
        device: Any,
    ) -> Any:
        """Return stages with the weights of ``modules``, traced for evaluations."""
        # A copy: the user's module may have weights in common with ``modules``, on their device.
        whole = TracedLayers(copy.deepcopy(self.model).cpu())
        stages = whole.stages(bounds, list(modules), sample, training=False)
        known = _weights(self.model)  # not what torch has made of numbers in the code
        for stage, module in stages.items():
            trained = _weights(modules[stage])
            for name, part in module.to(device).named_modules():
                for own in (part._parameters, part._buffers):
                    for key in own:
                        full = f"{name}.{key}".lstrip(".")
                        if full in known:
                            own[key] = trained.get(full, own[key])
        return stages


def _weights(module: nn.Module) -> dict[str, Any]:
    """Return parameters and buffers by name, with all names of shared ones."""
    options = {"remove_duplicate": False}
    return {**dict(module.named_parameters(**options)), **dict(module.named_buffers(**options))}


def _check_chain(pipe: Any, model: str) -> None:
    """Raise ``TypeError`` if a stage needs more than the one tensor of the previous stage."""
    before: Any = None
    for node in pipe.split_gm.graph.nodes:
        if node.op != "call_module":
            continue
        if before is not None and list(node.all_input_nodes) != [before]:
            raise TypeError(
                f"a stage of {model} needs {[n.name for n in node.all_input_nodes]}, but a stage "
                "receives only the output tensor of the previous stage. Pass the layers as a list "
                "in which the input of each layer is the output of the previous one"
            )
        before = node


def _longest_list(model: nn.Module) -> tuple[str, list[str]]:
    best: tuple[str, list[str]] = ("", [])
    for name, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > len(best[1]):
            best = (name, list(module._modules))
    return best


def _get_name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__)
