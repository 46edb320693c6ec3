"""Identify a filter by its code, so that an edited filter is a different one.

Functions are identified by their code and the values that it uses, and objects by what pickle would
save of them. Both are reduced to plain values, which are the same in all processes. Functions and
classes of modules other than the filter's are identified by name.
"""

from __future__ import annotations

import copyreg
import dis
import functools
import hashlib
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from miniray.errors import DataError

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...))


def fingerprint_callable(function: Callable[..., Any], filter_id: str | None, *more: Any) -> str:
    """Return 16 hexadecimal digits that identify a filter, by ``filter_id`` if there is one."""
    digest = hashlib.blake2b(digest_size=8)
    if filter_id is not None:
        digest.update(f"id {filter_id}".encode())
    else:
        _Describer(digest.update, _find_modules(function)).add(function)
    digest.update(repr(more).encode())
    return digest.hexdigest()


def _find_modules(function: Any) -> set[str | None]:
    """Return the modules of a filter: that of its code, and that of its class."""
    while isinstance(function, functools.partial):
        function = function.func
    owner = function.__self__ if isinstance(function, types.MethodType) else None
    return {getattr(function, "__module__", None), type(owner).__module__} - {"builtins", None}


class _Describer:
    def __init__(self, update: Callable[[bytes], None], modules: set[str | None]) -> None:
        self._update, self._modules = update, modules
        # By id, with a running number. The objects are kept, so that ids aren't used again.
        self._seen: dict[int, tuple[int, Any]] = {}

    def add(self, value: Any) -> None:
        if type(value) in _PLAIN:
            self._add_text(f"{type(value).__name__} {value!r}")
        elif isinstance(value, (frozenset, set)):
            self._add_items(sorted(value, key=repr))  # the order differs between processes
        elif type(value) is tuple:
            self._add_items(value)
        elif isinstance(value, types.CodeType):
            self._add_code(value)
        elif id(value) in self._seen:
            self._add_text(f"again {self._seen[id(value)][0]}")
        else:
            self._seen[id(value)] = len(self._seen), value
            self._add_new(value)

    def _add_new(self, value: Any) -> None:
        if isinstance(value, types.FunctionType):
            self._add_function(value)
        elif isinstance(value, types.MethodType):
            self._add_items((value.__func__, value.__self__))
        elif isinstance(getattr(value, "__wrapped__", None), types.FunctionType):
            self.add(value.__wrapped__)  # with a cache around it
        elif isinstance(value, functools.partial):
            self._add_items((value.func, value.args, sorted(value.keywords.items())))
        elif type(value) is list:
            self._add_items(value)
        elif type(value) is dict:
            self._add_items([part for item in value.items() for part in item])
        elif isinstance(value, type):
            self._add_type(value)
        elif isinstance(value, types.ModuleType):
            self._add_text(value.__name__)
        elif isinstance(value, types.BuiltinFunctionType):
            self._add_text(f"{value.__module__}.{value.__qualname__}")
            if not isinstance(value.__self__, types.ModuleType):
                self.add(value.__self__)
        else:
            self._add_object(value)

    def _add_text(self, text: str) -> None:
        self._update(text.encode() + b";")

    def _add_items(self, items: Iterable[Any]) -> None:
        found = list(items)
        self._add_text(f"{len(found)} items")
        if all(type(item) in _PLAIN for item in found):  # there can be millions
            self._add_text(repr(found))
            return
        for item in found:
            self.add(item)

    def _add_function(self, function: types.FunctionType) -> None:
        if function.__module__ not in self._modules:
            self._add_text(f"{function.__module__}.{function.__qualname__}")
            return
        self._add_code(function.__code__)
        self.add(function.__defaults__)
        self.add(sorted((function.__kwdefaults__ or {}).items()))
        for cell in function.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:  # a name that is bound later
                continue
            self.add(content)
        for name in dict.fromkeys(_iter_global_names(function.__code__)):
            if name in function.__globals__:
                self.add(function.__globals__[name])

    def _add_code(self, code: types.CodeType) -> None:
        self._update(code.co_name.encode() + code.co_code)
        self._update(repr((code.co_names, code.co_varnames)).encode())
        self._add_items(code.co_consts)

    def _add_type(self, kind: type) -> None:
        self._add_text(f"{kind.__module__}.{kind.__qualname__}")
        for base in kind.__mro__:
            if base.__module__ not in self._modules:
                continue
            for name, member in sorted(vars(base).items()):
                member = getattr(member, "fget", getattr(member, "__func__", member))
                constant = type(member) in (*_PLAIN, tuple, list, dict, set, frozenset)
                if isinstance(member, types.FunctionType) or (constant and name[0] != "_"):
                    self._add_text(name)
                    self.add(member)

    def _add_object(self, value: Any) -> None:
        self.add(type(value))
        torch = sys.modules.get("torch")
        try:
            if torch is not None and isinstance(value, torch.Tensor):  # pickled with its address
                flat = value.detach().cpu().contiguous().reshape(-1)
                self._add_items((str(value.dtype), tuple(value.shape)))
                self._update(flat.view(torch.uint8).numpy().tobytes())
                return
            reduce = copyreg.dispatch_table.get(type(value))
            found = value.__reduce_ex__(4) if reduce is None else reduce(value)
            if isinstance(found, str):
                found = (found,)
            self._add_items([*found[:3], *(list(items or ()) for items in found[3:5])])
        except DataError:
            raise
        except Exception as error:  # a user's __reduce__ can raise anything
            raise DataError(
                f"The filter uses a {type(value).__name__} that can't be pickled ({error}), so a"
                " change of it couldn't be noticed. Pass filter_id='...', and change it when the"
                " answers of the filter change."
            ) from error


def _iter_global_names(code: types.CodeType) -> Iterator[str]:
    """Yield the global names that code and its nested functions use."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _iter_global_names(constant)
