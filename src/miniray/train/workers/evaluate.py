"""Distributed evaluation: every sample exactly once, sums and counts instead of means of means.

A worker's ``evaluate`` returns a dict. Each value is either a pair ``(sum, count)``, combined as
the sum of sums over the sum of counts, or a mean over the worker's samples, weighted by how many
there were: ``num_samples`` in the result, or the length of the shard where the trainer cut the
data. So no padding and no unequal shards can shift the result.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from miniray.data.plan.shard import split_evenly

if TYPE_CHECKING:
    from miniray.train.workers.group import WorkerGroup


def cut(data: Any, shard_id: int, num_shards: int) -> tuple[Any, int]:
    """(one shard of ``data``, its length). Columns, in a dict or a tuple of arrays, are cut alike.

    ``TypeError`` for what has no rows to be cut, such as a loader.
    """
    columns = _columns(data)
    if columns is not None:
        lengths = {key: len(column) for key, column in columns.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"the columns of data differ in length: {lengths}")
        low, high = split_evenly(next(iter(lengths.values()), 0), shard_id, num_shards)
        parts = {key: _slice(column, low, high) for key, column in columns.items()}
        return parts if isinstance(data, Mapping) else tuple(parts.values()), high - low
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        hint = ": give its dataset" if hasattr(data, "dataset") else ""
        raise TypeError(
            f"data must have len() and [], as a list, an array or a dataset has; it is a "
            f"{type(data).__name__}{hint}"
        )
    low, high = split_evenly(len(data), shard_id, num_shards)
    return _slice(data, low, high), high - low


def _columns(data: Any) -> Mapping[Any, Any] | None:
    """The columns of data that is given by columns; None for rows."""
    if isinstance(data, Mapping):
        return data
    by_column = isinstance(data, tuple) and all(getattr(column, "shape", ()) for column in data)
    return dict(enumerate(data)) if by_column and data else None


def _slice(data: Any, low: int, high: int) -> Any:
    if _knows_slices(data):
        try:
            return data[low:high]
        except (TypeError, KeyError, IndexError, ValueError):  # it knows single rows only
            pass
    rows = range(low, high)
    if hasattr(data, "__getitems__"):  # several at once, as torch's loader asks for them
        return data.__getitems__(list(rows))
    return [data[i] for i in rows]


def _knows_slices(data: Any) -> bool:
    """Whether ``data[low:high]`` may be asked for.

    Not of a torch dataset of the user's: what that makes of a slice may look like rows, and be
    something else. Tensors in a ``TensorDataset`` come as a tuple of columns.
    """
    torch_data = sys.modules.get("torch.utils.data")
    if torch_data is None or not isinstance(data, torch_data.Dataset):
        return True
    while isinstance(data, torch_data.Subset):
        data = data.dataset
    return isinstance(data, torch_data.TensorDataset)


def evaluate_on(
    group: WorkerGroup, data: Any, kwargs: Mapping[str, Any], epoch: int | None = None
) -> dict[str, Any]:
    """Call ``evaluate`` on all workers that have samples, and combine what they return.

    A worker that is lost is replaced within ``max_failures`` and evaluates again. Raises what a
    worker raised, with its id; ``TypeError`` where workers cannot evaluate and ``ValueError`` where
    a mean comes without the number of samples behind it.
    """
    if not group.has("evaluate"):
        name = group.handles[0]._info.class_name
        raise TypeError(
            f"worker class {name} has no evaluate(); give it one that returns "
            '{"loss": (sum, count), ...} or means together with "num_samples"'
        )
    count = len(group.handles)
    rows = [(None, None) if data is None else cut(data, i, count) for i in range(count)]
    # Where there is nothing to evaluate: a mean over nothing is no number.
    busy = [worker_id for worker_id, (_, samples) in enumerate(rows) if samples != 0]

    def submit(worker_id: int) -> Any:
        given = {**kwargs, "shard_id": worker_id, "num_shards": count}
        if data is None:
            return group.submit(worker_id, "evaluate", **given)
        return group.submit(worker_id, "evaluate", rows[worker_id][0], **given)

    scores = group.call_some(busy, submit, "evaluate", epoch)
    results = [(worker_id, rows[worker_id][1], scores[worker_id]) for worker_id in busy]
    return combine(results)


def combine(results: Sequence[tuple[int, int | None, Any]]) -> dict[str, Any]:
    """One result of (worker id, length of its shard if known, what it returned)."""
    totals: dict[str, list[tuple[float, float]]] = {}
    told = 0
    for worker_id, samples, scores in results:
        if not isinstance(scores, Mapping):
            raise TypeError(f"worker {worker_id}: evaluate() must return a dict, not {scores!r}")
        weight = scores.get("num_samples", samples)
        if weight == 0 and len(scores) <= ("num_samples" in scores):
            continue  # it had no samples, and says nothing else
        told += 1
        for key, value in scores.items():
            if key == "num_samples":
                continue
            totals.setdefault(key, []).append(_sum_and_count(worker_id, key, value, weight))
    combined: dict[str, Any] = {}
    for key, pairs in totals.items():
        if len(pairs) != told:
            raise ValueError(f"evaluate(): only {len(pairs)} of {told} workers gave {key!r}")
        number = math.fsum(c for _, c in pairs)
        combined[key] = math.fsum(s for s, _ in pairs) / number if number else math.nan
    known = [scores.get("num_samples", samples) for _, samples, scores in results]
    if results and all(n is not None for n in known):
        combined["num_samples"] = int(sum(known))
    return combined


def _sum_and_count(worker_id: int, key: str, value: Any, weight: Any) -> tuple[float, float]:
    try:
        if isinstance(value, (tuple, list)) and len(value) == 2:
            return float(value[0]), float(value[1])
        mean = float(value)
    except (TypeError, ValueError, RuntimeError):  # the last is torch's, of many numbers
        raise TypeError(
            f"worker {worker_id}: evaluate() gave {key!r} as {value!r:.80}; it must be a number, "
            "the mean over the worker's samples, or a pair (sum, count)"
        ) from None
    if weight is None:
        raise ValueError(
            f"worker {worker_id}: evaluate() gave {key!r} without the number of samples behind it; "
            'return (sum, count) or add "num_samples"'
        )
    # A mean over nothing is NaN, and counts for nothing.
    return (mean * float(weight), float(weight)) if weight else (0.0, 0.0)
