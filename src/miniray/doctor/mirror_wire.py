"""What launchers of several machines say to each other, to whom, and what is kept of it.

A connection begins with each side proving to the other that it knows the run's token; the token
itself is never sent. Who does not know it is refused before anything of theirs is looked at. After
that come frames, of few kinds, each with a limit on its size. Nothing is encrypted: whoever can
change packets on their way between the machines is not kept out.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from miniray.doctor import layout, runfile
from miniray.errors import MinirayError
from miniray.runs import files

#: In the environment of every launcher of a run on several machines, the same on all of them.
TOKEN_VARIABLE = "MINIRAY_RUN_TOKEN"
SHORTEST_TOKEN = 16

BOX, CELLS, STACK, EXIT, SAID = b"BOX ", b"CELL", b"STCK", b"EXIT", b"SAID"
_CHALLENGE, _HELLO, _REFUSED = b"CHAL", b"HELO", b"REFU"
#: What of each kind may be sent at most, in bytes. A box travels compressed.
LIMITS = {
    BOX: layout.BOX_SIZE + 65536,
    CELLS: layout.CELLS * 8,
    STACK: 65536,
    EXIT: 65536,
    SAID: 65536,
    _CHALLENGE: 32,
    _HELLO: 4096,
    _REFUSED: 1024,
}
_FRAME = struct.Struct("<4sII")  # kind, rank, length of the rest


def send(peer: socket.socket, kind: bytes, rank: int, data: bytes) -> None:
    peer.sendall(_FRAME.pack(kind, rank, len(data)) + data)


def receive(peer: socket.socket) -> tuple[bytes, int, bytes]:
    """The next frame. ``EOFError`` at the end, ``ValueError`` for what is no frame of ours."""
    kind, rank, length = _FRAME.unpack(_exactly(peer, _FRAME.size))
    if length > LIMITS.get(kind, -1):
        raise ValueError("something that is no launcher of miniray is at the other end")
    return kind, rank, _exactly(peer, length)


def welcome(peer: socket.socket, token: str, ours: Mapping[str, Any]) -> dict[str, Any]:
    """Machine 0's side: what the other end says of itself, once it has proved that it may.

    ``PermissionError`` where it cannot. It is then told so, and has to be closed. ``OSError``,
    ``ValueError`` or ``EOFError`` where it does not speak our language at all.
    """
    challenge = secrets.token_bytes(32)
    send(peer, _CHALLENGE, 0, challenge)
    theirs, hello, proof = _hello(peer)
    if not hmac.compare_digest(proof, _proof(token, b"client", challenge, theirs, hello)):
        refuse(peer, f"{TOKEN_VARIABLE} is not the one of machine 0")
        raise PermissionError("it does not know the run's token")
    _introduce(peer, token, b"server", theirs, challenge, ours)
    return dict(files.parse_json(hello))


def join(peer: socket.socket, token: str, ours: Mapping[str, Any]) -> dict[str, Any]:
    """The other machines' side: what machine 0 says all must use.

    ``MinirayError`` where it refuses us, or cannot prove that it is machine 0 of this run.
    """
    kind, _, challenge = receive(peer)
    if kind != _CHALLENGE:
        raise ValueError("no launcher of miniray is at the other end")
    nonce = secrets.token_bytes(32)
    _introduce(peer, token, b"client", challenge, nonce, ours)
    theirs, hello, proof = _hello(peer)
    if theirs != challenge or not hmac.compare_digest(
        proof, _proof(token, b"server", nonce, challenge, hello)
    ):
        raise MinirayError("what listens there is not machine 0 of this run: it has another token")
    return dict(files.parse_json(hello))


def refuse(peer: socket.socket, why: str) -> None:
    send(peer, _REFUSED, 0, why.encode()[: LIMITS[_REFUSED]])


def _introduce(
    peer: socket.socket,
    token: str,
    role: bytes,
    asked: bytes,
    nonce: bytes,
    ours: Mapping[str, Any],
) -> None:
    hello = json.dumps(dict(ours)).encode()
    proof = _proof(token, role, asked, nonce, hello)
    send(peer, _HELLO, 0, nonce + proof + hello)


def _hello(peer: socket.socket) -> tuple[bytes, bytes, bytes]:
    """(the other side's nonce, what it says, its proof)"""
    kind, _, data = receive(peer)
    if kind == _REFUSED:
        raise MinirayError(f"machine 0 refuses this one: {data.decode(errors='replace')}")
    if kind != _HELLO or len(data) < 64:
        raise ValueError("no launcher of miniray is at the other end")
    return data[:32], data[64:], data[32:64]


def _proof(token: str, role: bytes, asked: bytes, nonce: bytes, hello: bytes) -> bytes:
    """The role is in it, so that nobody can send a proof back to whoever made it."""
    return hmac.new(token.encode(), role + asked + nonce + hello, hashlib.sha256).digest()


def _exactly(peer: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = peer.recv(size - len(data))
        if not piece:
            raise EOFError("closed")
        data += piece
    return bytes(data)


def packed(box: bytes) -> bytes:
    """A box as it travels."""
    return zlib.compress(box, 1)


class Copies:
    """Boxes of other machines' ranks, written into one folder as they come in.

    Only three names a rank are ever written: ``<rank>.box``, ``.stack`` and ``.exit``. What has not
    the size or form of such a file is a ``ValueError``, and nothing is written. Whose ranks may be
    written is the caller's to know.

    Boxes aren't mapped: if one were truncated, the next write would end the process with SIGBUS.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[int, BinaryIO] = {}

    def take(self, kind: bytes, rank: int, data: bytes) -> None:
        if kind == BOX:
            self._box(rank, _unpacked(data))
        elif kind == CELLS:
            if len(data) != layout.CELLS * 8:
                raise ValueError("cells of another size")
            if rank in self._files:
                self._write(rank, layout.CELLS_AT, data)
        elif kind == STACK:
            (self._folder / f"{rank}.stack").write_bytes(data)
        elif kind == EXIT:
            if not isinstance(files.parse_json(data), dict):
                raise ValueError("an end that is none")
            runfile.replace_text(self._folder / f"{rank}.exit", data.decode())
        else:
            raise ValueError(f"nothing that can be kept: {kind!r}")

    def _box(self, rank: int, data: bytes) -> None:
        if rank not in self._files:
            path = self._folder / f"{rank}.box"
            partial = path.with_name(f".{path.name}.partial")
            partial.write_bytes(data)
            self._files[rank] = open(partial, "r+b", buffering=0)
            os.replace(partial, path)
            return
        # Readers have it open: write in place, and the cells, which refer to the rest, last.
        cells_end = layout.CELLS_AT + layout.CELLS * 8
        self._write(rank, 0, data[: layout.CELLS_AT])
        self._write(rank, cells_end, data[cells_end:])
        self._write(rank, layout.CELLS_AT, data[layout.CELLS_AT : cells_end])

    def _write(self, rank: int, at: int, data: bytes) -> None:
        os.pwrite(self._files[rank].fileno(), data, at)

    def close(self) -> None:
        """Close the boxes. They stay readable."""
        for file in self._files.values():
            file.close()
        self._files.clear()


def _unpacked(data: bytes) -> bytes:
    """A whole box, and never more memory than one takes. ``ValueError`` for anything else."""
    unpacker = zlib.decompressobj()
    try:
        box = unpacker.decompress(data, layout.BOX_SIZE + 1)
    except zlib.error as error:
        raise ValueError(f"a box that is none: {error}") from error
    if len(box) != layout.BOX_SIZE or not box.startswith(layout.MAGIC):
        raise ValueError("a box that is none")
    return box
