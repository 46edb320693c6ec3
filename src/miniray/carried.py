"""Exceptions on their way to another process, whatever their constructors look like.

An exception arrives as an instance of its own type, with its ``args`` and its attributes, and
without its frames. What cannot be pickled of it is left out; where that is the type itself, nothing
arrives (``arriving`` gives None).
"""

from __future__ import annotations

import copyreg
import pickle
from typing import Any


class Carried:
    """An exception on its way to another process: pickles to the exception itself.

    Its own ``__reduce__`` is used where it has one. Python's would call ``__init__`` with what was
    given to ``Exception.__init__``, which may be something else: such a one travels in parts.
    """

    def __init__(self, error: BaseException, *, all_of_it: bool = True) -> None:
        self.error = error
        self._all_of_it = all_of_it

    def __reduce__(self) -> tuple[Any, ...]:
        kind: Any = type(self.error)
        if kind.__reduce__ is not _builtin_type(kind).__reduce__:
            return _same, (self.error,)
        given, args, state = parts(self.error)
        if not self._all_of_it:
            given, args = (tuple(_told(value) for value in values) for values in (given, args))
            state = {name: value for name, value in state.items() if _pickles(value)}
        return assembled, (kind, given, args, state)


def arriving(error: BaseException) -> BaseException | None:
    """``error`` as another process gets it, without its frames; None where it cannot travel."""
    for form in (Carried(error), Carried(error, all_of_it=False)):
        try:
            return _round_trip(form)  # type: ignore[no-any-return]
        except Exception:  # whatever a user's __reduce__ or __setattr__ raises
            continue
    return None


def _round_trip(value: Any) -> Any:
    import cloudpickle

    return pickle.loads(cloudpickle.dumps(value))


def _pickles(value: Any) -> bool:
    try:
        _round_trip(value)
    except Exception:  # the question is only whether it fails
        return False
    return True


def _told(value: Any) -> Any:
    return value if _pickles(value) else repr(value)


def _same(error: BaseException) -> BaseException:
    return error


def _builtin_type(kind: type[BaseException]) -> Any:
    """The builtin type below a user's: what holds state outside of ``__dict__`` (errno, ...)."""
    return next(t for t in kind.__mro__ if t.__module__ == "builtins")


def parts(error: BaseException) -> tuple[tuple[Any, ...], tuple[Any, ...], dict[str, Any]]:
    """What the builtin type was made with, ``args``, and attributes."""
    _, given, *state = _builtin_type(type(error)).__reduce__(error)
    attributes = dict(state[0]) if state and state[0] else {}
    for name in copyreg._slotnames(type(error)):  # type: ignore[attr-defined]
        if hasattr(error, name):
            attributes[name] = getattr(error, name)
    return given, error.args, attributes


def assembled(
    kind: type[BaseException],
    given: tuple[Any, ...],
    args: tuple[Any, ...],
    attributes: dict[str, Any],
) -> Any:
    """An exception of ``kind`` made of its parts.

    The user's ``__init__`` is not run: it may want arguments nobody kept, or do things.
    """
    builtin = _builtin_type(kind)
    try:
        error = builtin.__new__(kind, *given)
    except TypeError:  # MemoryError, whose __new__ refuses types that are also something else
        error = Exception.__new__(kind, *given)
    builtin.__init__(error, *given)
    for name, value in attributes.items():
        setattr(error, name, value)
    error.args = args
    return error
