"""Checks of options. Each returns the value, or raises ``ValueError`` naming it."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError(f"{name} must be a number, not {value!r}")
    return float(value)


def at_least(name: str, value: Any, low: float, *, strictly: bool = False) -> float:
    number = _number(name, value)
    if number < low or (strictly and number == low):
        raise ValueError(
            f"{name} must be {'above' if strictly else 'at least'} {low:g}, not {value}"
        )
    return number


def share(name: str, value: Any) -> float:
    """In [0, 1)."""
    number = _number(name, value)
    if not 0 <= number < 1:
        raise ValueError(f"{name} must be at least 0 and below 1, not {value}")
    return number


def within(name: str, value: Any, low: float, high: float) -> float:
    """Strictly between the two."""
    number = _number(name, value)
    if not low < number < high:
        raise ValueError(f"{name} must be above {low:g} and below {high:g}, not {value}")
    return number
