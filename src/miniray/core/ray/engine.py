"""The Engine contract on top of Ray's API."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from miniray.core import serialize, session, startup
from miniray.core.engine import Capabilities, Engine, RuntimeContext, count_room
from miniray.core.options import ALLOWED, Options
from miniray.core.ray.host import guard_function, host_class
from miniray.core.ray.liveness import HeadWatch, wait_for_lost_nodes
from miniray.core.ray.refs import (
    RayRef,
    RayStream,
    first_error,
    ray_refs_of,
    translate,
    unwrap_refs,
    wrap,
    wrap_handle,
)
from miniray.core.refs import ActorHandle, ObjectRef, ObjectRefGenerator
from miniray.core.specs import ClassSpec, FunctionSpec
from miniray.errors import (
    ActorDiedError,
    ActorUnschedulableError,
    CapabilityError,
    GetTimeoutError,
    ObjectLostError,
    SessionEndedError,
)

_CACHE_KEY = "ray"  # in a spec's cache; Ray itself exports again for a new cluster or job


class RayEngine(Engine):
    """This process's connection to Ray: the driver's, or that of a worker running user code."""

    name = "ray"
    capabilities = Capabilities(
        processes=True,
        concurrent=True,
        zero_copy=True,
        object_store_limit=True,
        shared_memory=False,
        multi_node=True,
    )

    def __init__(self, *, owned: bool, client: bool = False, in_worker: bool = False) -> None:
        self._owned = owned
        self._client = client
        self.in_worker = in_worker
        self._closed = False
        #: Actors to end at shutdown where Ray itself goes on without us.
        self._created: weakref.WeakSet[Any] = weakref.WeakSet()
        self._fitting: set[tuple[float, ...]] = set()  # requests that some node can meet
        self._head: HeadWatch | None = None
        self._head_lost = ""

    def watch_head(self) -> None:
        """End the session with an error if the head node is lost. Ray would end the process."""
        if not self._client:  # which has its own connection, and survives
            self._head = HeadWatch(_head_address(), self._lose_head)

    def _lose_head(self) -> None:
        assert self._head is not None
        if not ray.is_initialized() or self._head.address != _head_address():
            return  # the program ended its own Ray, which this session used
        self._head_lost = (
            f"the head node of the Ray cluster ({self._head.address}) hasn't answered for "
            f"{self._head.timeout:g} s, and the session has ended. Restart the cluster; trainers "
            "continue from their last checkpoint with resume=True"
        )
        self._closed = True
        # A call that comes too late must not start or join a different Ray.
        ray._private.auto_init_hook.enable_auto_connect = False
        ray.shutdown()  # ends waits in other threads

    # -- running code ---------------------------------------------------------------------------

    def submit(
        self, spec: FunctionSpec, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
    ) -> ObjectRef[Any] | list[ObjectRef[Any]] | ObjectRefGenerator | None:
        self._check_open(ActorDiedError)
        self._check_fits(spec.name, options.task_cpus, options)
        remote = spec.cache.get(_CACHE_KEY)
        if remote is None:
            remote = spec.cache[_CACHE_KEY] = ray.remote(guard_function(spec, attach))
        chosen = _ray_options(options, "function")
        num_returns = spec.num_returns(options)
        if num_returns != 1:
            self._check_streaming(num_returns)
            chosen["num_returns"] = num_returns
        if chosen:
            remote = remote.options(**chosen)
        return wrap(self, _send(remote, args, kwargs, spec.function, spec.name))  # type: ignore[no-any-return]

    def create_actor(
        self, spec: ClassSpec, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
    ) -> ActorHandle[Any]:
        self._check_open(ActorDiedError)
        self._check_fits(spec.name, options.num_cpus or 0, options)
        actor_class = spec.cache.get(_CACHE_KEY)
        if actor_class is None:
            actor_class = spec.cache[_CACHE_KEY] = ray.remote(host_class(spec, attach))
        chosen = _ray_options(options, "class")
        # Said in any case: Ray's own default wants a free CPU to start on.
        chosen["num_cpus"] = options.num_cpus or 0
        if options.name is not None:
            self._find(options.name, options.namespace)  # for what it does to a dead one
        handle = _send(actor_class.options(**chosen), args, kwargs, spec.cls, spec.name)
        if options.lifetime is None and not options.get_if_exists:
            self._created.add(handle)
        # With get_if_exists the actor may be of another class than this one.
        return wrap_handle(self, handle, None if options.get_if_exists else spec.info)

    def call(
        self,
        actor: Any,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        num_returns: int | str,
    ) -> ObjectRef[Any] | list[ObjectRef[Any]] | ObjectRefGenerator | None:
        self._check_open(ActorDiedError)
        remote = getattr(actor, method)
        # Our host classes declare it for every method; options() costs as much as the call.
        declared = getattr(actor, "_ray_method_num_returns", {}).get(method)
        if num_returns != declared:
            self._check_streaming(num_returns)
            remote = remote.options(num_returns=num_returns)
        return wrap(self, _send(remote, args, kwargs, None, method))  # type: ignore[no-any-return]

    def _check_open(self, kind: type[Exception]) -> None:
        if self._head_lost:
            raise SessionEndedError(self._head_lost)
        if self._closed:
            raise kind("this miniray session was shut down")

    def _check_streaming(self, num_returns: int | str | None) -> None:
        if self._client and num_returns == "streaming":
            raise CapabilityError(
                "generators do not stream through Ray's client (ray://): run the driver on a node "
                "of the cluster and connect with address='auto'"
            )

    def _check_fits(self, name: str, cpus: float, options: Options) -> None:
        """Raise where no node has what is asked for.

        An autoscaling cluster might grow a larger node; no such promise is waited for here.
        """
        request = {"CPU": cpus, "GPU": options.num_gpus or 0}
        key = tuple(request.values())
        if key in self._fitting:
            return
        alive = [node["Resources"] for node in self.nodes() if node["Alive"]]
        if any(all(n <= has.get(kind, 0) for kind, n in request.items()) for has in alive):
            self._fitting.add(key)
            return
        asked = ", ".join(f"{amount:g} {kind}" for kind, amount in request.items() if amount)
        there = "; ".join(f"{has.get('CPU', 0):g} CPU, {has.get('GPU', 0):g} GPU" for has in alive)
        raise ActorUnschedulableError(
            f"{name} asks for {asked} on one node, but the cluster's nodes have: {there or 'none'}"
        )

    # -- objects --------------------------------------------------------------------------------

    def put(self, value: Any) -> ObjectRef[Any]:
        self._check_open(ObjectLostError)
        try:
            return RayRef(self, ray.put(value))
        except RayError as error:
            raise translate(error) from None
        except Exception:  # pickling runs arbitrary user code: anything may be raised
            serialize.pack(value)  # our own pickler fails in the same place and says where
            raise

    def get(self, refs: Sequence[ObjectRef[Any]], timeout: float | None) -> list[Any]:
        ray_refs = ray_refs_of(self, refs)
        with self._waiting():
            try:
                return ray.get(ray_refs, timeout=timeout)  # type: ignore[no-any-return]
            except ray.exceptions.GetTimeoutError:
                ready, _ = ray.wait(ray_refs, num_returns=len(ray_refs), timeout=0)
                raise GetTimeoutError(
                    f"{len(ray_refs) - len(ready)} of {len(ray_refs)} not ready after {timeout:g} s"
                ) from None
            except RayError as error:
                self._check_open(ObjectLostError)
                raise translate(first_error(ray_refs) or error) from None

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """Around a wait in Ray, which says all kinds of things when another thread shuts it down.

        ``SystemExit`` if it was waiting, an ``AttributeError`` of its own if it was about to.
        """
        # The last thing before it: of a Ray that has ended, Ray starts another or ends the process.
        self._check_open(ObjectLostError)
        try:
            yield
        except (Exception, SystemExit):
            self._check_open(ObjectLostError)
            raise

    def wait(
        self,
        refs: Sequence[ObjectRef[Any]],
        num_returns: int,
        timeout: float | None,
        fetch_local: bool = True,
    ) -> tuple[list[ObjectRef[Any]], list[ObjectRef[Any]]]:
        ray_refs = ray_refs_of(self, refs)
        with self._waiting():
            done, _ = ray.wait(
                ray_refs, num_returns=num_returns, timeout=timeout, fetch_local=fetch_local
            )
            self._check_open(ObjectLostError)  # the end of Ray ends it as if time were up
        finished = {ref.binary() for ref in done}
        ready = [ref for ref in refs if ref.binary() in finished]
        return ready, [ref for ref in refs if ref.binary() not in finished]

    def on_ready(self, ref: ObjectRef[Any], callback: Callable[[], None]) -> None:
        self._check_open(ObjectLostError)
        ray_refs_of(self, [ref])[0].future().add_done_callback(lambda _: callback())

    # -- control --------------------------------------------------------------------------------

    def kill(self, actor: Any, no_restart: bool) -> None:
        self._check_open(ActorDiedError)
        ray.kill(actor, no_restart=no_restart)
        if no_restart:
            # Ray has only been asked to: until it is done calls still run. One that fails tells.
            with contextlib.suppress(RayError):
                while ray.get(actor.__ray_ready__.remote()):
                    self._check_open(ActorDiedError)  # without its head, Ray ends no actor
                    time.sleep(0.001)

    def cancel(
        self, ref: ObjectRef[Any] | ObjectRefGenerator, force: bool, recursive: bool
    ) -> None:
        self._check_open(ObjectLostError)
        if isinstance(ref, RayStream):
            ray.cancel(ref.ray_generator, force=force, recursive=recursive)
            return
        ray_ref = ray_refs_of(self, [ref])[0]  # type: ignore[list-item]
        # Ray 2.60 aborts the whole process when a task is cancelled right after it was submitted
        # with a ref that is not ready (a race like the one in ray-project/ray#56123). The wait
        # gives its I/O thread time to take up the task; it makes the crash unlikely, no more.
        ray.wait([ray_ref], timeout=0.05, fetch_local=False)
        ray.cancel(ray_ref, force=force, recursive=recursive)

    def get_actor(self, name: str, namespace: str | None) -> ActorHandle[Any]:
        ray_handle = self._find(name, namespace)
        if ray_handle is None:
            raise ValueError(f"there is no actor named {name!r}")
        return wrap_handle(self, ray_handle)

    def _find(self, name: str, namespace: str | None) -> Any:
        """Ray's handle of a named actor that is not dead, or None.

        An actor whose ``__init__`` raised keeps its name in Ray while there are handles to it;
        killing it, dead as it is, frees the name.
        """
        try:
            ray_handle = ray.get_actor(name, namespace)
        except ValueError:
            return None
        if self._client:  # the cluster's records cannot be read from there
            return ray_handle
        record = ray._private.state.actors(ray_handle._actor_id.hex())
        if record and record.get("State") == "DEAD":
            ray.kill(ray_handle)
            return None
        return ray_handle

    def handle(self, actor: Any) -> ActorHandle[Any]:
        return wrap_handle(self, actor)

    def reduce_handle(self, handle: ActorHandle[Any]) -> Any:
        return load_handle, (handle._actor,)

    def nodes(self) -> list[dict[str, Any]]:
        while self._head is not None and not self._head.is_listening():
            self._check_open(ObjectLostError)  # Ray itself waits until it ends the process
            time.sleep(0.1)
        return ray.nodes()  # type: ignore[no-any-return]

    def lost_nodes(self) -> frozenset[str]:
        if self._client:  # nodes may not be reachable from there
            return frozenset(node["NodeID"] for node in self.nodes() if not node["Alive"])
        return wait_for_lost_nodes(self.nodes)

    def node_address(self) -> str | None:
        if self._client:  # this process is not on a node
            return None
        own_id = ray.get_runtime_context().get_node_id()
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in self.nodes()}
        return addresses.get(own_id)

    def cluster_resources(self) -> dict[str, float]:
        return dict(ray.cluster_resources())

    def available_resources(self) -> dict[str, float]:
        return dict(ray.available_resources())

    def count_room(self, num_cpus: float, num_gpus: float) -> int | None:
        if self._client:  # nodes can't be asked from there
            return super().count_room(num_cpus, num_gpus)
        nodes = ray._private.state.available_resources_per_node()
        return count_room(nodes.values(), num_cpus, num_gpus)

    def runtime_context(self) -> RuntimeContext:
        context = ray.get_runtime_context()
        actor_id = context.get_actor_id() if self.in_worker else None
        in_actor = actor_id is not None
        return RuntimeContext(
            node_id=context.get_node_id(),
            worker_id=context.get_worker_id(),
            job_id=context.get_job_id(),
            namespace=context.namespace,
            actor_id=actor_id,
            actor_name=(context.get_actor_name() or None) if in_actor else None,
            task_id=context.get_task_id() if self.in_worker else None,
            was_current_actor_reconstructed=in_actor and _was_restarted(),
            make_handle=(lambda: wrap_handle(self, context.current_actor)) if in_actor else None,
        )

    def gpu_ids(self) -> list[int]:
        if self.in_worker:
            return [int(gpu) for gpu in ray.get_gpu_ids()]
        here = ray.get_runtime_context().get_node_id()
        counts = [
            node["Resources"].get("GPU", 0) for node in self.nodes() if node["NodeID"] == here
        ]
        return list(range(int(sum(counts))))

    def shutdown(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._head is not None:
            self._head.close()
        if self._owned:
            ray.shutdown()
        elif ray.is_initialized():
            for actor in list(self._created):
                ray.kill(actor)


def _head_address() -> str:
    return str(ray.get_runtime_context().gcs_address)


@functools.lru_cache(maxsize=1)
def _was_restarted() -> bool:
    """Asked once a process: Ray looks it up in its control store each time."""
    with warnings.catch_warnings():  # the property uses another one that Ray deprecated
        warnings.simplefilter("ignore")
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)


def attach() -> RayEngine:
    """This process's Ray engine; in a Ray worker it becomes the session's engine at first use."""
    current = session._engine
    if isinstance(current, RayEngine):
        return current
    mode = ray._private.worker.global_worker.mode
    engine = RayEngine(owned=False, in_worker=mode == ray._private.worker.WORKER_MODE)
    if current is None:
        session.install(engine)
    os.environ.setdefault(startup.RUN_SEED, run_seed())
    return engine


def run_seed() -> str:
    """The run's seed on a cluster: what every process of this job can work out by itself."""
    context = ray.get_runtime_context()
    text = f"{context.gcs_address} {context.get_job_id()}"
    return str(int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big"))


def load_ref(ray_ref: Any) -> RayRef[Any]:
    """Unpickle a ``RayRef``."""
    return RayRef(attach(), ray_ref)


def load_handle(ray_handle: Any) -> ActorHandle[Any]:
    """Unpickle an ``ActorHandle`` of this engine."""
    return wrap_handle(attach(), ray_handle)


def _send(remote: Any, args: tuple[Any, ...], kwargs: dict[str, Any], code: Any, name: str) -> Any:
    """``remote.remote(...)`` with Ray's errors as ours; ``code`` is the user's, sent along."""
    ray_args, ray_kwargs = unwrap_refs(args, kwargs)
    try:
        return remote.remote(*ray_args, **ray_kwargs)
    except RayError as error:
        raise translate(error) from None
    except Exception:  # pickling runs arbitrary user code: anything may be raised
        # Our own pickler fails in the same place and says where that is.
        serialize.pack(code, name)
        for key, value in [*enumerate(args), *kwargs.items()]:
            serialize.pack(value, f"argument {key!r} of {name}")
        raise  # it was not about pickling


def _ray_options(options: Options, kind: str) -> dict[str, Any]:
    """Those that differ from the default; not ``num_returns``, which depends on the code, too."""
    chosen = {
        name: value
        for name in ALLOWED[kind]
        if name not in ("num_returns", "runtime_env")
        and (value := getattr(options, name)) != getattr(Options, name)
    }
    if options.env_vars:
        chosen["runtime_env"] = {"env_vars": options.env_vars}
    return chosen
