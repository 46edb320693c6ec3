"""Engine 3: a Ray cluster, or a Ray started on this machine for the session.

Refs, handles, generators and errors wrap Ray's, one to one; scheduling, reference counting,
restarts and spilling are Ray's own. What is added: user code in Ray's workers finds the same
miniray session (``host``), errors are miniray's (``refs``), and what can never run or be pickled
is refused at the call (``engine``).
"""

from __future__ import annotations

import logging
import os
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

from miniray import limits
from miniray.core.engine import STORE_SHARE, Engine, InitConfig
from miniray.errors import EngineStartError

try:
    import ray
except ImportError as error:
    raise EngineStartError(
        "backend 'ray' needs Ray, which is not installed: pip install 'miniray[ray]'"
    ) from error

from miniray.core.ray.liveness import is_listening

OLDEST = (2, 40)
_SIZES = ("num_cpus", "num_gpus", "object_store_memory")


def start(config: InitConfig) -> Engine:
    """Connect to a running cluster, or start a Ray here if there is none.

    A Ray that the program itself started with ``ray.init`` keeps its settings (ours are ignored)
    and is left running at ``shutdown``.
    """
    from miniray.core.ray.engine import RayEngine

    version = tuple(int(part) for part in ray.__version__.split(".")[:2])
    if version < OLDEST:
        raise EngineStartError(f"Ray {ray.__version__} is too old: 2.40 or newer is needed")
    owned, client = not ray.is_initialized(), False
    if owned:
        address = choose_address(config, os.environ.get("RAY_ADDRESS"), find_cluster)
        try:
            ray.init(**_init_arguments(config, address))
        except (ConnectionError, OSError, RuntimeError, ValueError, ImportError) as error:
            if ray.is_initialized():  # a driver half connected would make the next attempt reuse it
                ray.shutdown()
            raise EngineStartError(f"Ray could not be started: {error}") from error
        client = address is not None and address.startswith("ray://")
        if address is not None and address != config.address:
            print(_describe_cluster(), file=sys.stderr, flush=True)
    engine = RayEngine(owned=owned, client=client)
    engine.watch_head()
    return engine


def choose_address(
    config: InitConfig, environment_address: str | None, find_cluster: Callable[[], str | None]
) -> str | None:
    """Return the address of the cluster to join; None to start a Ray here.

    A cluster that runs on this machine is joined unless a size is requested, which only a new Ray
    can have. Raise ``ValueError`` if a size is requested of the cluster at a given address.
    """
    sizes = {name: getattr(config, name) for name in _SIZES}
    requested = ", ".join(name for name, value in sizes.items() if value is not None)
    # `ray job submit` sets the variable.
    address = config.address or environment_address or None
    if address and requested:
        raise ValueError(
            f"{requested} can't be set: the cluster at {address} is running already. Leave out "
            "the size, or unset RAY_ADDRESS and address= to start a Ray on this machine"
        )
    if address in (None, "auto") and not requested:
        return find_cluster() or address
    return address


def find_cluster() -> str | None:
    """Return the address of the cluster that ``ray start`` started on this machine, if it runs."""
    address = ray._private.services.find_bootstrap_address(None)
    if not address:
        return None
    host, _, port = address.rpartition(":")  # the file also stays after a crash
    return address if is_listening(host.strip("[]"), int(port)) else None


def _describe_cluster() -> str:
    address = ray.get_runtime_context().gcs_address
    nodes = [node for node in ray.nodes() if node["Alive"]]
    cpus = sum(node["Resources"].get("CPU", 0) for node in nodes)
    return (
        f"miniray: joined the running Ray cluster at {address} ({len(nodes)} "
        f"node{'' if len(nodes) == 1 else 's'}, {cpus:g} CPUs)"
    )


def _init_arguments(config: InitConfig, address: str | None) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "namespace": config.namespace,
        "log_to_driver": config.log_to_driver,
        "logging_level": logging.WARNING,
    }
    if address is not None:
        arguments["address"] = address
        if not address.startswith("ray://"):  # the client's driver is a process of the cluster
            arguments["job_config"] = _job_config()
        return arguments

    # Ray ignores affinity, and control groups below the top one. It runs as many one-CPU tasks at
    # a time as it has CPUs: that is the size of its pool.
    num_cpus = config.num_cpus or max(limits.cpu_count(), config.num_workers or 0)
    store, limit = config.object_store_memory, limits.memory_limit()
    if store is None and limit is not None:
        smallest = ray._private.ray_constants.OBJECT_STORE_MINIMUM_MEMORY_BYTES
        store = max(smallest, int(limit * STORE_SHARE))
    arguments.update(
        address="local",
        num_cpus=int(num_cpus),
        num_gpus=None if config.num_gpus is None else int(config.num_gpus),
        object_store_memory=store,
        job_config=_job_config(),
        include_dashboard=False,
        logging_level=logging.ERROR,  # its warnings on start-up are addressed to administrators
    )
    return arguments


def _job_config() -> Any:
    return ray.job_config.JobConfig(_py_driver_sys_path=_own_import_paths())


def _own_import_paths() -> list[str]:
    """Where the driver imports from beyond its Python installation, for the workers' sys.path.

    Ray passes on the script's directory and the current one; a source checkout, or what a test
    runner added, is missing there. Paths that do not exist on another machine do no harm.
    """
    installed = {Path(path).resolve() for path in sysconfig.get_paths().values()}
    roots = [path for path in sys.path if path and Path(path).is_dir()]
    return [
        path
        for path in roots
        if not any(
            root in installed for root in (Path(path).resolve(), *Path(path).resolve().parents)
        )
    ]
