"""Seeds for code that runs in workers: set before the user's class is constructed there.

The seed travels as an environment variable, so it works alike on every engine.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import sys
from collections.abc import Iterator

VARIABLE = "MINIRAY_SEED"

_env: contextvars.ContextVar[dict[str, str] | None] = contextvars.ContextVar("env", default=None)


@contextlib.contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Actors created inside begin with this seed; None leaves them as they are."""
    token = _env.set(None if seed is None else {VARIABLE: str(seed)})
    try:
        yield
    finally:
        _env.reset(token)


def environment() -> dict[str, str] | None:
    """What an actor created here and now gets on top of its own environment variables."""
    return _env.get()


def apply() -> None:
    """Seed ``random``, and numpy and torch where they are loaded, if there is a seed to use."""
    text = os.environ.get(VARIABLE)
    if text is None:
        return
    seed = int(text)
    import random

    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(seed)
