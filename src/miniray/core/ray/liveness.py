"""Which nodes of a Ray cluster are gone. Ray itself needs up to a minute to notice.

A node is asked by opening a connection: a port where nothing listens is known at once.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

_CONNECT_TIMEOUT = 2.0
_PAUSE = 0.5
#: Ray waits 15 seconds for a node whose ports are closed, and about a minute for a silent one.
_NOTICE_SECONDS = 90.0
#: If the head can't be reached for this time, Ray ends the process without a chance to clean up.
_RECONNECT_VARIABLE, _RECONNECT_SECONDS = "RAY_gcs_rpc_server_reconnect_timeout_s", 60.0


def is_listening(host: str, port: int, timeout: float = _CONNECT_TIMEOUT) -> bool:
    """Return whether a process accepts connections there."""
    try:
        socket.create_connection((host, port), timeout).close()
    except OSError:
        return False
    return True


def wait_for_lost_nodes(
    list_nodes: Callable[[], Iterable[Mapping[str, Any]]],
    is_listening: Callable[[str, int], bool] = is_listening,
    limit: float = _NOTICE_SECONDS,
    pause: float = _PAUSE,
) -> frozenset[str]:
    """Return the ids of lost nodes, when Ray has noticed all whose raylet doesn't answer any more.

    Nodes that neither answer nor are dead for Ray after ``limit`` seconds count as lost.
    """
    deadline = time.monotonic() + limit
    while True:
        nodes = list(list_nodes())
        silent = {
            node["NodeID"]
            for node in nodes
            if node["Alive"]
            and not is_listening(node["NodeManagerAddress"], node["NodeManagerPort"])
        }
        if not silent or time.monotonic() >= deadline:
            return frozenset(silent | {node["NodeID"] for node in nodes if not node["Alive"]})
        time.sleep(pause)


def head_timeout() -> float:
    """Return for how many seconds the head may be silent: half of Ray's own limit."""
    return float(os.environ.get(_RECONNECT_VARIABLE, _RECONNECT_SECONDS)) / 2


class HeadWatch:
    """Calls ``on_lost`` in a thread if the head node hasn't answered for ``timeout`` seconds."""

    def __init__(
        self,
        address: str,
        on_lost: Callable[[], None],
        timeout: float | None = None,
        pause: float = 2.0,
    ) -> None:
        self.address = address
        host, _, port = address.rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._on_lost = on_lost
        self.timeout = head_timeout() if timeout is None else timeout
        self._pause = min(pause, self.timeout / 10)
        self._closed = threading.Event()
        self.thread = threading.Thread(target=self._run, name="miniray-head", daemon=True)
        self.thread.start()

    def is_listening(self) -> bool:
        """Return whether the head accepts connections now."""
        return is_listening(self._host, self._port)

    def close(self) -> None:
        """Stop watching. Safe to call in ``on_lost``."""
        self._closed.set()

    def _run(self) -> None:
        silent_since: float | None = None
        while not self._closed.wait(self._pause):
            if self.is_listening():
                silent_since = None
                continue
            now = time.monotonic()
            silent_since = silent_since or now
            if now - silent_since >= self.timeout and not self._closed.is_set():
                self._on_lost()
                return
