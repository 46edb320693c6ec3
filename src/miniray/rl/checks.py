"""Small checks of arguments."""

from __future__ import annotations


def one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    """Refuse anything else."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, not {value!r}")


def whole(name: str, value: object, low: int) -> None:
    """Refuse what is no int, booleans included, and what is less than ``low``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueError(f"{name} must be an int >= {low}, not {value!r}")


def in_range(name: str, value: object, low: float, high: float = float("inf")) -> None:
    """Refuses NaN too, which compares false with everything."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        upper = "" if high == float("inf") else f" and <= {high:g}"
        raise ValueError(f"{name} must be a number >= {low:g}{upper}, not {value!r}")
