"""Which weights are cut, and how: the plan of tensor parallelism.

A plan says for each module how torch cuts its weight: ``"colwise"`` (each worker computes some of
the outputs), ``"rowwise"`` (each takes some of the inputs, and the results are added),
``"colwise_gather"`` (some of the outputs, which all then get), ``"replicate"``. A pair of colwise
and rowwise needs one sum over the workers; colwise_gather needs no partner and is right for any
Linear.

Without a plan one is derived: pairs where modules have the names or the order of an MLP or of
attention with separate projections, rows of the vocabulary for embeddings, colwise_gather for
other Linear layers that divide, nothing for the rest. Before training the split model's output is
compared with the whole one's, so a wrong guess is an error and not a wrong model.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from miniray.train.parallel.plan import size, text_table

__all__ = ["TensorPlan", "apply_plan", "make_plan"]

STYLES = ("colwise", "rowwise", "colwise_gather", "replicate")
#: (what comes first, what comes last) of modules that are an MLP, by their names.
_MLP_NAMES = (
    ({"gate_proj", "up_proj"}, "down_proj"),
    ({"w1", "w3"}, "w2"),
    ({"w1"}, "w2"),
    ({"fc1"}, "fc2"),
    ({"c_fc"}, "c_proj"),
    ({"linear1"}, "linear2"),
    ({"lin1"}, "lin2"),
    ({"up"}, "down"),
)
_ATTENTION_NAMES = (
    ({"q_proj", "k_proj", "v_proj"}, ("o_proj", "out_proj")),
    ({"q", "k", "v"}, ("out", "o", "proj")),
    ({"wq", "wk", "wv"}, ("wo",)),
    ({"query", "key", "value"}, ("out", "proj", "output")),
)
_HEADS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "heads")
#: Between two Linear layers of an nn.Sequential: works on each number by itself.
_ELEMENTWISE = (
    *(nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.ELU, nn.LeakyReLU, nn.ReLU6),
    *(nn.Mish, nn.Softplus, nn.Hardswish, nn.Identity),
)


@dataclasses.dataclass(frozen=True)
class TensorPlan:
    """Styles by module name, heads to divide, and bytes by parameter: (in all, a worker)."""

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
        """The part of the plan for the modules of one stage."""
        styles = {name: style for name, style in self.styles.items() if name in names}
        heads = {name: attribute for name, attribute in self.heads.items() if name in names}
        return dataclasses.replace(self, styles=styles, heads=heads)

    def table(self) -> str:
        """What went where, with bytes a worker."""
        rows = []
        grouped: dict[tuple[str, str], list[int]] = {}
        for name, (whole, mine) in self.bytes.items():
            module, _, _ = name.rpartition(".")
            style = self.styles.get(module, "replicate")
            # Blocks that are alike are one line.
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
    """The plan for ``model``: the user's, checked, or a derived one.

    ``ValueError`` for a name that no module has, a style that is none, or a size that does not
    divide, each with what would fit.
    """
    heads: dict[str, str] = {}
    if given is None:
        styles, heads = _derive(model, shards)
    else:
        styles = _read(model, given, shards)
        heads = _heads_to_divide(model, styles, shards)
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


# -- a plan of the user's --------------------------------------------------------------------------


def _read(model: nn.Module, given: Mapping[str, Any], shards: int) -> dict[str, str]:
    names = [name for name, module in model.named_modules() if name]
    styles: dict[str, str] = {}
    for pattern, style in given.items():
        if style not in STYLES:
            raise ValueError(
                f"plan[{pattern!r}] must be one of {', '.join(map(repr, STYLES))}, not {style!r}"
            )
        # * stands for one part of a name, ** for any number of them.
        expression = re.escape(pattern).replace(r"\*\*", ".+").replace(r"\*", r"[^.]+")
        matched = [name for name in names if re.fullmatch(expression, name)]
        if not matched:
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3) or names[:3]
            raise ValueError(
                f"plan[{pattern!r}] names no module of {type(model).__name__}; there are "
                f"{', '.join(map(repr, near))}, ... (* stands for one part of a name)"
            )
        for name in matched:
            _check(model.get_submodule(name), name, style, shards)
            styles[name] = style
    return styles


def _check(module: nn.Module, name: str, style: str, shards: int) -> None:
    if style == "replicate":
        return
    if isinstance(module, nn.Linear):
        cut = ("in_features" if style == "rowwise" else "out_features",)[0]
    elif isinstance(module, nn.Embedding):
        cut = "num_embeddings" if style == "rowwise" else "embedding_dim"
    else:
        raise ValueError(
            f"plan[{name!r}]: only Linear and Embedding can be cut, and it is a "
            f"{type(module).__name__}; name the layers inside of it"
        )
    length = getattr(module, cut)
    if length % shards:
        fitting = [n for n in range(2, min(length, 64) + 1) if length % n == 0]
        raise ValueError(
            f"{name} has {cut}={length}, which does not divide by tensor_parallel={shards}; "
            f"{', '.join(map(str, fitting[:6])) or 'no number'} would fit, or leave it "
            '"replicate"'
        )


# -- a plan of ours --------------------------------------------------------------------------------


def _derive(model: nn.Module, shards: int) -> tuple[dict[str, str], dict[str, str]]:
    styles: dict[str, str] = {}
    tied = _tied_modules(model)
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            # It reads the weights of its inner Linear by itself.
            for inner, _ in module.named_modules(prefix=name):
                styles[inner] = "replicate"
            continue
        children = dict(module.named_children())
        for first, last in [*_named_pairs(children, module, shards), *_row_pairs(module)]:
            members = [children[key] for key in (*first, last)]
            full = [f"{name}.{key}" if name else key for key in (*first, last)]
            if any(key in styles or key in tied for key in full):
                continue
            if all(m.out_features % shards == 0 for m in members[:-1]) and (
                members[-1].in_features % shards == 0
            ):
                styles.update(dict.fromkeys(full[:-1], "colwise"))
                styles[full[-1]] = "rowwise"
    for name, module in model.named_modules():
        if name in styles or name in tied:
            continue
        if isinstance(module, nn.Embedding) and module.num_embeddings % shards == 0:
            styles[name] = "rowwise"
        elif isinstance(module, nn.Linear) and module.out_features % shards == 0:
            styles[name] = "colwise_gather"
    heads = _heads_to_divide(model, styles, shards)
    return {name: style for name, style in styles.items() if style != "replicate"}, heads


def _named_pairs(
    children: Mapping[str, nn.Module], module: nn.Module, shards: int
) -> list[tuple[list[str], str]]:
    """(first, last) by names that are known for an MLP or attention."""
    linear = {key for key, child in children.items() if isinstance(child, nn.Linear)}
    pairs: list[tuple[list[str], str]] = []
    for first, end in _MLP_NAMES:
        if first <= linear and end in linear:
            pairs.append((sorted(first), end))
            break
    heads = next((h for h in _HEADS if isinstance(getattr(module, h, None), int)), None)
    for first, ends in _ATTENTION_NAMES:
        last = next((end for end in ends if end in linear), None)
        if first <= linear and last and heads and getattr(module, heads) % shards == 0:
            pairs.append((sorted(first), last))
    return pairs


def _row_pairs(module: nn.Module) -> list[tuple[list[str], str]]:
    """Linear, something elementwise, Linear: in an nn.Sequential the order is known."""
    if not isinstance(module, nn.Sequential):
        return []
    pairs: list[tuple[list[str], str]] = []
    open_key: str | None = None
    for key, child in module.named_children():
        if isinstance(child, nn.Linear):
            if open_key is None:
                open_key = key
            else:
                pairs.append(([open_key], key))
                open_key = None
        elif not isinstance(child, _ELEMENTWISE):
            open_key = None
    return pairs


def _heads_to_divide(model: nn.Module, styles: Mapping[str, str], shards: int) -> dict[str, str]:
    """{module: attribute}: attention whose projections are cut has so many heads fewer here."""
    found: dict[str, str] = {}
    for name, style in styles.items():
        parent, _, child = name.rpartition(".")
        if style != "colwise" or not any(child in first for first, _ in _ATTENTION_NAMES):
            continue
        module = model.get_submodule(parent)
        for attribute in _HEADS:
            count = getattr(module, attribute, None)
            if isinstance(count, int):
                if count % shards:
                    raise ValueError(
                        f"{parent} has {attribute}={count}, which does not divide by "
                        f"tensor_parallel={shards}"
                    )
                found[parent] = attribute
                break
    return found


def _tied_modules(model: nn.Module) -> set[str]:
    """Modules whose weight is another's too: cutting one would leave the other whole."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append(name)
    return {name for names in owners.values() if len(names) > 1 for name in names}


# -- doing it --------------------------------------------------------------------------------------


def apply_plan(model: nn.Module, plan: TensorPlan, mesh: Any) -> None:
    """Cut the weights of ``model`` over ``mesh``, in place. A collective.

    All ranks must have the same weights before: each keeps its part of its own.
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
    """Refuse a plan whose model computes something else."""
    if whole.shape == split.shape and torch.allclose(whole, split, rtol=1e-3, atol=1e-4):
        return
    how = "the derived plan" if plan.derived else "this plan"
    what = (
        f"shape {list(split.shape)} instead of {list(whole.shape)}"
        if whole.shape != split.shape
        else f"numbers that differ by up to {(whole - split).abs().max().item():.3g}"
    )
    raise ValueError(
        f"{how} does not fit the model: the split model's output has {what}. A colwise layer must "
        "feed a rowwise one with nothing but elementwise functions between; pass plan={...} with "
        f'"colwise_gather" where it does not.\n{plan.table()}'
    )
