"""Public names of a package that are imported when they are first used.

::

    __getattr__, __dir__ = lazy.names(__name__, {"DataLoader": ".loader", "losses": ".losses"})

A name stands for what its module calls so, or for the module itself where that is its name.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def names(
    package: str, where: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` for ``package``; ``where`` has modules relative to it."""

    def get(name: str) -> Any:
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(where[name], package)
        value = module if where[name] == f".{name}" else getattr(module, name)
        setattr(sys.modules[package], name, value)  # the next time it is found at once
        return value

    def listed() -> list[str]:
        return sorted({*vars(sys.modules[package]), *where})

    return get, listed
