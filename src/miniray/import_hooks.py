"""Run functions when a module is imported, now or later.

``doctor.attach`` at the top of a script imports nothing and still observes what torch does later,
and a worker's seed reaches NumPy and torch even if the worker imports them late.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import importlib.machinery

Action = Callable[[Any], None]

_waiting: dict[str, list[Action]] = {}


def when_imported(name: str, action: Action) -> None:
    """Call ``action(module)`` now if the module is imported, or else right after its execution.

    That is before the ``import`` statement returns, so names imported from the module are already
    the changed ones.
    """
    module = sys.modules.get(name)
    if module is not None and not _is_being_imported(module):
        action(module)
        return
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    _waiting.setdefault(name, []).append(action)


def _is_being_imported(module: ModuleType) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


class _Finder:
    """Lets the other finders find modules, and adds the actions to what they found."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _waiting:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                _run_after_loading(spec, name)
                return spec
        return None


def _run_after_loading(spec: importlib.machinery.ModuleSpec, name: str) -> None:
    loader: Any = spec.loader
    execute = getattr(loader, "exec_module", None)
    if execute is None:
        return

    def exec_module(module: ModuleType) -> None:
        execute(module)
        for action in _waiting.pop(name, ()):
            action(module)

    loader.exec_module = exec_module  # of this one loader object, which loads this one module
