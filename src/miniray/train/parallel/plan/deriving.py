"""Derive a plan of tensor parallelism from the names and the order of modules.

MLPs and attention with separate projections get pairs of colwise and rowwise. Embeddings are
sharded by rows of the vocabulary. Other Linear layers get colwise_gather if their size is divisible
by the number of shards. All other modules are replicated.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

#: Names of the (first layers, last layers) of MLP modules.
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


def derive(model: nn.Module, shards: int) -> tuple[dict[str, str], dict[str, str]]:
    """Return styles by module and the heads to divide; see the module."""
    styles: dict[str, str] = {}
    tied = tied_modules(model)
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
    heads = heads_to_divide(model, styles, shards)
    return {name: style for name, style in styles.items() if style != "replicate"}, heads


def _named_pairs(
    children: Mapping[str, nn.Module], module: nn.Module, shards: int
) -> list[tuple[list[str], str]]:
    """Return the first and last modules that have the names of an MLP or attention."""
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
    """Return pairs of Linear layers of an nn.Sequential with only elementwise ones between."""
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


def heads_to_divide(model: nn.Module, styles: Mapping[str, str], shards: int) -> dict[str, str]:
    """Return the attribute with the number of heads of each attention module that is sharded."""
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
                        f"{parent} has {attribute}={count}, which isn't divisible by "
                        f"tensor_parallel={shards}"
                    )
                found[parent] = attribute
                break
    return found


def tied_modules(model: nn.Module) -> set[str]:
    """Return the names of modules that share a weight with a different module."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append(name)
    return {name for names in owners.values() if len(names) > 1 for name in names}
