"""The engine: actors, tasks and objects, and what trainers build on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miniray import lazy

if TYPE_CHECKING:
    from miniray.core.shared_buffer import SharedBuffer

__all__ = ["SharedBuffer"]

__getattr__, __dir__ = lazy.names(__name__, {"SharedBuffer": ".shared_buffer"})
