"""The names of loggers, and the check of ``loggers=``."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from typing import Any

from miniray.checks import find_similar
from miniray.train.run.loggers.base import Logger

#: Name in ``loggers=[...]``: module in this package, and class.
LOGGERS: Mapping[str, tuple[str, str]] = {
    "csv": ("csv", "CSVLogger"),
    "mlflow": ("mlflow", "MLflowLogger"),
    "tensorboard": ("tensorboard", "TensorBoardLogger"),
    "wandb": ("wandb", "WandbLogger"),
}

_HINTS = {
    **dict.fromkeys(("jsonl", "json"), "metrics.jsonl in the run directory is always written."),
    "tb": "Did you mean 'tensorboard'?",
}


def create_loggers(given: str | Logger | Iterable[str | Logger]) -> list[Logger]:
    """Return the loggers that ``given`` names or contains.

    Raise ``ValueError`` for an unknown name, ``TypeError`` for other objects, and ``ImportError``
    if a package isn't installed.
    """
    entries: list[Any] = [given] if isinstance(given, (str, Logger)) else list(given)
    return [_create(entry) for entry in entries]


def _create(entry: Any) -> Logger:
    if isinstance(entry, Logger):
        return entry
    if isinstance(entry, str):
        if entry not in LOGGERS:
            near = find_similar(entry, LOGGERS, 0.6)
            known = f"Loggers are {', '.join(LOGGERS)}."
            hint = _HINTS.get(entry) or (f"Did you mean {near!r}?" if near else known)
            raise ValueError(f"Unknown logger {entry!r}. {hint}")
        module, name = LOGGERS[entry]
        created: Logger = getattr(importlib.import_module(f"{__package__}.{module}"), name)()
        return created
    hint = f". Write {entry.__name__}()." if isinstance(entry, type) else ""
    raise TypeError(f"loggers must be names or Logger objects, not {entry!r}{hint}")
