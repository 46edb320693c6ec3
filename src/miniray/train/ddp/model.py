"""The model of a DDP worker: a transparent wrapper of DistributedDataParallel.

Code written for one process works unchanged: the model's attributes are available, its
``state_dict`` has the original names, and a forward pass without gradients calls no collective.
With plain DDP, validation on rank 0 only would hang, because it broadcasts buffers that no other
rank expects.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from miniray.errors import WeightsMismatchError
from miniray.train.torch_private import PinnedDDP
from miniray.train.workers import torch_utils as parts


class SyncedModel(PinnedDDP):
    """See the module. The backward pass averages gradients over all ranks."""

    forwards = 0  # number of calls with gradients enabled

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.module(*inputs, **kwargs)
        self.forwards += 1
        return super().forward(*inputs, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]

    def __iter__(self) -> Any:
        return iter(self.module)

    def __len__(self) -> int:
        return len(self.module)

    def __bool__(self) -> bool:
        """Return True. torch.compile tests it, and not every model has a ``len``."""
        return True

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def find(user: Any, name: str) -> torch.nn.Module:
    """Return the model that is attribute ``name`` of a worker. Raise ``TypeError`` without one."""
    module = getattr(user, name, None)
    if isinstance(module, torch.nn.Module) and any(p.requires_grad for p in module.parameters()):
        return module
    found = [k for k, v in vars(user).items() if isinstance(v, torch.nn.Module)]
    there = f"found: {', '.join(found)}" if found else "found no torch modules"
    raise TypeError(
        f"{type(user).__name__}.{name} must be a torch.nn.Module with trainable parameters that "
        f"is created in __init__ or load_data_shard ({there}). For other attributes, pass "
        'DDPTrainer(models=("generator", "discriminator"))'
    )


def check_optimizers(user: Any, modules: Mapping[str, torch.nn.Module]) -> None:
    """Raise ``ValueError`` if an optimizer trains parameters whose gradients aren't averaged.

    This happens if a model was replaced after its optimizer was created, or isn't in ``models``.
    """
    known = {parameter for module in modules.values() for parameter in module.parameters()}
    names = " and ".join(f"self.{name}" for name in modules)
    for name, optimizer in parts.stateful(user, optimizers_only=True).items():
        trained = {p for group in optimizer.param_groups for p in group["params"]}
        others = {p for p in trained - known if p.requires_grad}
        if not others:
            continue
        owners = [
            key
            for key, module in vars(user).items()
            if isinstance(module, torch.nn.Module) and others & set(module.parameters())
        ]
        if not owners and not trained & known:
            raise ValueError(
                f"self.{name} has no parameters of {names}, so it wouldn't train the model. Create "
                "the optimizer after the final model"
            )
        whose = f" but in self.{' and self.'.join(owners)}" if owners else ""
        hint = f", or pass models={(*modules, *owners)!r}" if owners else ""
        raise ValueError(
            f"self.{name} has parameters that aren't in {names}{whose}. Their gradients wouldn't "
            "be averaged, so the copies of the workers would diverge. Make them part of "
            f"self.{next(iter(modules))}{hint}"
        )


def wrap(module: Any, device: Any, compile: Any, options: Mapping[str, Any]) -> SyncedModel:
    """Return ``module`` wrapped for averaged gradients, and compile it if requested.

    A collective: all ranks must call it. All start with rank 0's weights.
    """
    if compile:
        chosen: Any = {"backend": compile} if isinstance(compile, str) else compile
        # In place: a wrapper would put its own name in front of every weight's.
        module.compile(**(chosen if isinstance(chosen, Mapping) else {}))
    devices = [device.index or 0] if device.type == "cuda" else None
    return SyncedModel(module, device_ids=devices, **{"gradient_as_bucket_view": True, **options})


def signature(module: Any) -> list[tuple[str, tuple[int, ...], str]]:
    """Return names, shapes and types of the trained parameters: equal on all ranks."""
    return [
        (name, tuple(p.shape), str(p.dtype).removeprefix("torch."))
        for name, p in module.named_parameters()
        if p.requires_grad
    ]


def check_signatures(signatures: list[Any]) -> None:
    """Raise ``WeightsMismatchError`` if the models of the ranks differ."""
    first = signatures[0]
    for rank, other in enumerate(signatures):
        if other == first:
            continue
        if len(other) != len(first):
            entry = None
            problem = f"rank {rank} has {len(other)} parameters, rank 0 has {len(first)}"
        else:
            mine, theirs = next((a, b) for a, b in zip(first, other, strict=True) if a != b)
            entry = theirs[0]
            shown = [f"{name} {list(shape)} {dtype}" for name, shape, dtype in (theirs, mine)]
            problem = f"rank {rank} has {shown[0]} where rank 0 has {shown[1]}"
        raise WeightsMismatchError(
            f"the workers' models differ: {problem}", rank=rank, worker=rank, entry=entry
        )
