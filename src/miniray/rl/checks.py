"""Small checks of arguments."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable
from typing import Any


def in_range(
    name: str, value: Any, low: float, high: float = math.inf, *, sign: str = ">="
) -> None:
    """Refuses NaN too, which compares false with everything."""
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not number or not low <= value <= high or (sign == ">" and value == low):
        upper = "" if high == math.inf else f" and <= {high:g}"
        raise ValueError(f"{name} must be a number {sign} {low:g}{upper}, not {value!r}")


def above(name: str, value: Any, low: float, high: float = math.inf) -> None:
    """The same without ``low`` itself."""
    in_range(name, value, low, high, sign=">")


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
