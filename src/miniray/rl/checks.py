"""Small checks of arguments."""

from __future__ import annotations

import math
import numbers


def in_range(name: str, value: object, low: float, high: float = math.inf) -> None:
    """Refuses NaN too, which compares false with everything."""
    if not _is_number(value) or not low <= value <= high:  # type: ignore[operator]
        upper = "" if high == math.inf else f" and <= {high:g}"
        raise ValueError(f"{name} must be a number >= {low:g}{upper}, not {value!r}")


def above(name: str, value: object, low: float) -> None:
    """The same without ``low`` itself."""
    if not _is_number(value) or not value > low:  # type: ignore[operator]
        raise ValueError(f"{name} must be a number > {low:g}, not {value!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
