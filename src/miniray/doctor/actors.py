"""The recorder in workers of miniray's trainers, which are actors.

A trainer names ``set_up`` in its workers' environment (``miniray.core.startup``), with the run
directory and the worker's rank. The worker then records from before the user's object is made, and
the method it runs is its section: a worker that is stuck says in which.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from miniray.doctor.recorder import Recorder

#: What ``set_up`` imports: may be loaded once for all workers, before they are forked.
MODULES = ("miniray.doctor.actors", "miniray.doctor.instrument", "miniray.doctor.recorder")

RUN_DIR, RANK, WORLD_SIZE = "MINIRAY_RUN_DIR", "MINIRAY_RANK", "MINIRAY_WORLD_SIZE"


def environment(run_dir: str | os.PathLike[str], rank: int, world_size: int) -> dict[str, str]:
    """What ``set_up`` reads in the worker."""
    return {RUN_DIR: os.path.abspath(run_dir), RANK: str(rank), WORLD_SIZE: str(world_size)}


def set_up() -> Callable[[Any], None] | None:
    """Start recording; returns what is to be done with the worker's object.

    None where there is no run directory to write to: a worker on another machine than the driver's
    does without a box, and the doctor reports the rank as one that has none.
    """
    from miniray.doctor import instrument, recorder

    run_dir, rank, world_size = (os.environ[name] for name in (RUN_DIR, RANK, WORLD_SIZE))
    if not os.access(run_dir, os.W_OK):
        return None
    recorder.start(run_dir, int(rank), int(world_size), launcher="miniray")
    instrument.install()
    return name_sections


def name_sections(worker: Any) -> None:
    """Let each public method of ``worker`` be a section while it runs.

    Objects that take no new attributes (``__slots__``) are left as they are.
    """
    for name, method in inspect.getmembers(worker, inspect.ismethod):
        if name.startswith("_") or not _is_plain(method):
            continue
        try:
            setattr(worker, name, _as_section(name, method))
        except AttributeError:
            return


def _is_plain(method: Any) -> bool:
    """Whether the method has done its work when it returns."""
    function = inspect.unwrap(method.__func__)
    return not (
        inspect.iscoroutinefunction(function)
        or inspect.isgeneratorfunction(function)
        or inspect.isasyncgenfunction(function)
    )


def _look_at_losses(current: Recorder, result: Any, site: str) -> None:
    """Of an epoch whose steps nobody saw: its losses are all that is known of them."""
    for metric, value in result.items() if isinstance(result, Mapping) else ():
        if "loss" not in str(metric).lower():
            continue
        try:
            loss = float(value)
        except (TypeError, ValueError, OverflowError):  # no number, or not one number
            continue
        if not math.isfinite(loss):
            current.count_nonfinite(loss, site, 0)


def _as_section(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    from miniray.doctor import recorder, sites

    site = sites.definition_site(method)  # the caller is in a different process

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        current = recorder.current()
        if current is None:
            return method(*args, **kwargs)
        if name == "train_epoch" and args and isinstance(args[0], int):
            current.tell_epoch(args[0], site)  # all that is known of workers without torch's steps
        current.set_section(name, site)
        current.open_section()
        try:
            result = method(*args, **kwargs)
            if name == "train_epoch" and not current.step_number:
                _look_at_losses(current, result, site)
            return result
        finally:
            if recorder.current() is current:
                current.close_section(name, site)

    return run
