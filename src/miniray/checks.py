"""Checks of arguments that all parts share: each gives the value, or refuses it with its name."""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any


def whole(name: str, value: Any, least: int | None = None, hint: str = "") -> int:
    """``value`` as an int, of ``least`` or more; numpy's are good too, ``True`` and 2.0 are not."""
    bound = "" if least is None else f" >= {least}"
    fits = not isinstance(value, bool) and hasattr(value, "__index__")
    number = operator.index(value) if fits else 0
    if not fits or (least is not None and number < least):
        raise ValueError(f"{name} must be an int{bound}{hint}, not {value!r}")
    return number


def one_of(name: str, value: Any, allowed: Collection[Any]) -> None:
    """Refuse anything else."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, not {value!r}")
