"""Combine the results of all workers after an epoch.

Rules for each field:

- A field that is a number on every worker that reports it is averaged. This includes numbers of
  NumPy and torch, zero-dimensional arrays, and booleans, whose mean is a share.
- If every worker reports ``num_samples``, it is summed, and means are weighted by it. Workers with
  0 samples don't affect the means. If all workers have 0 samples, all have the same weight.
- Other values are kept if they are equal on all workers that report them. Otherwise, the field is a
  list in the order of worker IDs.
- If only some workers report a field, their values are combined, and ``partial[field]`` lists the
  worker IDs.
- NaN and infinities aren't excluded from means. ``nonfinite[field]`` lists the IDs of the workers
  that reported them.

``partial`` and ``nonfinite`` are only present if they aren't empty. Workers must not use these
names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from miniray.train.run.records import as_float, number

SAMPLES = "num_samples"
RESERVED = ("partial", "nonfinite")


def aggregate(results: Sequence[Any]) -> dict[str, Any]:
    """Combine the results of the workers, in order of worker ids. See the module for the rules.

    Raise ``TypeError`` with the worker if a result isn't a dict with string keys. Raise
    ``ValueError`` if ``num_samples`` isn't a number of samples, or a reserved name is used.
    """
    if not results:
        raise ValueError("there are no results to aggregate")
    for worker, result in enumerate(results):
        _check(worker, result)
    weights = _weights(results)
    combined: dict[str, Any] = {}
    partial: dict[str, list[int]] = {}
    nonfinite: dict[str, list[int]] = {}
    for field in dict.fromkeys(field for result in results for field in result):
        values = {i: result[field] for i, result in enumerate(results) if field in result}
        if len(values) < len(results):
            partial[field] = list(values)
        numbers = {i: n for i, v in values.items() if (n := number(v)) is not None}
        if len(numbers) < len(values):
            combined[field] = _common(list(values.values()))
            continue
        bad = [i for i, n in numbers.items() if not _is_finite(n)]
        if bad:
            nonfinite[field] = bad
        if field == SAMPLES:
            combined[field] = sum(numbers.values())
        else:
            combined[field] = _mean([(as_float(n), weights[i]) for i, n in numbers.items()])
    if partial:
        combined["partial"] = partial
    if nonfinite:
        combined["nonfinite"] = nonfinite
    return combined


def _check(worker: int, result: Any) -> None:
    if not isinstance(result, Mapping):
        what = "None" if result is None else f"{type(result).__qualname__} {result!r:.80}"
        raise TypeError(
            f"worker {worker}: an epoch must return a dict of results, such as "
            f'{{"loss": loss.item()}}, not {what}'
        )
    for field in result:
        if not isinstance(field, str):
            raise TypeError(f"worker {worker}: names of results must be strings, not {field!r}")
        if field in RESERVED:
            raise ValueError(
                f"worker {worker} returned the reserved field {field!r}. Choose a different name"
            )


def _weights(results: Sequence[Mapping[str, Any]]) -> list[float]:
    for worker, result in enumerate(results):
        if SAMPLES in result:
            count = number(result[SAMPLES])
            if count is None or not _is_finite(count) or count < 0:
                shown = f"{SAMPLES}={result[SAMPLES]!r}"
                raise ValueError(f"worker {worker} returned {shown}, which must be a number >= 0")
    if not all(SAMPLES in result for result in results):
        return [1.0] * len(results)
    return [float(number(result[SAMPLES]) or 0) for result in results]


def _mean(pairs: Sequence[tuple[float, float]]) -> float:
    """Return the weighted mean, or the unweighted mean if all weights are 0."""
    if not any(weight for _, weight in pairs):
        pairs = [(value, 1.0) for value, _ in pairs]
    pairs = [(value, weight) for value, weight in pairs if weight]
    total = math.fsum(weight for _, weight in pairs)
    try:
        # fsum is exact, so the result doesn't depend on the order of the workers.
        return math.fsum(value * weight for value, weight in pairs) / total
    except (OverflowError, ValueError):  # out of range, or infinities of both signs
        return sum(value * (weight / total) for value, weight in pairs)


def _common(values: list[Any]) -> Any:
    first = values[0]
    return first if all(_equal(first, value) for value in values[1:]) else values


def _equal(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    try:
        same = a == b
        if hasattr(same, "all"):  # arrays compare element by element, if at all
            return a.shape == b.shape and bool(same.all())
        return bool(same)
    except Exception:  # for example a user's __eq__, or arrays in containers
        return False


def _is_finite(value: int | float) -> bool:
    return math.isfinite(as_float(value))
