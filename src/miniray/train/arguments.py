"""Arguments that make no sense are refused where they are given, in the same words everywhere."""

from __future__ import annotations

import difflib
import inspect
import sys
import warnings
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

import miniray
from miniray.core.remote import ActorClass
from miniray.doctor.sites import is_users

#: Methods of workers, and of trainers and callbacks, that get train()'s arguments.
_TAKING = ("__init__", "setup", "load_data_shard", "train_epoch", "evaluate")
_HOOKS = ("train_epoch", "on_train_start", "on_epoch_start", "on_epoch_end", "on_train_end")
#: What these get besides.
_OURS = ("worker_id", "shard_id", "num_shards", "epoch", "result", "history")


def warn(text: str) -> None:
    """Warn at the user's line, however deep in miniray what is to be said was found."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and not is_users(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


def check_names(kwargs: Iterable[str]) -> None:
    """``TypeError`` for arguments of ``train()`` that others would get twice."""
    clash = ", ".join(name for name in kwargs if name in _OURS)
    if clash:
        raise TypeError(
            f"train() was given {clash}, which hooks and workers get from miniray: choose another "
            "name"
        )


def check_seconds(name: str, value: Any) -> Any:
    """``value``; ``ValueError`` unless it is a time limit, or None for none."""
    number = isinstance(value, Real) and not isinstance(value, bool)
    if value is not None and not (number and value > 0):
        raise ValueError(f"{name} must be a number of seconds > 0 or None, not {value!r}")
    return value


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
    return None if worker is None else worker.options(**(resources or {}))


def warn_of_unused(
    worker: ActorClass[Any], owners: Iterable[object], kwargs: Mapping[str, Any]
) -> None:
    """Warn of arguments of ``train()`` that neither the worker's methods nor hooks take.

    A ``**kwargs`` of the user's takes them all, one of miniray's own none.
    """
    cls = worker._spec.cls
    methods = [getattr(cls, name, None) for name in _TAKING]
    hooks = [getattr(owner, name, None) for owner in owners for name in _HOOKS]
    functions = [function for function in (*methods, *hooks) if callable(function)]
    unused = [name for name in kwargs if not any(_takes(f, name) for f in functions)]
    if unused:
        names = ", ".join(unused)
        warn(f"train() was given {names}, which no method of {cls.__name__} and no hook takes")


def _takes(function: Any, name: str) -> bool:
    parameters = inspect.signature(function).parameters
    if name in parameters:
        return True
    own = (getattr(function, "__module__", None) or "miniray").partition(".")[0] == "miniray"
    return not own and any(p.kind is p.VAR_KEYWORD for p in parameters.values())
