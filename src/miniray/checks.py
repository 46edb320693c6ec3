"""Check arguments. Each function returns the value, or raises an error that names the argument."""

from __future__ import annotations

import difflib
import functools
import inspect
import operator
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from numbers import Real
from typing import Any, TypeVar

T = TypeVar("T")

#: Options that users know from other libraries or expect on a different class, and what to do.
FOREIGN_OPTIONS: Mapping[str, str] = {
    "max_epochs": "Pass train(epochs=...).",
    "num_epochs": "Pass train(epochs=...).",
    "num_train_epochs": "Pass train(epochs=...).",
    "epochs": "Pass train(epochs=...).",
    "max_steps": "Pass train(...); its length is counted in epochs.",
    "devices": "Use num_workers=.",
    "num_nodes": "Use num_workers= and backend='ray'.",
    "world_size": "Use num_workers=.",
    "nproc_per_node": "Use num_workers=.",
    "accelerator": "Reserve GPUs with resources_per_worker={'num_gpus': 1}.",
    "strategy": "Choose a trainer class, such as DDPTrainer.",
    "every_n_train_steps": "Pass callbacks=Checkpoint(every=...).",
    "every_n_epochs": "Pass callbacks=Checkpoint(every=...).",
    "save_top_k": "Pass keep_best=(metric, 'min') and keep_last=.",
    "save_steps": "Pass callbacks=Checkpoint(every=...).",
    "gradient_accumulation_steps": "Use accumulate=.",
    "accumulate_grad_batches": "Use accumulate=.",
    "gradient_clip_val": "Use clip_norm=.",
    "max_grad_norm": "Use clip_norm=.",
    "mixed_precision": "Use precision=.",
    "bf16": "Use precision='bf16'.",
    "fp16": "Use precision='fp16'.",
    "logger": "Pass callbacks=.",
    "val_check_interval": "Use eval_interval=.",
    "check_val_every_n_epoch": "Use eval_interval=.",
    "default_root_dir": "Use run_dir=.",
    "output_dir": "Use run_dir=.",
    "ckpt_path": "Use resume=.",
    "resume_from_checkpoint": "Use resume=.",
}


def check_int(name: str, value: Any, low: int | None = None, hint: str = "") -> int:
    """Return ``value`` as an int that is at least ``low``. NumPy integers pass, bool doesn't."""
    bound = "" if low is None else f" >= {low}"
    is_int = not isinstance(value, bool) and hasattr(value, "__index__")
    number = operator.index(value) if is_int else 0
    if not is_int or (low is not None and number < low):
        raise ValueError(f"{name} must be an int{bound}{hint}, not {value!r}")
    return number


def check_number(
    name: str,
    value: Any,
    low: float | None = None,
    high: float | None = None,
    *,
    open_low: bool = False,
    open_high: bool = False,
) -> float:
    """Return ``value`` as a float between ``low`` and ``high``, which are included by default."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    number = float(value) if is_number else 0.0
    too_low = low is not None and not (number > low if open_low else number >= low)
    too_high = high is not None and not (number < high if open_high else number <= high)
    if not is_number or too_low or too_high:
        bounds = [
            *([] if low is None else [f"{'>' if open_low else '>='} {low:g}"]),
            *([] if high is None else [f"{'<' if open_high else '<='} {high:g}"]),
        ]
        bound = f" {' and '.join(bounds)}" if bounds else ""
        raise ValueError(f"{name} must be a number{bound}, not {value!r}")
    return number


def check_bool(name: str, value: Any) -> bool:
    """Return ``value`` if it is a bool. Strings such as ``"no"`` would count as True."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, not {value!r}")
    return value


def check_choice(name: str, value: T, choices: Collection[Any]) -> T:
    """Return ``value`` if it is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, not {value!r}")
    return value


def check_text(name: str, value: Any) -> str:
    """Return ``value`` if it is a nonempty string."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} must be a nonempty string, not {value!r}")
    return value


def check_path(name: str, value: Any) -> str:
    """Return ``value`` as a string if it is a nonempty path."""
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise ValueError(f"{name} must be a path, not {value!r}")
    path = os.fspath(value)
    return path if isinstance(path, str) else os.fsdecode(path)


def unknown_option(
    owner: str, name: str, known: Iterable[str], hints: Mapping[str, str] | None = None
) -> TypeError:
    """Create the error for an option that ``owner`` doesn't have.

    The error contains the hint for a name from a different library or class, or else the option
    with the most similar name.

    Args:
        owner: Class or call, such as ``"DDPTrainer"`` or ``"train()"``.
        name: The option that was passed.
        known: Options of ``owner``.
        hints: Hints that take precedence over ``FOREIGN_OPTIONS``.
    """
    known = sorted(known)
    hint = (hints or {}).get(name)
    if hint is None and name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
        hint = f"Did you mean {near[0]!r}?" if near else FOREIGN_OPTIONS.get(name)
    if hint is None and not known:
        hint = "It has no options."
    if hint is None:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
        hint = f"Did you mean {near[0]!r}?" if near else f"Its options are {', '.join(known)}."
    return TypeError(f"{owner} has no option {name!r}. {hint}")


def check_options(
    owner: str,
    given: Iterable[str],
    known: Iterable[str],
    hints: Mapping[str, str] | None = None,
) -> None:
    """Raise ``TypeError`` for the first name in ``given`` that isn't in ``known``."""
    known = set(known)
    for name in given:
        if name not in known:
            raise unknown_option(owner, name, known, hints)


def suggest_options(
    hints: Mapping[str, str] | None = None,
) -> Callable[[type[T]], type[T]]:
    """Decorate a class so that unknown keyword arguments raise the error of ``unknown_option``.

    Without it, Python's ``TypeError`` names only the keyword. The signature stays explicit, so type
    checkers and editors still see every option.
    """

    def decorate(cls: type[T]) -> type[T]:
        init: Any = vars(cls)["__init__"]
        parameters = list(inspect.signature(init).parameters.values())[1:]
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            raise ValueError(f"{cls.__name__}.__init__ accepts any keyword")
        known = {p.name for p in parameters if p.kind is not p.POSITIONAL_ONLY}

        @functools.wraps(init)
        def checked_init(self: Any, *args: Any, **kwargs: Any) -> None:
            if not known.issuperset(kwargs):
                check_options(type(self).__name__, kwargs, known, hints)
            init(self, *args, **kwargs)

        cls.__init__ = checked_init  # type: ignore[method-assign]
        return cls

    return decorate
