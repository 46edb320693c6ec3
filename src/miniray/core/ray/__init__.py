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

OLDEST = (2, 40)


def start(config: InitConfig) -> Engine:
    """Connect to ``config.address``, or start a Ray here; a Ray already running is used as it is.

    A Ray that the program itself started with ``ray.init`` keeps its settings (ours are ignored)
    and is left running at ``shutdown``.
    """
    from miniray.core.ray.engine import RayEngine

    version = tuple(int(part) for part in ray.__version__.split(".")[:2])
    if version < OLDEST:
        raise EngineStartError(f"Ray {ray.__version__} is too old: 2.40 or newer is needed")
    if ray.is_initialized():
        return RayEngine(owned=False)
    arguments = _init_arguments(config, os.environ.get("RAY_ADDRESS"))
    try:
        ray.init(**arguments)
    except (ConnectionError, OSError, RuntimeError, ValueError, ImportError) as error:
        if ray.is_initialized():  # a driver half connected would make the next attempt reuse it
            ray.shutdown()
        raise EngineStartError(f"Ray could not be started: {error}") from error
    client = arguments["address"].startswith("ray://")
    return RayEngine(owned=True, client=client)


def _init_arguments(config: InitConfig, environment_address: str | None) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "namespace": config.namespace,
        "log_to_driver": config.log_to_driver,
        "logging_level": logging.WARNING,
    }
    # `ray job submit` sets RAY_ADDRESS; without it a new Ray is wanted, not one found running.
    address = config.address or environment_address
    if address is not None:
        sized = {
            "num_cpus": config.num_cpus,
            "num_gpus": config.num_gpus,
            "object_store_memory": config.object_store_memory,
        }
        refused = ", ".join(name for name, value in sized.items() if value is not None)
        if refused:
            raise ValueError(f"{refused}: the size of a running cluster ({address}) is given")
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
