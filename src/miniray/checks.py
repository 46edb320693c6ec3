"""Check arguments. Each function returns the value, or raises an error that names the argument."""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import operator
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from numbers import Real
from typing import Any, TypeVar

T = TypeVar("T")

#: Options of other libraries and the option of miniray that does the same.
RENAMED_OPTIONS: Mapping[str, str] = {
    "accumulate_grad_batches": "accumulate",
    "bf16": "precision",
    "check_val_every_n_epoch": "eval_interval",
    "ckpt_path": "resume",
    "default_root_dir": "run_dir",
    "devices": "num_workers",
    "every_n_epochs": "every",
    "eval_steps": "eval_every_steps",
    "every_n_train_steps": "every_steps",
    "fp16": "precision",
    "gradient_accumulation_steps": "accumulate",
    "gradient_clip_val": "clip_norm",
    "learning_rate": "lr",
    "log_every_n_steps": "log_every",
    "logging_steps": "log_every",
    "max_epochs": "epochs",
    "max_grad_norm": "clip_norm",
    "max_steps": "steps",
    "max_tokens": "max_new_tokens",
    "mixed_precision": "precision",
    "nproc_per_node": "num_workers",
    "num_epochs": "epochs",
    "num_generations": "rollouts",
    "num_nodes": "num_workers",
    "num_replicas": "world_size",
    "num_train_epochs": "epochs",
    "log_dir": "directory",
    "logger": "loggers",
    "output_dir": "run_dir",
    "prefetch_factor": "prefetch",
    "resume_from_checkpoint": "resume",
    "save_steps": "every_steps",
    "strategy": "sync_strategy",
    "val_check_interval": "eval_every_steps",
    "world_size": "num_workers",
}

#: Hints for options of other libraries.
FOREIGN_OPTIONS: Mapping[str, str] = {
    "max_epochs": "Pass train(epochs=...).",
    "num_epochs": "Pass train(epochs=...).",
    "num_train_epochs": "Pass train(epochs=...).",
    "epochs": "Pass train(epochs=...).",
    "max_steps": "Pass train(steps=...).",
    "steps": "Pass train(steps=...).",
    "accelerator": "Trainers use GPUs if there are any. Pass use_gpu=False to train on the CPU.",
    "strategy": "The trainer class is the strategy, such as DDPTrainer or ModelParallelTrainer.",
    "every_n_train_steps": "Pass callbacks=Checkpoint(every_steps=...).",
    "every_n_epochs": "Pass callbacks=Checkpoint(every=...).",
    "save_steps": "Pass callbacks=Checkpoint(every_steps=...).",
    "save_top_k": "Pass keep_best=(metric, 'min') and keep_last=.",
    "report_to": "Pass loggers=['tensorboard'], for example.",
}

#: Classes in which a missing option is searched. Base classes come first: an option that a class
#: inherits is named with its base class only.
_OPTION_OWNERS: Mapping[str, tuple[str, ...]] = {
    "miniray.train": (
        *("BaseTrainer", "DataParallelTrainer", "DDPTrainer", "PipelineParallelTrainer"),
        *("ModelParallelTrainer", "Checkpoint", "EarlyStopping", "LRSchedule", "CSVLogger"),
        *("TensorBoardLogger", "WandbLogger", "MLflowLogger"),
    ),
    "miniray.data.datasets": (
        *("SourceDataset", "ParquetDataset", "JsonlDataset", "ArrowDataset", "IndexedDataset"),
    ),
    "miniray.data": ("DataLoader", "Mixture"),
    "miniray.rl": ("PPOConfig", "GRPOConfig", "KLPenalty", "Sampling", "PPOTrainer", "GRPOTrainer"),
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


def check_choice(
    name: str, value: T, choices: Collection[Any], hints: Mapping[str, str] | None = None
) -> T:
    """Return ``value`` if it is one of ``choices``.

    ``hints`` has sentences for the error, by values that the option has in other classes.
    """
    if value not in choices:
        shown = ", ".join(map(repr, choices))
        hint = (hints or {}).get(value) if isinstance(value, str) else None
        more = "" if hint is None else f". {hint}"
        raise ValueError(f"{name} must be one of {shown}, not {value!r}{more}")
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
    owner: str,
    name: str,
    known: Iterable[str],
    hints: Mapping[str, str] | None = None,
    error: type[Exception] = TypeError,
    *,
    search: bool = True,
) -> Exception:
    """Create the error for an option that ``owner`` doesn't have.

    The message contains the hint for the name, or else the option with the most similar name, the
    class or call that the option belongs to, or all options of ``owner``.

    Args:
        owner: Class or call, such as ``"DDPTrainer"`` or ``"train()"``.
        name: The option that was passed.
        known: Options of ``owner``.
        hints: Hints of ``owner``. They take precedence.
        error: Type of the error.
        search: Search the option in the other classes of miniray.
    """
    known = sorted(set(known) - {name})
    hint = (hints or {}).get(name)
    if hint is None and RENAMED_OPTIONS.get(name) in known:
        hint = f"Use {RENAMED_OPTIONS[name]}=."
    if hint is None:
        near = find_similar(name, known, 0.8)
        hint = f"Did you mean {near!r}?" if near else _find_hint(name, search)
    if hint is None:
        near = find_similar(name, known, 0.6)
        options = f"Its options are {', '.join(known)}." if known else "It has no options."
        hint = f"Did you mean {near!r}?" if near else options
    return error(f"{owner} has no option {name!r}. {hint}")


def find_similar(name: str, known: Iterable[str], cutoff: float) -> str | None:
    """Return the most similar name in ``known`` if their similarity (0 to 1) reaches ``cutoff``."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return near[0] if near else None


def _find_hint(name: str, search: bool) -> str | None:
    """Return the hint of a foreign option, or name the classes of miniray that have the option."""
    if name in FOREIGN_OPTIONS:
        return FOREIGN_OPTIONS[name]
    renamed = RENAMED_OPTIONS.get(name)
    if search and (owners := _find_owners(name)):
        return f"Pass it to {owners}."
    if renamed is not None and (owners := _find_owners(renamed)):
        return f"Use {renamed}= of {owners}."
    return None


def _find_owners(option: str) -> str:
    """Return the classes of miniray that have ``option``, as text."""
    owners: list[type] = []
    for module, names in _OPTION_OWNERS.items():
        package = importlib.import_module(module)  # only here: they import this module
        for name in names:
            cls = getattr(package, name)
            if option in get_options(cls) and not issubclass(cls, tuple(owners)):
                owners.append(cls)
    titles = {"BaseTrainer": "the trainer", "SourceDataset": "the dataset"}
    *first, last = [titles.get(cls.__name__, cls.__name__) for cls in owners] or [""]
    return f"{', '.join(first)} or {last}" if first else last


def get_options(cls: type) -> frozenset[str]:
    """Return the keyword arguments that ``cls(...)`` accepts.

    If ``__init__`` has ``**kwargs``, the options of the base class are included, except arguments
    that the base class requires: ``cls`` passes these itself.
    """
    return frozenset(_get_parameters(cls))


def _get_parameters(cls: type, extends: type | None = None) -> dict[str, inspect.Parameter]:
    """Return the parameters of ``cls(...)`` by name; see ``get_options``.

    ``extends`` receives ``**kwargs`` of ``cls`` before the base class does.
    """
    found: dict[str, inspect.Parameter] = {}
    bases = [base for base in cls.__mro__ if "__init__" in vars(base) and base is not object]
    for base in bases if extends is None else [*bases[:1], extends, *bases[1:]]:
        inherited = bool(found)
        parameters = list(inspect.signature(vars(base)["__init__"]).parameters.values())[1:]
        for p in parameters:
            if p.kind not in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) or p.name in found:
                continue
            if p.name.startswith("_"):  # for classes of miniray only
                continue
            if not inherited:
                found[p.name] = p
            elif p.default is not p.empty:
                found[p.name] = p.replace(kind=p.KEYWORD_ONLY)
        if base is not extends and not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return found


def check_options(
    owner: str,
    given: Iterable[str],
    known: Iterable[str],
    hints: Mapping[str, str] | None = None,
    error: type[Exception] = TypeError,
) -> None:
    """Raise ``error`` for the first name in ``given`` that isn't in ``known``."""
    known = set(known)
    for name in given:
        if name not in known:
            raise unknown_option(owner, name, known, hints, error)


def suggest_options(
    hints: Mapping[str, str] | None = None, *, extends: type | None = None
) -> Callable[[type[T]], type[T]]:
    """Decorate a class so that unknown keyword arguments raise the error of ``unknown_option``.

    Without it, Python's ``TypeError`` names only the keyword, and with ``**kwargs`` it comes from a
    base class. Type checkers see the signature as it is written. At run time, it lists the options
    of base classes in place of ``**kwargs``.

    Args:
        hints: Hints for names that aren't options of the class, even if a base class has them.
        extends: A class whose options ``**kwargs`` of the decorated class accepts.
    """

    def decorate(cls: type[T]) -> type[T]:
        init: Any = vars(cls)["__init__"]
        known = _get_parameters(cls, extends).keys() - set(hints or ())

        @functools.wraps(init)
        def checked_init(self: Any, *args: Any, **kwargs: Any) -> None:
            unknown = [name for name in kwargs if name not in known and not name.startswith("_")]
            if unknown:
                # A subclass may have further options, which only its own __init__ accepts.
                name = unknown[0]
                all_known = known | get_options(type(self))
                raise unknown_option(type(self).__name__, name, all_known, hints)
            init(self, *args, **kwargs)

        cls.__init__ = checked_init  # type: ignore[method-assign]
        show_options(cls, hidden=hints or (), extends=extends)
        return cls

    return decorate


def show_options(cls: type, *, hidden: Collection[str] = (), extends: type | None = None) -> None:
    """Let ``inspect.signature(cls)`` list the options of base classes in place of ``**kwargs``.

    Args:
        cls: The class.
        hidden: Options of base classes that ``cls`` doesn't have.
        extends: See ``suggest_options``.
    """
    init: Any = vars(cls)["__init__"]
    own = list(inspect.signature(init).parameters.values())
    shown = [p for name, p in _get_parameters(cls, extends).items() if name not in hidden]
    shown += [p for p in own if p.kind is p.VAR_POSITIONAL]
    init.__signature__ = inspect.Signature([own[0], *sorted(shown, key=lambda p: p.kind)])
