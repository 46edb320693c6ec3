"""``torch._dynamo`` without its imports, until somebody compiles something.

torch's optimizers and its DistributedDataParallel import the compiler they do not use: a second of
CPU before the first step of every run, as much as all the rest of torch. Importing this module puts
a stand-in in its place. It answers what they ask, as the compiler does where nothing is compiled;
whoever asks it for anything else gets the real module, which is loaded then and there.

Nothing happens where torch is absent or the compiler is loaded already.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

_NAME = "torch._dynamo"
_lock = threading.Lock()


class _Dynamo(ModuleType):
    """The stand-in. Attributes it does not have are those of the real module."""

    def __init__(self) -> None:
        super().__init__(_NAME)
        self.__spec__ = importlib.util.find_spec(_NAME)
        self.__file__ = self.__spec__.origin if self.__spec__ else None
        # By the functions that torch has marked with torch._disable_dynamo and called since.
        self._disabled: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []
        self.graph_break = _nothing
        self.disable = self._disable
        self.trace_rules = _Part("trace_rules", clear_lru_cache=_nothing)
        # What it is unless somebody changes the compiler's settings, and with them loads it.
        self.utils = _Part("utils", get_optimize_ddp_mode=lambda: "ddp_optimizer")

    def _disable(self, function: Any = None, *args: Any, **options: Any) -> Any:
        """Nothing is traced that a function could be left out of: it is used as it is."""
        if options.get("wrapping", True):  # not torch._disable_dynamo, which keeps the answer
            return load().disable(function, *args, **options)
        self._disabled.append((function, args, options))
        return function

    def __getattr__(self, name: str) -> Any:
        return getattr(load(), name)


class _Part:
    """A submodule of the stand-in."""

    def __init__(self, name: str, **known: Callable[..., Any]) -> None:
        self._name = name
        vars(self).update(known)

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(f"{load().__name__}.{self._name}"), name)


def _nothing() -> None:
    pass


def load() -> ModuleType:
    """The real module. From its load on torch is as if there had never been another."""
    stand_in = None
    with _lock:  # not while it is imported: another thread may be about to, inside of an import
        if isinstance(sys.modules.get(_NAME), _Dynamo):
            stand_in = sys.modules.pop(_NAME)
    real = importlib.import_module(_NAME)
    if isinstance(stand_in, _Dynamo):
        for name in ("graph_break", "disable", "trace_rules", "utils"):
            vars(stand_in).pop(name, None)  # for those who hold on to it
        for function, args, options in stand_in._disabled:
            function.__dynamo_disable = real.disable(function, *args, **options)  # type: ignore[attr-defined]
    return real


def _install() -> None:
    if _NAME in sys.modules or importlib.util.find_spec("torch") is None:
        return
    import torch

    sys.modules[_NAME] = torch._dynamo = _Dynamo()


_install()
