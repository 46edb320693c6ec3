"""What a filter is, as text that changes when its answers may change.

Functions are known by their code and what it refers to, not by their name: a filter that was edited
is another filter. What is imported from other modules counts by name only.
"""

from __future__ import annotations

import functools
import hashlib
import types
from collections.abc import Callable
from typing import Any

from miniray.errors import DataError


def filter_identity(function: Callable[..., Any], given: str | None, *more: Any) -> str:
    """16 hexadecimal digits; of ``given`` alone where the user names the filter."""
    digest = hashlib.blake2b(digest_size=8)
    if given is not None:
        digest.update(f"id {given}".encode())
    else:
        _Describer(digest.update).add(function)
    digest.update(repr(more).encode())
    return digest.hexdigest()


class _Describer:
    def __init__(self, update: Callable[[bytes], None]) -> None:
        self._update = update
        self._seen: set[int] = set()

    def add(self, value: Any) -> None:
        if isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, types.MethodType):
            self.add(value.__func__)
            self.add(value.__self__)
        elif isinstance(value, functools.partial):
            for part in (value.func, value.args, sorted(value.keywords.items())):
                self.add(part)
        elif isinstance(value, (frozenset, set)):
            for item in sorted(value, key=repr):  # their order differs from process to process
                self.add(item)
        elif isinstance(value, (tuple, list)):
            self._update(f"{type(value).__name__} {len(value)}".encode())
            for item in value:
                self.add(item)
        elif value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
            self._update(f"{type(value).__name__} {value!r};".encode())
        elif isinstance(value, types.CodeType):
            self._code(value)
        elif isinstance(value, (types.ModuleType, types.BuiltinFunctionType, type)):
            self._update(f"{getattr(value, '__module__', '')}.{value.__name__};".encode())
            if isinstance(value, type) and isinstance(
                call := value.__dict__.get("__call__"), types.FunctionType
            ):
                self.add(call)
        else:
            self._object(value)

    def _function(self, function: types.FunctionType) -> None:
        if id(function) in self._seen:
            return
        self._seen.add(id(function))
        self._code(function.__code__)
        self.add(function.__defaults__)
        self.add(sorted((function.__kwdefaults__ or {}).items()))
        for cell in function.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:  # a name that is bound later
                continue
            self.add(content)
        for name in function.__code__.co_names:
            if name not in function.__globals__:
                continue
            value = function.__globals__[name]
            if isinstance(value, types.FunctionType) and value.__module__ != function.__module__:
                self._update(f"{value.__module__}.{value.__qualname__};".encode())
            else:
                self.add(value)

    def _code(self, code: types.CodeType) -> None:
        self._update(code.co_name.encode() + code.co_code)
        self._update(repr((code.co_names, code.co_varnames)).encode())
        for constant in code.co_consts:
            self.add(constant)

    def _object(self, value: Any) -> None:
        import cloudpickle

        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        self.add(type(value))
        try:
            self._update(cloudpickle.dumps(value))
        except Exception as error:  # whatever a user's __reduce__ raises
            raise DataError(
                f"the filter uses a {type(value).__name__} that cannot be pickled ({error}), so a"
                " change of it could not be noticed. Name the filter: filter_id='...', and change"
                " the name when its answers change"
            ) from error
