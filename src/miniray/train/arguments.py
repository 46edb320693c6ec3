"""Arguments that make no sense are refused where they are given, in the same words everywhere."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import miniray
from miniray.core.remote import ActorClass


def check_whole(name: str, value: Any, low: int) -> None:
    """``ValueError`` unless ``value`` is an int of at least ``low``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueError(f"{name} must be an int >= {low}, not {value!r}")


def check_choices(choices: Mapping[str, Sequence[str]], **chosen: Any) -> None:
    """``ValueError`` for arguments that are none of what they may be."""
    for name, value in chosen.items():
        if value not in choices[name]:
            known = ", ".join(map(repr, choices[name]))
            raise ValueError(f"{name} must be one of {known}, not {value!r}")


def check_spelling(trainer: object, given: Iterable[str], more: Iterable[str] = ()) -> None:
    """``TypeError`` for a name in ``given`` that is nearly an option of the trainer's class.

    For options that are refused anyway: who mistypes ``sync_interval`` should not have to read
    about options of strategies.
    """
    known = set(more)
    for cls in type(trainer).__mro__[:-1]:
        if "__init__" in vars(cls):
            known |= set(inspect.signature(vars(cls)["__init__"]).parameters)
    for name in given:
        for meant in difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.7):
            raise TypeError(
                f"{type(trainer).__name__} has no option {name!r}; did you mean {meant!r}?"
            )


def worker_class(worker: Any, resources: Mapping[str, Any] | None) -> ActorClass[Any] | None:
    """The class to make workers of, decorated or not; None where ``create_worker`` makes them."""
    if inspect.isclass(worker):
        worker = miniray.remote(worker)
    if worker is not None and not isinstance(worker, ActorClass):
        raise TypeError(f"worker must be a class, not {worker!r}")
    if resources and worker is None:
        raise ValueError(
            "resources_per_worker goes with worker=; in create_worker() use "
            "MyWorker.options(num_cpus=..., num_gpus=...).remote(...)"
        )
    return worker
