"""The process's current engine, and the public verbs that act on it."""

from __future__ import annotations

import atexit
import importlib
import math
import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

from miniray.checks import check_bool, check_int
from miniray.core import startup
from miniray.core.engine import Engine, InitConfig, RuntimeContext
from miniray.core.options import amount, text
from miniray.core.refs import ActorHandle, ObjectRef, ObjectRefGenerator
from miniray.tracebacks import hide_frames

if TYPE_CHECKING:
    from miniray.core.remote import Actor

T = TypeVar("T")

#: Where each engine lives; imported when first asked for, so that Ray is not needed otherwise.
BACKENDS = {
    "inline": "miniray.core.inline.engine",
    "local": "miniray.core.local.spawner",
    "ray": "miniray.core.ray",
}

_lock = threading.RLock()
_engine: Engine | None = None


class Session:
    """What ``init`` returns. As a context manager it shuts the engine down at the end."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.backend = engine.name

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if _engine is self.engine:
            shutdown()

    def __repr__(self) -> str:
        return f"<miniray session on the {self.backend} engine>"


def init(
    num_workers: int | None = None,
    *,
    backend: str | None = None,
    address: str | None = None,
    num_cpus: float | None = None,
    num_gpus: float | None = None,
    object_store_memory: int | None = None,
    namespace: str | None = None,
    log_to_driver: bool = True,
    ignore_reinit_error: bool = False,
) -> Session:
    """Start an engine for this process. Optional: first use starts the default one.

    Args:
        num_workers: processes in the pool that runs tasks (default: one a core). It never limits
            how many actors may exist.
        backend: ``"local"`` (default), ``"inline"`` or ``"ray"``. The environment variable
            ``MINIRAY_BACKEND`` overrides it. ``"ray"`` joins the Ray cluster that runs on this
            machine, and starts a Ray if there is none or if a size is set.
        address: a Ray cluster (``"auto"``, ``"ray://host:port"``); implies ``backend="ray"``.
        num_cpus, num_gpus: what to count as available, where it differs from what is found.
        object_store_memory: Maximum number of bytes of objects in shared memory. Objects beyond it
            go to disk. Default: 30 % of the memory that control groups leave to this process.
        namespace: where actor names live (default: one of this session's own).
        log_to_driver: show what workers print on this terminal.
        ignore_reinit_error: return the running session instead of raising.

    Raises:
        RuntimeError: an engine is running already.
        ValueError: a bad argument.
        EngineStartError: The engine couldn't start, and nothing was left behind. The error names
            the limit of the system that was too low, if one was.
    """
    global _engine
    check_bool("ignore_reinit_error", ignore_reinit_error)
    with _lock:
        if _engine is not None:
            if ignore_reinit_error:
                return Session(_engine)
            raise RuntimeError(
                f"miniray is already running (backend {_engine.name!r}): call miniray.shutdown() "
                "first, or pass ignore_reinit_error=True to keep using it"
            )
        name = choose_backend(backend, address)
        config = _config(
            num_workers=num_workers,
            address=address,
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            object_store_memory=object_store_memory,
            namespace=namespace,
            log_to_driver=log_to_driver,
        )
        startup.set_run_seed()
        try:
            _engine = importlib.import_module(BACKENDS[name]).start(config)
        except BaseException:
            startup.unset_run_seed()
            raise
        return Session(_engine)


def choose_backend(backend: str | None, address: str | None = None) -> str:
    """The engine that ``init`` with these starts. Raises ``ValueError``."""
    source = "backend"
    if os.environ.get("MINIRAY_BACKEND"):
        backend, source = os.environ["MINIRAY_BACKEND"], "MINIRAY_BACKEND"
    if backend is None:
        backend = "ray" if address is not None else "local"
    if backend not in BACKENDS:
        raise ValueError(f"{source} is {backend!r}; it must be one of {', '.join(BACKENDS)}")
    if address is not None and backend != "ray":
        raise ValueError(f"address={address!r} needs backend 'ray', but {source} is {backend!r}")
    return backend


def _config(**given: Any) -> InitConfig:
    """The arguments of ``init`` but for the engine's choice. Raises ``ValueError``."""
    for name in ("num_cpus", "num_gpus", "object_store_memory"):
        if given[name] is not None:
            given[name] = amount(name, given[name])
            if name == "object_store_memory":
                given[name] = int(given[name])
            if given[name] == 0 and name != "num_gpus":
                raise ValueError(f"{name} must be above 0, not {given[name]!r}")
    if given["num_workers"] is not None:
        given["num_workers"] = check_int("num_workers", given["num_workers"], 1)
    if given["num_gpus"] is not None and given["num_gpus"] != int(given["num_gpus"]):
        raise ValueError(f"num_gpus must be a whole number, not {given['num_gpus']!r}")
    if given["namespace"] is not None:
        text("namespace", given["namespace"])
    check_bool("log_to_driver", given["log_to_driver"])
    return InitConfig(**given)


def engine() -> Engine:
    """The running engine; the default one is started if there is none."""
    current = _engine
    if current is None:
        with _lock:
            if _engine is None:
                init()
            current = _engine
            assert current is not None
    return current


def install(new: Engine | None) -> None:
    """Make ``new`` the process's engine: for workers, which are born with one, and after fork."""
    global _engine
    _engine = new


def is_initialized() -> bool:
    """Whether an engine is running in this process."""
    return _engine is not None


def shutdown() -> None:
    """End all actors and workers and free all memory. Does nothing when no engine is running.

    Nor in remote code: the session is the driver's.
    """
    global _engine
    with _lock:
        if _engine is not None and _engine.in_worker:
            return
        current, _engine = _engine, None
    if current is not None:
        current.shutdown()
        startup.unset_run_seed()


atexit.register(shutdown)


@overload
def get(refs: ObjectRef[T], timeout: float | None = None) -> T: ...
@overload
def get(refs: Sequence[ObjectRef[T]], timeout: float | None = None) -> list[T]: ...
def get(refs: Any, timeout: float | None = None) -> Any:
    """The value of a ref, or the values of a list of refs, waiting as long as it takes.

    Raises what the remote code raised, ``GetTimeoutError`` after ``timeout`` seconds, and
    ``ActorDiedError``/``WorkerCrashedError`` when the process is gone. With several refs the first
    error in list order is raised.
    """
    if timeout is not None:
        timeout = _limit(timeout)
    try:
        if isinstance(refs, ObjectRef):
            return refs._engine.get((refs,), timeout)[0]
        _check_refs("get", refs)
        return engine().get(refs, timeout) if refs else []
    except BaseException as error:
        hide_frames(error)
        raise


def put(value: T) -> ObjectRef[T]:
    """Store a value once, to pass to many calls without copying it each time."""
    if isinstance(value, ObjectRef):
        raise TypeError("put() of an ObjectRef: pass the ref itself, or a list holding it")
    return engine().put(value)


def wait(
    refs: Sequence[ObjectRef[T]],
    *,
    num_returns: int = 1,
    timeout: float | None = None,
    fetch_local: bool = True,
) -> tuple[list[ObjectRef[T]], list[ObjectRef[T]]]:
    """Wait until ``num_returns`` of ``refs`` are ready, or for ``timeout`` seconds.

    Returns (ready, the others); a failed call counts as ready. ``fetch_local=False`` lets a Ray
    cluster leave the values where they are; on one machine there is nothing to fetch.
    """
    _check_refs("wait", refs)
    if len(set(refs)) != len(refs):
        raise ValueError("wait() got the same ref twice")
    if not isinstance(num_returns, int) or not 1 <= num_returns <= max(len(refs), 1):
        raise ValueError(f"num_returns must be between 1 and {len(refs)}, not {num_returns!r}")
    check_bool("fetch_local", fetch_local)
    if timeout is not None:
        timeout = _limit(timeout)
    if not refs:
        return [], []
    return engine().wait(refs, num_returns, timeout, fetch_local)


def _limit(timeout: Any) -> float | None:
    """A time limit in seconds as engines take it: None for one without end."""
    try:
        if isinstance(timeout, bool) or math.isnan(timeout):
            raise TypeError
    except TypeError:
        raise ValueError(f"timeout must be a number of seconds, not {timeout!r}") from None
    return None if timeout == math.inf else float(timeout)


def _check_refs(verb: str, refs: Any) -> None:
    if not isinstance(refs, (list, tuple)):
        what = "an ObjectRef or a list of them" if verb == "get" else "a list of ObjectRefs"
        hint = "; call it with .remote(...)" if hasattr(refs, "remote") else ""
        raise TypeError(f"{verb}() takes {what}, not {refs!r:.80}{hint}")
    for i, ref in enumerate(refs):
        if not isinstance(ref, ObjectRef):
            raise TypeError(f"{verb}(): element {i} is not an ObjectRef but {ref!r}")


def kill(actor: ActorHandle[Any] | Actor, *, no_restart: bool = True) -> None:
    """End an actor's process at once; with ``no_restart=False`` it may restart."""
    if not isinstance(actor, ActorHandle):
        raise TypeError(f"kill() takes an actor handle, not {actor!r}; for a call use cancel(ref)")
    engine().kill(actor._actor, check_bool("no_restart", no_restart))


def cancel(
    ref: ObjectRef[Any] | ObjectRefGenerator, *, force: bool = False, recursive: bool = True
) -> None:
    """Cancel a call: queued, it never runs; running, a task is interrupted.

    With ``recursive`` so are the tasks it has started; ``force`` ends them in any case.
    """
    if not isinstance(ref, ObjectRefGenerator):
        _check_refs("cancel", [ref])
    engine().cancel(ref, check_bool("force", force), check_bool("recursive", recursive))


def get_actor(name: str, namespace: str | None = None) -> ActorHandle[Any]:
    """The handle of a named actor; ``ValueError`` when there is none."""
    return engine().get_actor(name, namespace)


def nodes() -> list[dict[str, Any]]:
    """The machines of the session."""
    return engine().nodes()


def cluster_resources() -> dict[str, float]:
    """CPUs, GPUs and memory in total."""
    return engine().cluster_resources()


def available_resources() -> dict[str, float]:
    """CPUs, GPUs and memory not taken by tasks or actors now."""
    return engine().available_resources()


def get_runtime_context() -> RuntimeContext:
    """Ids of the node, worker, actor and task the calling code runs in."""
    return engine().runtime_context()


def get_gpu_ids() -> list[int]:
    """The GPUs assigned to this worker."""
    return engine().gpu_ids()
