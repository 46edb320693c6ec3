"""Small checks of arguments."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable
from typing import Any


def in_range(name: str, value: object, low: float, high: float = math.inf) -> None:
    """Refuses NaN too, which compares false with everything."""
    if not _is_number(value) or not low <= value <= high:  # type: ignore[operator]
        upper = "" if high == math.inf else f" and <= {high:g}"
        raise ValueError(f"{name} must be a number >= {low:g}{upper}, not {value!r}")


def above(name: str, value: object, low: float) -> None:
    """The same without ``low`` itself."""
    if not _is_number(value) or not value > low:  # type: ignore[operator]
        raise ValueError(f"{name} must be a number > {low:g}, not {value!r}")


def called_with(name: str, function: Callable[..., Any], *arguments: str) -> None:
    """Refuse a function that cannot take these: its workers would find out, one after the other."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C: it does not say
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise TypeError(
            f"{name} is called as {name}({', '.join(arguments)}), which "
            f"{getattr(function, '__name__', function)}{signature} cannot be: {error}"
        ) from None


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
