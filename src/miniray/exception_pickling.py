"""Pickle exceptions, whatever the signature of their constructor.

An exception is rebuilt as an instance of its type with its ``args`` and attributes, without its
traceback. Attributes that can't be pickled are dropped. If the type can't be pickled,
``to_picklable`` returns None.
"""

from __future__ import annotations

import copyreg
import pickle
from typing import Any


class PickledException:
    """Wrapper that pickles to the exception itself.

    Python's default ``__reduce__`` calls ``__init__`` with the arguments of ``Exception.__init__``,
    which may differ from those of the subclass. Such exceptions are pickled in parts. A custom
    ``__reduce__`` is used if the type defines one.
    """

    def __init__(self, error: BaseException, *, keep_all: bool = True) -> None:
        self.error = error
        self._keep_all = keep_all

    def __reduce__(self) -> tuple[Any, ...]:
        kind: Any = type(self.error)
        if kind.__reduce__ is not _get_builtin_type(kind).__reduce__:
            return _return_unchanged, (self.error,)
        builtin_args, args, state = get_parts(self.error)
        if not self._keep_all:
            builtin_args = tuple(_replace_unpicklable(value) for value in builtin_args)
            args = tuple(_replace_unpicklable(value) for value in args)
            state = {name: value for name, value in state.items() if _is_picklable(value)}
        return rebuild_exception, (kind, builtin_args, args, state)


def to_picklable(error: BaseException) -> BaseException | None:
    """Return ``error`` as a different process receives it, or None if it can't be pickled."""
    for form in (PickledException(error), PickledException(error, keep_all=False)):
        try:
            return _round_trip(form)  # type: ignore[no-any-return]
        except Exception:  # a user's __reduce__ or __setattr__ may raise anything
            continue
    return None


def _round_trip(value: Any) -> Any:
    import cloudpickle

    return pickle.loads(cloudpickle.dumps(value))


def _is_picklable(value: Any) -> bool:
    try:
        _round_trip(value)
    except Exception:  # only success or failure matters
        return False
    return True


def _replace_unpicklable(value: Any) -> Any:
    return value if _is_picklable(value) else repr(value)


def _return_unchanged(error: BaseException) -> BaseException:
    return error


def _get_builtin_type(kind: type[BaseException]) -> Any:
    """Return the builtin base class, which keeps state outside ``__dict__`` (errno and others)."""
    return next(t for t in kind.__mro__ if t.__module__ == "builtins")


def get_parts(error: BaseException) -> tuple[tuple[Any, ...], tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of the builtin base class, ``args``, and the attributes."""
    _, builtin_args, *state = _get_builtin_type(type(error)).__reduce__(error)
    attributes = dict(state[0]) if state and state[0] else {}
    for name in copyreg._slotnames(type(error)):  # type: ignore[attr-defined]
        if hasattr(error, name):
            attributes[name] = getattr(error, name)
    return builtin_args, error.args, attributes


def rebuild_exception(
    kind: type[BaseException],
    builtin_args: tuple[Any, ...],
    args: tuple[Any, ...],
    attributes: dict[str, Any],
) -> Any:
    """Create an exception of type ``kind`` from its parts, without calling its ``__init__``.

    The user's ``__init__`` may need arguments that weren't kept, or have side effects.
    """
    builtin = _get_builtin_type(kind)
    try:
        error = builtin.__new__(kind, *builtin_args)
    except TypeError:  # MemoryError.__new__ rejects types with a second base class
        error = Exception.__new__(kind, *builtin_args)
    builtin.__init__(error, *builtin_args)
    for name, value in attributes.items():
        setattr(error, name, value)
    error.args = args
    return error
