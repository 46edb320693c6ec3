"""Process groups of torch.distributed whose ranks are miniray actors.

The driver creates a ``GroupHost``, which is a key-value store on a free port, and sends its
``spec`` to the actors. Each actor calls ``join(spec, rank)``. Because the driver hosts the store,
and not rank 0, it outlives all ranks, so the remaining ranks can name the missing ones.

If a rank doesn't join within ``spec.timeout``, the other ranks raise an error that names it. It is
also an error if two processes have the same rank, or if a process is already in a group. ``leave``
may be called at any time, more than once, and in processes that never joined.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import re
import socket
import time
from typing import Any

from miniray.checks import check_int
from miniray.core import session
from miniray.errors import GroupError, PeerLostError

__all__ = ["GroupHost", "ProcessGroupSpec", "join", "leave"]

_LOOPBACK = "127.0.0.1"
_POLL = 0.02
#: In the text of an error: the place in the code of gloo that raised it.
_FROM_GLOO = re.compile(r"gloo/\S+:\d+\]")


@dataclasses.dataclass(frozen=True)
class ProcessGroupSpec:
    """The values that a process needs to join the group. They can be sent to any actor.

    Attributes:
        host, port: Address of the store.
        world_size: Number of ranks.
        backend: ``"gloo"`` or ``"nccl"``.
        name: Name of the group in error messages. Groups with different names can use the same
            store one after another.
        timeout: Limit in seconds for all ranks to join, and for every collective.
    """

    host: str
    port: int
    world_size: int
    backend: str = "gloo"
    name: str = "group"
    timeout: float = 600.0

    def connect(self) -> Any:
        """Return a new client of the store, which only the calling thread should use."""
        return _store(self.host, self.port, self.timeout, is_master=False)


class GroupHost:
    """The store of a group, in the driver. After ``close``, ranks that use it get errors.

    Args:
        world_size, backend, name, timeout: See ``ProcessGroupSpec``.
        other_machines: Whether ranks run on other machines, so that the store listens on the
            network interface instead of the loopback interface.
    """

    def __init__(
        self,
        world_size: int,
        *,
        backend: str = "gloo",
        name: str = "group",
        timeout: float = 600.0,
        other_machines: bool = False,
    ) -> None:
        check_int("world_size", world_size, 1)
        if not timeout > 0:
            raise ValueError(f"timeout must be a number of seconds > 0, not {timeout!r}")
        address = _outward_address() if other_machines else _LOOPBACK
        try:
            self.store: Any = _store(address, 0, timeout, is_master=True)
        except RuntimeError as error:  # DistNetworkError is one
            reason = str(error).splitlines()[0]
            raise GroupError(f"no store of a process group on {address}: {reason}") from error
        self.spec = ProcessGroupSpec(
            address, self.store.port, world_size, backend, name, float(timeout)
        )

    def close(self) -> None:
        """End the store. Safe to call twice."""
        self.store = None


def _store(address: str, port: int, timeout: float, *, is_master: bool) -> Any:
    import torch.distributed as dist

    limit = datetime.timedelta(seconds=timeout)
    return dist.TCPStore(address, port, is_master=is_master, timeout=limit, wait_for_workers=False)


def _outward_address() -> str:
    """Return the address at which other machines reach this process.

    The engine's nodes know theirs, also on a machine without a default route.
    """
    address = session.engine().node_address() if session.is_initialized() else None
    if address is None:
        # 192.0.2.1 is reserved for documentation; nothing is sent there.
        address = _local_address("192.0.2.1", 9)
    return address or _LOOPBACK  # without any network, all ranks are on this machine


def _local_address(host: str, port: int) -> str | None:
    """Return the address from which this machine would reach ``host``; None if it can't."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return None


def find_interface(host: str, port: int) -> str | None:
    """Return the name of the network interface that leads to ``host``; None if there is none."""
    import psutil

    address = _local_address(host, port)
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in addresses):
            return str(name)
    return None


def join(spec: ProcessGroupSpec, rank: int) -> Any:
    """Join as ``rank`` and wait for the others; returns a client of the group's store.

    Raises ``GroupError`` naming the ranks that did not come within ``spec.timeout``, and where the
    rank is taken or this process is in a group already, and ``PeerLostError`` if a rank is lost
    before all have joined. Then this process is in no group.
    """
    import torch.distributed as dist

    if not 0 <= rank < spec.world_size:
        raise ValueError(f"rank must be in 0..{spec.world_size - 1}, not {rank}")
    if not dist.is_available():
        raise GroupError("this build of torch has no torch.distributed")
    if dist.is_initialized():
        raise GroupError(
            f"this process is rank {dist.get_rank()} of a process group already; "
            "leave() that one first"
        )
    # gloo would look up the machine's name. In containers that may fail, and with `127.0.1.1 NAME`
    # in /etc/hosts it is an address that other machines can't reach.
    interface = "lo" if spec.host == _LOOPBACK else find_interface(spec.host, spec.port)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    store = spec.connect()
    if store.add(f"{spec.name}/claims/{rank}", 1) > 1:
        raise GroupError(f"two processes claim rank {rank} of {spec.name}", rank=rank)
    store.set(f"{spec.name}/here/{rank}", f"{socket.gethostname()}:{os.getpid()}")
    missing = find_missing(store, f"{spec.name}/here", spec.world_size, spec.timeout)
    if missing:
        ranks = ", ".join(map(str, missing))
        raise GroupError(
            f"rank {rank} of {spec.name} timed out after {spec.timeout:g} s waiting for "
            f"rank{'s' if len(missing) > 1 else ''} {ranks} of {spec.world_size}",
            rank=rank,
        )
    options: dict[str, Any] = {}
    if spec.backend == "nccl":
        import torch

        options["device_id"] = torch.device("cuda", torch.cuda.current_device())
    try:
        dist.init_process_group(
            spec.backend,
            store=dist.PrefixStore(f"{spec.name}/torch", store),
            rank=rank,
            world_size=spec.world_size,
            timeout=datetime.timedelta(seconds=spec.timeout),
            **options,
        )
    except (RuntimeError, ValueError) as error:
        leave()
        kind = PeerLostError if is_connection_error(error) else GroupError
        raise kind(f"rank {rank} could not join {spec.name}: {error}", rank=rank) from error
    return store


def is_connection_error(error: BaseException) -> bool:
    """Return whether torch raised ``error`` because a different rank is gone or doesn't answer.

    Errors of gloo have no special type, but they name their file in C++. Other errors about
    connections, such as those of user code, don't count.
    """
    is_torchs = any(cls.__name__ == "DistError" for cls in type(error).__mro__)
    return is_torchs or (isinstance(error, RuntimeError) and bool(_FROM_GLOO.search(str(error))))


def find_missing(store: Any, prefix: str, world_size: int, timeout: float) -> list[int]:
    """Wait until ``prefix/<rank>`` exists for all ranks, and return the missing ranks.

    Asks again and again instead of waiting in the store: a waiting call cannot be interrupted, and
    says only that something is missing.
    """
    deadline = time.monotonic() + timeout
    missing = list(range(world_size))
    pause = _POLL / 20
    while True:
        missing = [rank for rank in missing if not store.check([f"{prefix}/{rank}"])]
        if not missing or time.monotonic() >= deadline:
            return missing
        time.sleep(pause)
        pause = min(2 * pause, _POLL)


def leave() -> None:
    """Leave the process group, if this process is in one."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
