"""``Hooks``: the hooks of a trainer and its callbacks, and the keyword arguments of ``train()``."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from miniray.checks import RENAMED_OPTIONS, find_similar, get_options, unknown_option
from miniray.train.callbacks import Callback
from miniray.train.options import IN_WORKER_HINTS
from miniray.train.workers.errors import report_replacement_loss
from miniray.train.workers.group import WorkerGroup, filter_kwargs

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class KwargRules:
    """Which keyword arguments ``train()`` of a class of trainers accepts.

    Attributes:
        worker_methods: Worker methods that receive them.
        used: Names that the trainer uses itself.
        hints: Hints for names that aren't accepted.
    """

    worker_methods: Sequence[str] = (
        *("__init__", "setup", "load_data_shard", "train_epoch", "train_steps", "evaluate"),
    )
    used: Sequence[str] = ()
    hints: Mapping[str, str] = dataclasses.field(default_factory=lambda: IN_WORKER_HINTS)


def check_names(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return ``kwargs``. Raise ``TypeError`` if hooks and workers would get one of them twice."""
    clash = ", ".join(name for name in kwargs if name in _OURS)
    if clash:
        raise TypeError(
            f"train() was given {clash}, which hooks and workers get from miniray: choose another "
            "name"
        )
    return kwargs


class Hooks:
    """Calls the hooks of a trainer, and then those of its callbacks.

    It is a ``WorkerSetup`` that calls ``on_worker_replaced``.

    Args:
        trainer: The trainer.
        callbacks: Its callbacks.
        rules: Which keyword arguments its ``train()`` accepts.

    Attributes:
        kwargs: The keyword arguments of the last ``train()``.
    """

    def __init__(self, trainer: Any, callbacks: Sequence[Callback], rules: KwargRules) -> None:
        self._trainer, self._callbacks, self._rules = trainer, callbacks, rules
        self.kwargs: dict[str, Any] = {}

    def filter_kwargs(self, function: Any) -> dict[str, Any]:
        """Return the arguments that ``function`` accepts."""
        return filter_kwargs(inspect.signature(function), self.kwargs)

    def emit(self, hook: str, *arguments: Any) -> None:
        """Call the trainer's hook and then those of the callbacks."""
        function = getattr(self._trainer, hook)
        function(*arguments, **self.filter_kwargs(function))
        for callback in self._callbacks:
            function = getattr(callback, hook)
            function(self._trainer, *arguments, **self.filter_kwargs(function))

    def on_worker_replaced(self, worker_id: int) -> None:
        """Call the callbacks."""
        for callback in self._callbacks:
            callback.on_worker_replaced(self._trainer, worker_id)

    def start(self, group: WorkerGroup) -> None:
        """Do nothing: ``on_train_start`` is called for new workers."""

    def set_up(self, group: WorkerGroup, worker_id: int) -> None:
        """Call the callbacks. If the replacement is lost during these calls, replace it again."""
        with report_replacement_loss("on_worker_replaced"):
            self.on_worker_replaced(worker_id)

    def check_kwargs(self, find_methods: Callable[[Sequence[str]], list[Any] | None]) -> None:
        """Raise ``TypeError`` for a keyword argument of ``train()`` that would have no effect.

        A name is accepted if a worker method, ``create_worker``, a hook or a callback has a
        parameter of that name. A ``**kwargs`` of a worker method or of ``create_worker`` accepts
        every name. Hooks always need a ``**kwargs``, so theirs counts only if it is used for more
        than calling ``super()``. The ``**kwargs`` of methods of miniray don't count: they are only
        passed on.

        Args:
            find_methods: Returns the worker methods with the given names, or their signatures.
                Returns None if these aren't known yet.
        """
        trainer, rules, methods = (
            self._trainer,
            self._rules,
            find_methods(self._rules.worker_methods),
        )
        if methods is None:
            return
        receivers = [*methods, *_get_overrides(trainer, ["create_worker"])]
        hooks = [
            hook
            for owner in (trainer, *self._callbacks)
            for hook in _get_overrides(owner, [*_HOOKS, "evaluate"])
        ]
        unaccepted = [
            name
            for name in self.kwargs
            if name not in rules.used
            and not any(_accepts(receiver, name) for receiver in receivers)
            and not any(_accepts(hook, name, _uses_kwargs) for hook in hooks)
        ]
        if unaccepted:
            named = {
                name for function in (*receivers, *hooks) for name in _get_parameters(function)
            }
            known = {*named, "epochs", "steps", "resume", *rules.used} - {"self", "trainer", *_OURS}
            others = _get_hints_of_trainer(type(trainer), known, unaccepted[0])
            hints = {**others, **rules.hints}
            raise unknown_option("train()", unaccepted[0], known, hints, search=False)


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
