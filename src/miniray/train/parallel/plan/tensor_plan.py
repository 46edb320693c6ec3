"""The plan of tensor parallelism: which weights are sharded, and how.

A plan has a style for each module: ``"colwise"`` (each worker computes some of the outputs),
``"rowwise"`` (each worker uses some of the inputs, and the results are added), ``"colwise_gather"``
(each worker computes some of the outputs, which are gathered) or ``"replicate"``. A pair of colwise
and rowwise needs one all-reduce. ``"colwise_gather"`` works for any Linear without a partner.

By default, a plan is derived (``deriving``). Before training, the output of the sharded model is
compared with that of the whole one, so a wrong plan raises an error.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from miniray.train.parallel.plan.deriving import derive, heads_to_divide, tied_modules
from miniray.train.parallel.plan.stage_plan import size, text_table

STYLES = ("colwise", "rowwise", "colwise_gather", "replicate")


@dataclasses.dataclass(frozen=True)
class TensorPlan:
    """Styles by module, heads to divide, and bytes of each parameter: in total and per worker."""

    styles: dict[str, str]
    heads: dict[str, str]
    bytes: dict[str, tuple[int, int]]
    shards: int
    derived: bool

    @property
    def worker_bytes(self) -> int:
        return sum(mine for _, mine in self.bytes.values())

    @property
    def whole_bytes(self) -> int:
        return sum(whole for whole, _ in self.bytes.values())

    def within(self, names: Collection[str]) -> TensorPlan:
        """Return the part of the plan for the modules of one stage."""
        styles = {name: style for name, style in self.styles.items() if name in names}
        heads = {name: attribute for name, attribute in self.heads.items() if name in names}
        return dataclasses.replace(self, styles=styles, heads=heads)

    def table(self) -> str:
        """Return a table of the styles, with bytes per worker."""
        rows = []
        grouped: dict[tuple[str, str], list[int]] = {}
        for name, (whole, mine) in self.bytes.items():
            module, _, _ = name.rpartition(".")
            style = self.styles.get(module, "replicate")
            # Equal blocks are one line.
            key = (re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", module) or name, style)
            sums = grouped.setdefault(key, [0, 0, 0])
            sums[0] += whole
            sums[1] += mine
            sums[2] += 1
        for (module, style), (whole, mine, count) in grouped.items():
            rows.append([module, style, str(count), size(whole), size(mine)])
        rows.append(
            ["all", "", str(len(self.bytes)), size(self.whole_bytes), size(self.worker_bytes)]
        )
        origin = "derived" if self.derived else "given"
        title = f"tensor parallel over {self.shards} workers, plan {origin}"
        head = ["module", "style", "tensors", "whole", "a worker"]
        return f"{title}\n{text_table(head, rows)}"


def make_plan(model: nn.Module, given: Mapping[str, Any] | None, shards: int) -> TensorPlan:
    """Return the user's plan for ``model`` after checking it, or a derived one.

    Raises ``ValueError`` for a name without a module, an unknown style, or a size that isn't
    divisible by the number of shards. The error lists what would fit.
    """
    heads: dict[str, str] = {}
    if given is None:
        styles, heads = derive(model, shards)
    else:
        styles = _read(model, given, shards)
        heads = heads_to_divide(model, styles, shards)
    sizes: dict[str, tuple[int, int]] = {}
    for name, parameter in model.named_parameters():
        module, _, kind = name.rpartition(".")
        style = styles.get(module, "replicate")
        owner = model.get_submodule(module)
        cut = _is_cut(style, kind, owner)
        sizes[name] = (parameter.nbytes, parameter.nbytes // shards if cut else parameter.nbytes)
    return TensorPlan(styles, heads, sizes, shards, given is None)


def _is_cut(style: str, kind: str, owner: nn.Module) -> bool:
    if style == "replicate":
        return False
    if isinstance(owner, nn.Embedding):
        return True
    return kind == "weight" or style.startswith("colwise")


# -- plans of users --------------------------------------------------------------------------------


def _read(model: nn.Module, given: Mapping[str, Any], shards: int) -> dict[str, str]:
    names = [name for name, module in model.named_modules() if name]
    styles: dict[str, str] = {}
    tied = tied_modules(model)
    for pattern, style in given.items():
        if style not in STYLES:
            raise ValueError(
                f"plan[{pattern!r}] must be one of {', '.join(map(repr, STYLES))}, not {style!r}"
            )
        # * stands for one part of a name, ** for any number of them.
        expression = re.escape(pattern).replace(r"\*\*", ".+").replace(r"\*", r"[^.]+")
        matched = [name for name in names if re.fullmatch(expression, name)]
        if not matched:
            near = difflib.get_close_matches(pattern, names, n=3) or names[:6]
            raise ValueError(
                f"plan[{pattern!r}] names no module of {type(model).__name__}; there are "
                f"{', '.join(map(repr, near))}, ... (* stands for one part of a name)"
            )
        for name in matched:
            _check(model.get_submodule(name), name, style, shards)
            if name in tied and style != "replicate":
                raise ValueError(
                    f"plan[{pattern!r}]: {name} shares its weight with another module, and each "
                    'would train a separate shard. Leave it "replicate"'
                )
            styles[name] = style
    return styles


def _check(module: nn.Module, name: str, style: str, shards: int) -> None:
    if style == "replicate":
        return
    if isinstance(module, nn.Linear):
        cut = "in_features" if style == "rowwise" else "out_features"
    elif isinstance(module, nn.Embedding):
        cut = "num_embeddings" if style == "rowwise" else "embedding_dim"
    else:
        raise ValueError(
            f"plan[{name!r}]: only Linear and Embedding can be sharded, not "
            f"{type(module).__name__}. Name the layers inside it"
        )
    length = getattr(module, cut)
    if length % shards:
        fitting = [n for n in range(2, min(length, 64) + 1) if length % n == 0]
        raise ValueError(
            f"{name} has {cut}={length}, which isn't divisible by tensor_parallel={shards}; "
            f"{', '.join(map(str, fitting[:6])) or 'no number'} would fit, or leave it "
            '"replicate"'
        )


# -- doing it --------------------------------------------------------------------------------------


def apply_plan(model: nn.Module, plan: TensorPlan, mesh: Any) -> None:
    """Shard the weights of ``model`` over ``mesh``, in place. A collective.

    All ranks must have the same weights before: each keeps its shard of them.
    """
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    made: dict[str, Any] = {}
    for name, style in plan.styles.items():
        embedding = isinstance(model.get_submodule(name), nn.Embedding)
        if style == "rowwise":
            made[name] = (
                RowwiseParallel(input_layouts=Replicate()) if embedding else RowwiseParallel()
            )
        elif style == "colwise":
            made[name] = ColwiseParallel()
        elif style == "colwise_gather":
            made[name] = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, mesh, made)
    for name, attribute in plan.heads.items():
        module = model.get_submodule(name)
        setattr(module, attribute, getattr(module, attribute) // plan.shards)


def check_same(whole: torch.Tensor, split: torch.Tensor, plan: TensorPlan) -> None:
    """Raise ``ValueError`` if the sharded model computes a different output."""
    if whole.shape == split.shape and torch.allclose(whole, split, rtol=1e-3, atol=1e-4):
        return
    how = "the derived plan" if plan.derived else "this plan"
    what = (
        f"shape {list(split.shape)} instead of {list(whole.shape)}"
        if whole.shape != split.shape
        else f"numbers that differ by up to {(whole - split).abs().max().item():.3g}"
    )
    raise ValueError(
        f"{how} doesn't fit the model: the split model's output has {what}. Between a colwise "
        "layer and its rowwise layer, only elementwise functions are allowed. For other layers, "
        f'use "colwise_gather" in plan={{...}}.\n{plan.table()}'
    )
