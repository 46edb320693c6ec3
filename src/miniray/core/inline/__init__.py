"""The inline engine: everything in the calling process, one thing after another."""

from miniray.core.inline.engine import start

__all__ = ["start"]
