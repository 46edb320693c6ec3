"""Private names of torch that trainers use.

Each has the versions that it was seen in, and a fallback for versions that lack it.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel


def get_shard_offset(tensor: Any) -> list[int]:
    """Return where this rank's part of a ``DTensor`` starts in the whole tensor.

    Private name, seen in torch 2.8 and 2.13: ``__create_chunk_list__``, by which DTensor describes
    its parts to ``torch.distributed.checkpoint``.
    """
    chunks = tensor.__create_chunk_list__()
    return list(chunks[0].offsets) if chunks else [0] * tensor.dim()


class PinnedDDP(DistributedDataParallel):  # type: ignore[misc]
    """DistributedDataParallel whose gradient buckets never change.

    torch creates preliminary buckets, and regroups them in the order in which gradients arrive in
    the first backward pass (the second one with ``static_graph``). A restarted or resumed run would
    sum the gradients of its first steps in a different order than an uninterrupted one. With three
    or more ranks, the results would differ in their last bits.

    This class regroups when the model is wrapped, in reverse order of the parameters. No forward or
    backward pass is needed, so buffers, gradients, random numbers and hooks aren't touched. With
    ``find_unused_parameters``, torch doesn't regroup the buckets.

    Private names, seen in torch 2.11 and 2.13: ``_build_params_for_reducer``, and
    ``_push_all_rebuilt_params`` and ``_rebuild_buckets`` of ``reducer``, which torch itself calls
    for ranks that have run out of data. If one of the last two is missing, the buckets aren't
    pinned and a warning is issued.
    """

    def __init__(self, module: Any, **options: Any) -> None:
        self._is_regrouped = bool(
            options.get("static_graph") or not options.get("find_unused_parameters")
        )
        super().__init__(module, **options)
        _regroup(self.reducer)

    def _build_params_for_reducer(self) -> Any:
        """Return the trained parameters and which of them have sparse gradients.

        torch regroups in the order of this list, and numbers parameters by it in its error
        messages. Gradients arrive in about the reverse order of the model's parameters, so a
        bucket can be sent while others are still computed.
        """
        parameters, are_sparse = super()._build_params_for_reducer()
        if not self._is_regrouped:
            return parameters, are_sparse
        return parameters[::-1], are_sparse[::-1]


def _regroup(reducer: Any) -> None:
    """Create the final buckets. A collective: all ranks must call it."""
    try:
        push, rebuild = reducer._push_all_rebuilt_params, reducer._rebuild_buckets
    except AttributeError as error:
        warnings.warn(
            f"torch {torch.__version__} can't pin the gradient buckets of DistributedDataParallel "
            f"({error}). A restarted or resumed run may differ from an uninterrupted run in the "
            "last bits of its weights.",
            RuntimeWarning,
            stacklevel=2,
        )
        return
    push()
    rebuild()
