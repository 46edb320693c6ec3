"""Distributed evaluation, in which every sample is used exactly once.

A worker's ``evaluate`` returns a dict. Each value is either a pair ``(sum, count)`` or a mean over
the worker's samples. Pairs are combined as the sum of sums divided by the sum of counts. Means are
weighted by the number of samples: ``num_samples`` in the result, or the length of the shard if the
trainer has sharded the data. Results are therefore exact, even if shards have different lengths.
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
    """Return (a shard of ``data``, its length). Columns can be in a dict or a tuple of arrays.

    Raises:
        TypeError: ``data`` can't be sliced, such as a loader.
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
        hint = ". Pass its dataset" if hasattr(data, "dataset") else ""
        raise TypeError(
            f"data must have len() and support indexing, like a list, an array or a dataset, "
            f"but it is a {type(data).__name__}{hint}"
        )
    low, high = split_evenly(len(data), shard_id, num_shards)
    return _slice(data, low, high), high - low


def _columns(data: Any) -> Mapping[Any, Any] | None:
    """Return the columns of ``data``, or None if it consists of rows."""
    if isinstance(data, Mapping):
        return data
    by_column = isinstance(data, tuple) and all(getattr(column, "shape", ()) for column in data)
    return dict(enumerate(data)) if by_column and data else None


def _slice(data: Any, low: int, high: int) -> Any:
    if _knows_slices(data):
        try:
            return data[low:high]
        except (TypeError, KeyError, IndexError, ValueError):  # it supports only single rows
            pass
    rows = range(low, high)
    if hasattr(data, "__getitems__"):  # reads several rows at once, like torch's loader
        return data.__getitems__(list(rows))
    return [data[i] for i in rows]


def _knows_slices(data: Any) -> bool:
    """Return whether ``data`` can be sliced.

    Users' torch datasets aren't sliced, because they may return something else than rows for a
    slice. A slice of a ``TensorDataset`` is a tuple of columns.
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
    """Call ``evaluate`` on all workers that have samples, and combine the results.

    A lost worker is replaced within ``max_failures`` and evaluates again. Errors of workers are
    raised with the worker ID.

    Raises:
        TypeError: The worker class has no ``evaluate``.
        ValueError: A worker returned a mean without the number of samples.
    """
    if not group.has("evaluate"):
        name = group.handles[0]._info.class_name
        raise TypeError(
            f"worker class {name} has no evaluate(). Implement it, and return "
            '{"loss": (sum, count), ...}, or means together with "num_samples"'
        )
    count = len(group.handles)
    rows = [(None, None) if data is None else cut(data, i, count) for i in range(count)]
    # Skip workers without samples, whose means would be undefined.
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
    """Combine the results of workers: (worker ID, length of the shard if known, scores)."""
    totals: dict[str, list[tuple[float, float]]] = {}
    told = 0
    for worker_id, samples, scores in results:
        if not isinstance(scores, Mapping):
            raise TypeError(f"worker {worker_id}: evaluate() must return a dict, not {scores!r}")
        weight = scores.get("num_samples", samples)
        if weight == 0 and len(scores) <= ("num_samples" in scores):
            continue  # the worker had no samples and returned no scores
        told += 1
        for key, value in scores.items():
            if key == "num_samples":
                continue
            totals.setdefault(key, []).append(_sum_and_count(worker_id, key, value, weight))
    combined: dict[str, Any] = {}
    for key, pairs in totals.items():
        if len(pairs) != told:
            raise ValueError(f"evaluate(): only {len(pairs)} of {told} workers returned {key!r}")
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
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor with several values
        raise TypeError(
            f"worker {worker_id}: {key!r} of evaluate() must be a number (the mean over the "
            f"worker's samples) or a pair (sum, count), not {value!r:.80}"
        ) from None
    if weight is None:
        raise ValueError(
            f"worker {worker_id}: evaluate() returned {key!r} without the number of samples. "
            'Return (sum, count), or add "num_samples"'
        )
    # The mean over no samples is NaN and is ignored.
    return (mean * float(weight), float(weight)) if weight else (0.0, 0.0)
