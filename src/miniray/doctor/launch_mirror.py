"""Runs on several machines: every launcher has a copy of all boxes in its own run directory.

So barriers and the doctor see all ranks and need not know about machines. The launcher of machine 0
listens on the port after the master port; the others connect to it and it passes on what it gets.
Boxes travel whole once a second, and their cells (where a barrier is seen) twenty times a second
when they change. Nothing that comes in is executed or unpickled: it is copies of boxes, texts of
stacks, and JSON with known fields. A lost connection is told to whoever asks for ``lost``.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from miniray.doctor import layout, runfile, stacks
from miniray.doctor.layout import Cell
from miniray.errors import MinirayError

_FRAME = struct.Struct("<4sII")  # what, rank, length of the rest
_LARGEST = 4 * 1024 * 1024
_BOX, _CELLS, _STACK, _EXIT, _SAID, _HELLO = b"BOX ", b"CELL", b"STCK", b"EXIT", b"SAID", b"HELO"
_TICK, _WHOLE_SECONDS, _CONNECT_SECONDS = 0.05, 1.0, 600.0


class Copies:
    """Boxes of other machines' ranks, written into this run directory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._memory: dict[int, mmap.mmap] = {}

    def take(self, what: bytes, rank: int, data: bytes) -> None:
        if what == _BOX:
            self._box(rank, zlib.decompress(data, bufsize=layout.BOX_SIZE))
        elif what == _CELLS and rank in self._memory and len(data) == layout.CELLS * 8:
            start = layout.CELLS_AT
            self._memory[rank][start : start + len(data)] = data
        elif what == _STACK:
            (self._folder / f"{rank}.stack").write_bytes(data)
        elif what == _EXIT:
            runfile.replace_text(self._folder / f"{rank}.exit", data.decode(errors="replace"))

    def _box(self, rank: int, data: bytes) -> None:
        if len(data) != layout.BOX_SIZE:
            return
        if rank not in self._memory:
            path = self._folder / f"{rank}.box"
            partial = path.with_name(f".{path.name}.partial")
            partial.write_bytes(data)
            with open(partial, "r+b") as file:
                self._memory[rank] = mmap.mmap(file.fileno(), layout.BOX_SIZE)
            os.replace(partial, path)
            return
        # Readers have it mapped: in place, and the cells, which refer to the rest, last.
        memory, cells_end = self._memory[rank], layout.CELLS_AT + layout.CELLS * 8
        memory[cells_end:] = data[cells_end:]
        memory[layout.CELLS_AT : cells_end] = data[layout.CELLS_AT : cells_end]


class Mirror:
    """This machine's end of the exchange. Start it before the ranks, ``close`` it after them."""

    def __init__(
        self,
        folder: Path,
        ranks: range,
        node_rank: int,
        nnodes: int,
        address: tuple[str, int],
        say: Callable[[str], None],
    ) -> None:
        self._folder = folder
        self._ranks = ranks
        self._node_rank = node_rank
        self._copies = Copies(folder)
        self._say = say
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._peers: dict[int, socket.socket] = {}
        self._heard: dict[int, dict[str, Any]] = {}
        self._lost: str = ""
        self._answered: set[int] = set()
        self._nnodes = nnodes
        self._address = address
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
                peer.settimeout(10)
                try:
                    hello = json.loads(_receive_frame(peer)[2])
                    node = int(hello["node_rank"])
                except (OSError, ValueError, KeyError, TypeError, EOFError):
                    peer.close()  # nobody of ours
                    continue
                if hello.get("world_size") != ours["world_size"] or node in self._peers:
                    peer.close()
                    raise MinirayError(
                        f"machine {node} was started with other options, or twice: it says {hello}"
                    )
                _send_frame(peer, _HELLO, 0, json.dumps(ours).encode())
                self._peers[node] = peer
        return dict(ours)

    def _connect(self, ours: Mapping[str, Any], deadline: float) -> dict[str, Any]:
        told = False
        while True:
            try:
                peer = socket.create_connection(self._address, timeout=10)
                _send_frame(peer, _HELLO, 0, json.dumps(ours).encode())
                peer.settimeout(_CONNECT_SECONDS)  # machine 0 may still wait for others
                agreed: dict[str, Any] = json.loads(_receive_frame(peer)[2])
            except (OSError, EOFError) as error:
                if time.monotonic() > deadline:
                    raise MinirayError(f"no launcher at {self._address}: {error}") from error
                if not told:
                    self._say(f"waiting for the launcher of machine 0 at {self._address[0]}")
                    told = True
                time.sleep(0.2)
            else:
                self._peers[0] = peer
                return agreed

    # -- exchanging -------------------------------------------------------------------------------

    def tell(self, **said: Any) -> None:
        """Say something to all launchers: how long our ranks have been quiet, that they failed."""
        data = json.dumps({"node": self._node_rank, **said}).encode()
        self._broadcast(_SAID, 0, data)

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
        self._send_whole(range(0))  # exits of ranks that ended just now
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
                    _send_frame(peer, what, rank, data)
            except OSError as error:
                self._lose(node, error)

    def _lose(self, node: int, error: BaseException) -> None:
        if not self._closing.is_set() and not self._lost:
            self._lost = f"the connection to machine {node} is lost ({error})"

    def _receive(self, node: int, peer: socket.socket) -> None:
        try:
            while True:
                what, rank, data = _receive_frame(peer)
                if self._node_rank == 0:  # the others are connected to us only
                    self._broadcast(what, rank, data, but=node)
                if what == _SAID:
                    self._hear(json.loads(data))
                elif rank not in self._ranks:
                    self._copies.take(what, rank, data)
        except (OSError, ValueError, EOFError, zlib.error) as error:
            self._lose(node, error)

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
                self._broadcast(_STACK, rank, path.read_bytes()[-65536:])
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
                    self._broadcast(_BOX, rank, zlib.compress(_read(path) or b"", 1))
                elif cells.get(rank) != now:
                    self._broadcast(_CELLS, rank, now)
                cells[rank], texts[rank] = now, count
                if rank not in exited and (self._folder / f"{rank}.exit").exists():
                    exited.add(rank)
                    self._send_whole(range(rank, rank + 1))

    def _send_whole(self, ranks: range) -> None:
        """A rank's last box and how it ended."""
        for rank in ranks or self._ranks:
            ended = _read(self._folder / f"{rank}.exit")
            data = _read(self._folder / f"{rank}.box")
            if data is not None and ended is not None:
                self._broadcast(_BOX, rank, zlib.compress(data, 1))
            if ended is not None:
                self._broadcast(_EXIT, rank, ended)


def _read(path: Path, size: int = -1) -> bytes | None:
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read(size)
    except FileNotFoundError:
        return None


def _send_frame(peer: socket.socket, what: bytes, rank: int, data: bytes) -> None:
    peer.sendall(_FRAME.pack(what, rank, len(data)) + data)


def _receive_frame(peer: socket.socket) -> tuple[bytes, int, bytes]:
    """The next frame. ``EOFError`` at the end, ``ValueError`` for what is no frame of ours."""
    what, rank, length = _FRAME.unpack(_receive_exactly(peer, _FRAME.size))
    if length > _LARGEST or what not in (_BOX, _CELLS, _STACK, _EXIT, _SAID, _HELLO):
        raise ValueError("something that is no launcher of miniray is at the other end")
    return what, rank, _receive_exactly(peer, length)


def _receive_exactly(peer: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = peer.recv(size - len(data))
        if not piece:
            raise EOFError("closed")
        data += piece
    return bytes(data)
