"""The state of a split model as that of the whole one, and back.

Every weight and every number of the optimizer is saved under the name its weight has in the whole
model and in its whole shape. So a checkpoint knows nothing of the layout it was written on: it
loads on any other, on one worker, or into the plain model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from miniray.train.ranks.mesh import cut_numbers, put_weights, whole, whole_numbers

#: Settings of an optimizer that depend on how weights are cut, not on the run.
_OF_THE_LAYOUT = ("foreach", "fused")


def weights_of(modules: Mapping[int, Any]) -> dict[int, dict[str, Any]]:
    """{stage: {name: weight in one piece}}"""
    return {
        stage: {name: whole(value) for name, value in module.state_dict().items()}
        for stage, module in modules.items()
    }


def load_weights(modules: Mapping[int, Any], weights: Mapping[str, Any]) -> None:
    """Take this rank's part of the whole model's weights.

    ``ValueError`` where one is missing or has another shape.
    """
    for module in modules.values():
        put_weights(module.state_dict(), weights)


def merged_weights(parts: Iterable[Mapping[int, Mapping[str, Any]]]) -> dict[str, Any]:
    """The whole model's weights, in the order of its stages, from what the ranks gave."""
    by_stage: dict[int, Mapping[str, Any]] = {}
    for part in parts:
        by_stage.update(part)
    return {name: value for _, part in sorted(by_stage.items()) for name, value in part.items()}


# -- the optimizer ---------------------------------------------------------------------------------


def _names(modules: Mapping[int, Any]) -> dict[Any, str]:
    return {p: name for module in modules.values() for name, p in module.named_parameters()}


def optimizer_state(optimizer: Any, modules: Mapping[int, Any]) -> dict[str, Any]:
    """``{"groups": settings, "state": {name: numbers}}`` of this rank, in one piece."""
    names = _names(modules)
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    state = {names[parameter]: whole_numbers(v) for parameter, v in optimizer.state.items()}
    return {"groups": groups, "state": state}


def merged_optimizer(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The optimizer's state for all weights, from that of each rank."""
    state: dict[str, Any] = {}
    for part in parts:
        state.update(part["state"])
    return {"groups": parts[0]["groups"], "state": state}


def load_optimizer(optimizer: Any, modules: Mapping[int, Any], saved: Mapping[str, Any]) -> None:
    """Take this rank's part of what ``merged_optimizer`` gave."""
    if len(saved["groups"]) != len(optimizer.param_groups):
        raise ValueError(
            f"the state has {len(saved['groups'])} groups of parameters, this optimizer has "
            f"{len(optimizer.param_groups)}"
        )
    for group, settings in zip(optimizer.param_groups, saved["groups"], strict=True):
        group.update({k: v for k, v in settings.items() if k not in _OF_THE_LAYOUT})
    for parameter, name in _names(modules).items():
        values = saved["state"].get(name)
        if values is not None:
            mine = cut_numbers(parameter, values)
            # Not what was saved itself: optimizers change their numbers in place.
            optimizer.state[parameter] = copy.deepcopy(mine)
