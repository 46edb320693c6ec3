"""What may be asked for with ``@remote(...)``, ``.options(...)`` and ``@method(...)``.

One flat record serves functions, classes and methods; which fields are allowed where is a table,
so an option in the wrong place is refused with the list of the right ones.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Mapping
from typing import Any, Literal

from miniray.checks import check_int, check_options

#: Options by what they are applied to. Order is the order of the error message.
ALLOWED: dict[str, tuple[str, ...]] = {
    "function": ("num_cpus", "num_gpus", "num_returns", "max_retries", "name", "runtime_env"),
    "class": (
        "num_cpus",
        "num_gpus",
        "max_restarts",
        "max_task_retries",
        "max_concurrency",
        "name",
        "namespace",
        "get_if_exists",
        "lifetime",
        "runtime_env",
    ),
    "method": ("num_returns",),
}

_OTHER_KIND = {
    name: f"It belongs to a remote {kind}." for kind, names in ALLOWED.items() for name in names
}


@dataclasses.dataclass(frozen=True)
class Options:
    """Validated options. ``None`` means "not said": the engine's default applies.

    ``num_cpus`` not said is 1 for a task and 0 for an actor, as in Ray: an actor without a request
    costs nothing to place. ``max_retries`` not said is 3, ``max_concurrency`` 1 (1000 for a class
    with ``async def`` methods).
    """

    num_cpus: float | None = None
    num_gpus: float | None = None
    num_returns: int | Literal["streaming"] | None = None
    max_retries: int | None = None
    max_restarts: int = 0
    max_task_retries: int = 0
    max_concurrency: int | None = None
    name: str | None = None
    namespace: str | None = None
    get_if_exists: bool = False
    lifetime: Literal["detached"] | None = None
    runtime_env: Mapping[str, Any] | None = None

    @property
    def task_cpus(self) -> float:
        """What a task with these options holds while it runs."""
        return 1.0 if self.num_cpus is None else float(self.num_cpus)

    @property
    def env_vars(self) -> dict[str, str]:
        return dict((self.runtime_env or {}).get("env_vars", {}))

    def inheriting(self, env_vars: Mapping[str, str] | None) -> Options:
        """These options in a worker that has ``env_vars``: what it starts gets them too."""
        if not env_vars:
            return self
        merged = {**env_vars, **self.env_vars}
        return dataclasses.replace(self, runtime_env={"env_vars": merged})

    def merged(self, kind: str, changes: Mapping[str, Any]) -> Options:
        """These options with ``changes`` applied. Raises on an unknown option or a bad value."""
        check_options(f"a remote {kind}", changes, ALLOWED[kind], _OTHER_KIND, ValueError)
        checked = {
            key: getattr(Options, key) if value is None else _checked(key, value)
            for key, value in changes.items()
        }
        merged = dataclasses.replace(self, **checked)
        if merged.get_if_exists and merged.name is None:
            raise ValueError("get_if_exists=True needs a name=")
        if kind == "class" and merged.lifetime == "detached" and merged.name is None:
            raise ValueError("lifetime='detached' needs a name=, or nobody could find the actor")
        return merged


def amount(key: str, value: Any) -> float:
    """``value`` as a finite number >= 0; numpy's are numbers, too."""
    try:
        fits = not isinstance(value, bool) and math.isfinite(value) and value >= 0
    except TypeError:  # not a number
        fits = False
    if not fits:
        raise ValueError(f"{key} must be a number >= 0, not {value!r}")
    return value if type(value) is int else float(value)


def text(key: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{key} must be a non-empty string, not {value!r}")
    return value


def _checked(key: str, value: Any) -> Any:
    """The value as it is kept. Raises ``ValueError``."""
    if key in ("num_cpus", "num_gpus"):
        if key == "num_gpus" and amount(key, value) > 1 and value != int(value):
            raise ValueError(f"num_gpus above 1 must be a whole number, not {value!r}")
        return amount(key, value)
    if key == "num_returns":
        return _num_returns(value)
    if key in ("max_retries", "max_restarts", "max_task_retries"):
        return check_int(key, value, -1, " (-1: no limit)")
    if key == "max_concurrency":
        return check_int(key, value, 1)
    if key in ("name", "namespace"):
        return text(key, value)
    if key == "lifetime" and value != "detached":
        raise ValueError(f'lifetime must be "detached" or None, not {value!r}')
    if key == "get_if_exists" and not isinstance(value, bool):
        raise ValueError(f"get_if_exists must be True or False, not {value!r}")
    if key == "runtime_env":
        _check_runtime_env(value)
    return value


def _num_returns(value: Any) -> Any:
    if isinstance(value, str):
        if value == "dynamic":
            raise ValueError('num_returns="dynamic" is gone from Ray too: use "streaming"')
        if value == "streaming":
            return value
    elif not isinstance(value, bool) and hasattr(value, "__index__") and value >= 0:
        return operator.index(value)
    raise ValueError(f'num_returns must be an int >= 0 or "streaming", not {value!r}')


def _check_runtime_env(value: Any) -> None:
    if not isinstance(value, Mapping) or set(value) - {"env_vars"}:
        raise ValueError(f'runtime_env must be a dict with only "env_vars" in it, not {value!r}')
    env_vars = value.get("env_vars", {})
    if not isinstance(env_vars, Mapping) or not all(
        isinstance(k, str) and isinstance(v, str) for k, v in env_vars.items()
    ):
        raise ValueError('runtime_env["env_vars"] must map strings to strings')
    for name, setting in env_vars.items():
        if not name or "=" in name or "\0" in name + setting:
            raise ValueError(
                f'runtime_env["env_vars"] cannot have {name!r}: a name is not empty, has no "=", '
                "and neither it nor its value has a null character"
            )
