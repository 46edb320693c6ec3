"""The state of a DDP run besides the weights: what all ranks share, and what is each rank's own.

It is the same whether the model is sharded or not: optimizers' numbers are saved in one piece.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from miniray.train import torch_parts as parts

if TYPE_CHECKING:
    from miniray.train.ddp.rank import Rank


def shared_state(rank: Rank) -> dict[str, Any]:
    """Optimizers, schedulers, buffers, scaler, the order of samples: equal on all ranks.

    A collective where the model is sharded.
    """
    loop = rank.loop
    return {
        "parts": {
            name: rank.part_state(part) for name, part in parts.stateful(rank.worker).items()
        },
        "buffers": {
            f"{name}.{key}": buffer.detach().cpu()
            for name, module in rank.modules.items()
            for key, buffer in module.named_buffers()
        },
        "scaler": None if loop is None else loop.scaler.state_dict(),
        "steps": 0 if loop is None else loop.steps,
        "order": None if rank.plan is None else rank.worker.train_loader.batch_sampler.seed,
    }


def load_shared(rank: Rank, state: Mapping[str, Any]) -> None:
    """Take up what ``shared_state`` gave; ``ValueError`` where the worker has other parts now."""
    mine = parts.stateful(rank.worker)
    if set(mine) != set(state["parts"]):
        raise ValueError(
            f"the state has {sorted(state['parts'])}, this {type(rank.worker).__name__} has "
            f"{sorted(mine)}"
        )
    for name, part in mine.items():
        rank.load_part(part, state["parts"][name])
    for name, module in rank.modules.items():
        for key, buffer in module.named_buffers():
            saved = state["buffers"].get(f"{name}.{key}")
            if saved is not None:
                buffer.copy_(saved)
    if rank.loop is not None:
        if state["scaler"]:
            rank.loop.scaler.load_state_dict(state["scaler"])
        rank.loop.steps = state["steps"]
    if rank.plan is not None and state["order"] is not None:
        rank.worker.train_loader.batch_sampler.seed = state["order"]


def own_state(worker: Any) -> dict[str, Any]:
    """A rank's random numbers, and where its loader is."""
    loader = getattr(worker, "train_loader", None)
    return {"random": parts.random_state(), "loader": parts.loader_state(loader)}


def load_own(worker: Any, state: Mapping[str, Any]) -> None:
    parts.load_loader_state(getattr(worker, "train_loader", None), state["loader"])
    parts.set_random_state(state["random"])
