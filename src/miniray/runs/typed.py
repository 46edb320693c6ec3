"""Build dataclasses from parsed JSON, with the type of each field checked."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Hashable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")

_MAX_INT = 1 << 63
_MAX_FLOAT = 1e15  #: times, bytes and watts are smaller; NaN and infinity are rejected too


def build(cls: type[T], values: Any) -> T:
    """Create a dataclass or named tuple from ``values``, a JSON object.

    Lists become tuples and named tuples. Fields that ``cls`` doesn't have are ignored. Raises
    ``ValueError`` if a required field is missing or a field has a wrong type.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"{cls.__name__} must be an object, not {type(values).__name__}")
    found = {}
    for name, (hint, required) in _fields(typing.cast(Hashable, cls)).items():
        if name in values:
            found[name] = convert(values[name], hint, f"{cls.__name__}.{name}")
        elif required:
            raise ValueError(f"{cls.__name__}.{name} is missing")
    return cls(**found)


def convert(value: Any, hint: Any, name: str) -> Any:
    """Return ``value`` as the type ``hint``. Raise ``ValueError`` if it has a different type."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        (hint,) = [arg for arg in args if arg is not type(None)]
        return convert(value, hint, name)
    if origin is tuple and isinstance(value, (list, tuple)):
        return tuple(convert(item, args[0], name) for item in value)
    if hasattr(hint, "_fields") and isinstance(value, (list, tuple)):  # a named tuple
        if len(value) != len(hint._fields):
            raise ValueError(f"{name} must have {len(hint._fields)} items, not {len(value)}")
        return build(hint, dict(zip(hint._fields, value, strict=True)))
    if hasattr(hint, "_fields") or dataclasses.is_dataclass(hint):
        return build(hint, value)
    if hint is Any or (hint in (str, bool) and type(value) is hint):
        return value
    if origin is not None and origin is not tuple and isinstance(value, origin):
        return value
    if hint is int and type(value) is int and abs(value) < _MAX_INT:
        return value
    if hint is float and type(value) in (int, float) and abs(value) < _MAX_FLOAT:
        return float(value)
    raise ValueError(f"{name} must not be {type(value).__name__} {str(value)[:40]!r}")


@functools.cache
def _fields(cls: Any) -> dict[str, tuple[Any, bool]]:
    """Return the type of each field, and whether it's required."""
    hints = typing.get_type_hints(cls)
    if dataclasses.is_dataclass(cls):
        return {
            field.name: (
                hints[field.name],
                field.default is dataclasses.MISSING
                and field.default_factory is dataclasses.MISSING,
            )
            for field in dataclasses.fields(cls)
        }
    return {name: (hints[name], True) for name in cls._fields}
