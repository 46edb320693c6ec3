"""Runs on several machines: every launcher has a copy of all boxes in its own run directory.

So barriers and the doctor see all ranks and need not know about machines. The launcher of machine 0
listens on the port after the master port; the others connect to it and it passes on what it gets.
Boxes travel whole once a second, and their cells (where a barrier is seen) twenty times a second
when they change. Only who knows the run's token is let in, and may then write the copies of its own
ranks, which are boxes, texts of stacks, and JSON with known fields: nothing that comes in is
executed or unpickled. A lost connection is told to whoever asks for ``lost``.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any

from miniray.doctor import layout, mirror_wire, stacks
from miniray.doctor.layout import Cell
from miniray.doctor.mirror_wire import BOX, CELLS, EXIT, LIMITS, SAID, STACK, Copies, packed
from miniray.errors import MinirayError
from miniray.runs import files

_TICK, _WHOLE_SECONDS, _CONNECT_SECONDS = 0.05, 1.0, 600.0
_HANDSHAKE_SECONDS = 10.0  # a stranger that says nothing is in the way of the others for so long


class Mirror:
    """This machine's end of the exchange. Start it before the ranks, ``close`` it after them."""

    def __init__(
        self,
        folder: Path,
        nproc: int,
        node_rank: int,
        nnodes: int,
        address: tuple[str, int],
        token: str,
        say: Callable[[str], None],
    ) -> None:
        self._folder = folder
        self._nproc = nproc
        self._ranks = range(node_rank * nproc, (node_rank + 1) * nproc)
        self._node_rank = node_rank
        self._nnodes = nnodes
        self._address = address
        self._token = token
        self._say = say
        self._copies = Copies(folder)
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._peers: dict[int, socket.socket] = {}
        self._heard: dict[int, dict[str, Any]] = {}
        self._lost: str = ""
        self._answered: set[int] = set()
        self._threads: list[threading.Thread] = []

    # -- beginning --------------------------------------------------------------------------------

    def meet(self, ours: Mapping[str, Any]) -> dict[str, Any]:
        """Wait for all machines; give what machine 0 says all must use (its ``ours``).

        ``MinirayError`` after ten minutes, with who is missing.
        """
        deadline = time.monotonic() + _CONNECT_SECONDS
        if self._node_rank == 0:
            agreed = self._accept(ours, deadline)
        else:
            agreed = self._connect(ours, deadline)
        for node, peer in self._peers.items():
            peer.settimeout(None)
            self._start(self._receive, node, peer)
        self._start(self._send_changes)
        return agreed

    def _accept(self, ours: Mapping[str, Any], deadline: float) -> dict[str, Any]:
        with socket.create_server(("", self._address[1]), backlog=128) as server:
            while len(self._peers) < self._nnodes - 1:
                server.settimeout(max(0.1, deadline - time.monotonic()))
                try:
                    peer, _ = server.accept()
                except TimeoutError:
                    missing = sorted(set(range(1, self._nnodes)) - self._peers.keys())
                    raise MinirayError(f"machines {missing} did not connect") from None
                self._let_in(peer, ours)
        return dict(ours)

    def _let_in(self, peer: socket.socket, ours: Mapping[str, Any]) -> None:
        """Whoever does not prove to be of this run is sent away, and the waiting goes on."""
        peer.settimeout(_HANDSHAKE_SECONDS)
        try:
            hello = mirror_wire.welcome(peer, self._token, ours)
            node = int(hello["node_rank"])
        except PermissionError as error:
            self._say(f"refused a connection from {_name(peer)}: {error}")
            peer.close()
            return
        except (OSError, ValueError, KeyError, TypeError, EOFError):
            peer.close()  # nobody of ours
            return
        known = self._peers.keys() | {0}
        if hello.get("world_size") != ours["world_size"] or node in known or node >= self._nnodes:
            peer.close()
            raise MinirayError(
                f"machine {node} was started with other options, or twice: it says {hello}"
            )
        self._peers[node] = peer

    def _connect(self, ours: Mapping[str, Any], deadline: float) -> dict[str, Any]:
        told = False
        while True:
            peer = None
            try:
                peer = socket.create_connection(self._address, timeout=_HANDSHAKE_SECONDS)
                agreed = mirror_wire.join(peer, self._token, ours)
            except (OSError, EOFError) as error:
                if peer is not None:
                    peer.close()
                if time.monotonic() > deadline:
                    raise MinirayError(f"no launcher at {self._address}: {error}") from error
                if not told:
                    self._say(f"waiting for the launcher of machine 0 at {self._address[0]}")
                    told = True
                time.sleep(0.2)
            except MinirayError:
                if peer is not None:
                    peer.close()
                raise
            else:
                self._peers[0] = peer
                return agreed

    # -- exchanging -------------------------------------------------------------------------------

    def tell(self, **said: Any) -> None:
        """Say something to all launchers: how long our ranks have been quiet, that they failed."""
        data = json.dumps({"node": self._node_rank, **said}).encode()
        self._broadcast(SAID, 0, data)

    def heard(self) -> dict[int, dict[str, Any]]:
        """The last thing each other launcher said, by machine."""
        with self._lock:
            return dict(self._heard)

    @property
    def lost(self) -> str:
        """Which connection was lost; "" while all are there."""
        return self._lost

    def ask_for_stacks(self, timeout: float = 3.0) -> None:
        """Have the other machines send their ranks' stacks into our directory."""
        with self._lock:
            self._answered.clear()
        self.tell(ask=True)
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and len(self._answered) < self._nnodes - 1:
            time.sleep(0.05)

    def close(self) -> None:
        self._send_whole(self._ranks)  # exits of ranks that ended just now
        self._closing.set()
        for peer in self._peers.values():
            try:
                peer.shutdown(socket.SHUT_WR)  # what is on its way still arrives
            except OSError:
                continue
        for thread in self._threads:
            thread.join(timeout=2)
        for peer in self._peers.values():
            peer.close()
        self._copies.close()

    def _start(self, target: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, name="miniray-mirror", daemon=True)
        thread.start()
        self._threads.append(thread)

    def _broadcast(self, what: bytes, rank: int, data: bytes, but: int | None = None) -> None:
        for node, peer in self._peers.items():
            if node == but:
                continue
            try:
                with self._lock:
                    mirror_wire.send(peer, what, rank, data)
            except OSError as error:
                self._lose(node, error)

    def _lose(self, node: int, error: BaseException) -> None:
        if not self._closing.is_set() and not self._lost:
            self._lost = f"the connection to machine {node} is lost ({error})"

    def _receive(self, node: int, peer: socket.socket) -> None:
        allowed = self._ranks_of(node)
        try:
            while True:
                kind, rank, data = mirror_wire.receive(peer)
                if kind == SAID:
                    said = files.parse_json(data)
                    if self._node_rank == 0 and said["node"] != node:
                        raise ValueError(f"it speaks for machine {said['node']}")
                    self._hear(said)
                elif rank in allowed:
                    self._copies.take(kind, rank, data)
                else:
                    raise ValueError(f"it sends rank {rank}, which is none of its own")
                if self._node_rank == 0:  # the others are connected to us only
                    self._broadcast(kind, rank, data, but=node)
        except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
            self._lose(node, error)

    def _ranks_of(self, node: int) -> Container[int]:
        """What the machine at the other end may send: its own ranks; machine 0 those of others."""
        if self._node_rank == 0:
            return range(node * self._nproc, (node + 1) * self._nproc)
        return set(range(self._nnodes * self._nproc)) - set(self._ranks)

    def _hear(self, said: dict[str, Any]) -> None:
        node = int(said["node"])
        with self._lock:
            if "answered" in said:
                self._answered.add(node)
            elif "ask" not in said:
                self._heard[node] = {**self._heard.get(node, {}), **said}
        if "ask" in said:
            self._start(self._answer)

    def _answer(self) -> None:
        stacks.request_stacks(self._folder.parent, self._ranks)
        for rank in self._ranks:
            path = self._folder / f"{rank}.stack"
            if path.exists():
                self._broadcast(STACK, rank, path.read_bytes()[-LIMITS[STACK] :])
        self.tell(answered=True)

    def _send_changes(self) -> None:
        cells: dict[int, bytes] = {}
        texts: dict[int, int] = {}
        next_whole = 0.0
        exited: set[int] = set()
        while not self._closing.wait(_TICK):
            whole = time.monotonic() >= next_whole
            if whole:
                next_whole = time.monotonic() + _WHOLE_SECONDS
            for rank in self._ranks:
                path = self._folder / f"{rank}.box"
                head = _read(path, layout.CELLS_AT + layout.CELLS * 8)
                if head is None:
                    continue
                now = head[layout.CELLS_AT :]
                count = int.from_bytes(now[Cell.TEXTS * 8 : Cell.TEXTS * 8 + 8], "little")
                # Cells may refer to texts: new ones are never sent without the rest.
                if whole or texts.get(rank) != count:
                    if (box := _read(path)) is not None:
                        self._broadcast(BOX, rank, packed(box))
                elif cells.get(rank) != now:
                    self._broadcast(CELLS, rank, now)
                cells[rank], texts[rank] = now, count
                if rank not in exited and (self._folder / f"{rank}.exit").exists():
                    exited.add(rank)
                    self._send_whole(range(rank, rank + 1))

    def _send_whole(self, ranks: range) -> None:
        """A rank's last box and how it ended."""
        for rank in ranks:
            ended = _read(self._folder / f"{rank}.exit")
            data = _read(self._folder / f"{rank}.box")
            if data is not None and ended is not None:
                self._broadcast(BOX, rank, packed(data))
            if ended is not None:
                self._broadcast(EXIT, rank, ended)


def _read(path: Path, size: int = -1) -> bytes | None:
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read(size)
    except FileNotFoundError:
        return None


def _name(peer: socket.socket) -> str:
    try:
        return str(peer.getpeername()[0])
    except OSError:
        return "somebody"
