"""What may be asked for with ``@remote(...)``, ``.options(...)`` and ``@method(...)``.

One flat record serves functions, classes and methods; which fields are allowed where is a table,
so an option in the wrong place is refused with the list of the right ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

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
    "method": ("num_returns", "name"),
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
        allowed = ALLOWED[kind]
        for key, value in changes.items():
            if key not in allowed:
                raise ValueError(
                    f"unknown option {key!r} for a remote {kind}; "
                    f"valid options are {', '.join(allowed)}"
                )
            _check(key, value)
        merged = dataclasses.replace(self, **changes)
        if merged.get_if_exists and merged.name is None:
            raise ValueError("get_if_exists=True needs a name=")
        if kind == "class" and merged.lifetime == "detached" and merged.name is None:
            raise ValueError("lifetime='detached' needs a name=, or nobody could find the actor")
        return merged


def _check(key: str, value: Any) -> None:
    if value is None:
        return
    if key in ("num_cpus", "num_gpus"):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
            raise ValueError(f"{key} must be a number >= 0, not {value!r}")
        if key == "num_gpus" and value > 1 and value != int(value):
            raise ValueError(f"num_gpus above 1 must be a whole number, not {value!r}")
    elif key == "num_returns":
        if value in ("streaming", "dynamic"):
            if value == "dynamic":
                raise ValueError('num_returns="dynamic" is gone from Ray too: use "streaming"')
        elif isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f'num_returns must be an int >= 0 or "streaming", not {value!r}')
    elif key in ("max_retries", "max_restarts", "max_task_retries"):
        if isinstance(value, bool) or not isinstance(value, int) or value < -1:
            raise ValueError(f"{key} must be an int >= -1 (-1: no limit), not {value!r}")
    elif key == "max_concurrency":
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"max_concurrency must be an int >= 1, not {value!r}")
    elif key in ("name", "namespace"):
        if not isinstance(value, str) or not value:
            raise ValueError(f"{key} must be a non-empty string, not {value!r}")
    elif key == "lifetime":
        if value != "detached":
            raise ValueError(f'lifetime must be "detached" or None, not {value!r}')
    elif key == "runtime_env":
        _check_runtime_env(value)


def _check_runtime_env(value: Any) -> None:
    if not isinstance(value, Mapping) or set(value) - {"env_vars"}:
        raise ValueError(f'runtime_env must be a dict with only "env_vars" in it, not {value!r}')
    env_vars = value.get("env_vars", {})
    if not isinstance(env_vars, Mapping) or not all(
        isinstance(k, str) and isinstance(v, str) for k, v in env_vars.items()
    ):
        raise ValueError('runtime_env["env_vars"] must map strings to strings')
