"""Check the keyword arguments of ``train()`` before anything is started."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from miniray.checks import RENAMED_OPTIONS, find_similar, get_options, unknown_option

#: Methods of trainers and callbacks that get the keyword arguments of train().
_HOOKS = (
    *("train_epoch", "on_train_start", "on_epoch_start", "on_epoch_end", "on_train_end"),
    *("on_step_end", "on_evaluate_end"),
)
#: Arguments that miniray passes to them.
_OURS = (
    *("worker_id", "shard_id", "num_shards", "epoch", "result", "history"),
    *("step", "metrics", "scores"),
)


def check_names(kwargs: Iterable[str]) -> None:
    """Raise ``TypeError`` for arguments of ``train()`` that hooks and workers would get twice."""
    clash = ", ".join(name for name in kwargs if name in _OURS)
    if clash:
        raise TypeError(
            f"train() was given {clash}, which hooks and workers get from miniray: choose another "
            "name"
        )


def check_train_kwargs(
    trainer: Any,
    kwargs: Iterable[str],
    worker_methods: Iterable[Any],
    options: Iterable[str],
    hints: Mapping[str, str],
) -> None:
    """Raise ``TypeError`` for a keyword argument of ``train()`` that would have no effect.

    A name is accepted if a worker method, ``create_worker``, a hook or a callback has a parameter
    of that name. A ``**kwargs`` of a worker method or of ``create_worker`` accepts every name.
    Hooks always need a ``**kwargs``, so theirs counts only if it is used for more than calling
    ``super()``. The ``**kwargs`` of methods of miniray don't count: they are only passed on.

    Args:
        trainer: The trainer, with its ``callbacks``.
        kwargs: Names that ``train()`` received.
        worker_methods: Functions, or signatures, of worker methods that get the keyword arguments.
        options: Parameters of ``train()`` itself.
        hints: See ``unknown_option``.
    """
    receivers = [*worker_methods, *_get_overrides(trainer, ["create_worker"])]
    hooks = [
        hook
        for owner in (trainer, *trainer.callbacks)
        for hook in _get_overrides(owner, [*_HOOKS, "evaluate"])
    ]
    unaccepted = [
        name
        for name in kwargs
        if not any(_accepts(receiver, name) for receiver in receivers)
        and not any(_accepts(hook, name, _uses_kwargs) for hook in hooks)
    ]
    if unaccepted:
        named = {name for function in (*receivers, *hooks) for name in _get_parameters(function)}
        known = {*named, *options} - {"self", "trainer", *_OURS}
        others = _get_hints_of_trainer(type(trainer), known, unaccepted[0])
        raise unknown_option("train()", unaccepted[0], known, {**others, **hints}, search=False)


def _get_hints_of_trainer(trainer: type, known: set[str], name: str) -> dict[str, str]:
    """Return hints for options of the trainer's class that were passed to ``train()``.

    They include names of other libraries, and ``name`` if it's similar to an option.
    """
    options = get_options(trainer) - known
    hints = {
        old: f"Use {new}= of {trainer.__name__}."
        for old, new in RENAMED_OPTIONS.items()
        if new in options
    }
    if (near := find_similar(name, options, 0.8)) and not find_similar(name, known, 0.8):
        hints[name] = f"Did you mean {near}= of {trainer.__name__}?"
    return {**hints, **dict.fromkeys(options, f"Pass it to {trainer.__name__}.")}


def _get_overrides(owner: Any, names: Iterable[str]) -> list[Any]:
    """Return the user's definitions of these methods, in all base classes of ``owner``."""
    found = [vars(base).get(name) for base in type(owner).__mro__ for name in names]
    found += [getattr(owner, "__dict__", {}).get(name) for name in names]
    return [function for function in found if callable(function) and not is_ours(function)]


def is_ours(function: Any) -> bool:
    """Return whether miniray defines a function."""
    # Methods that are written in C, such as object.__init__, have no module.
    return (getattr(function, "__module__", None) or "miniray").partition(".")[0] == "miniray"


def _get_parameters(receiver: Any) -> dict[str, inspect.Parameter]:
    signature = receiver
    if not isinstance(receiver, inspect.Signature):
        signature = inspect.signature(receiver)
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name: p for name, p in signature.parameters.items() if p.kind in kinds}


def _accepts(
    receiver: Any, name: str, uses_kwargs: Callable[[Any, str], bool] = lambda *_: True
) -> bool:
    """Return whether a function, or a signature, accepts a keyword argument."""
    signature = receiver
    if not isinstance(receiver, inspect.Signature):
        signature = inspect.signature(receiver)
    if name in _get_parameters(signature):
        return True
    kwargs = [p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD]
    return bool(kwargs) and not is_ours(receiver) and uses_kwargs(receiver, kwargs[0])


def _uses_kwargs(function: Any, kwargs: str) -> bool:
    """Return whether a function does more with its ``**kwargs`` than pass them to ``super()``."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):  # no source, or part of a line
        return True
    passed_on = {
        id(keyword.value)
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and _is_super_method(call.func)
        for keyword in call.keywords
    }
    return any(
        isinstance(node, ast.Name) and node.id == kwargs and id(node) not in passed_on
        for node in ast.walk(tree)
    )


def _is_super_method(function: ast.expr) -> bool:
    if not isinstance(function, ast.Attribute) or not isinstance(function.value, ast.Call):
        return False
    called = function.value.func
    return isinstance(called, ast.Name) and called.id == "super"
