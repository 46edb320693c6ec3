"""The worker's side of a sync whose weights are read where they are.

``offer`` runs in the worker's process around its ``get_weights``. It tells the server where the
arrays lie in memory and stays in the call until the server has read them, so that nothing can
change them meanwhile. Whatever is in the way (arrays that are elsewhere each time, or on a GPU; a
server that is gone, or has no use for it) ends with the weights being returned as from any call:
copied.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import inspect
import secrets
import socket
import struct
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from miniray.core.serialize import pack

#: After a token, which worker it is and what comes: an offer, or why there is none.
HEADER = struct.Struct("<16sIc")
#: Of an offer: where the token lies, and the number of the plan. If the server does not know that,
#: the plan follows: digest of the structure, and an address for each buffer.
OFFER = struct.Struct("<QQ")
DIGEST = 16
OFFERED, REFUSED = b"O", b"R"
#: What the server answers: the weights were read, or are to be returned.
READ, RETURN = b"r", b"c"

#: Below this copying takes no time.
_WORTH = 8 << 20
#: Weights are moved into huge pages when they were found at the same place so often: before that
#: copying is cheaper. Where none could be had it is tried again after twice as many.
_SIGHTS = 2

_HUGE = 2 << 20
_MADV_COLLAPSE = 25  # Linux 6.1
#: Neighbours this close lie in one piece of memory, whatever is between them.
_REACH = 64 << 10
#: So much of the memory must be in huge pages; its ends never are.
_MOST = 0.75


@dataclasses.dataclass(frozen=True)
class Desk:
    """Where a worker reports, and as whom. ``eager``: offer any memory, at once."""

    address: str
    token: bytes
    worker: int
    server: int
    known: int
    eager: bool


@dataclasses.dataclass
class Plan:
    """Where the arrays of this process's weights lie; it holds as long as ``signature`` does."""

    signature: list[Any]
    serial: int
    digest: bytes
    spans: list[tuple[int, int]]
    sights: int = 0
    gathered: bool = False
    try_at: int = _SIGHTS


_plan: Plan | None = None


def offer(desk: Desk, get_weights: Callable[[], Any]) -> Any:
    """None if the server has read the weights, otherwise the weights."""
    weights = get_weights()
    if inspect.isawaitable(weights):
        return weights
    plan, reason = _planned(weights, desk.eager)
    # The server or the sync may be over: then it does not matter what is returned.
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(desk.address)
        head = HEADER.pack(desk.token, desk.worker, OFFERED if plan else REFUSED)
        if plan is None:
            sock.send(head + reason.encode())
            return weights
        _allow(desk.server)
        token = ctypes.create_string_buffer(desk.token, len(desk.token))
        message = head + OFFER.pack(ctypes.addressof(token), plan.serial)
        if plan.serial != desk.known:
            addresses = [address for address, _ in plan.spans]
            message += plan.digest + np.array(addresses, np.uint64).tobytes()
        sock.send(message)
        if sock.recv(1) == READ:
            return None
    return weights


def _planned(weights: Any, eager: bool) -> tuple[Plan | None, str]:
    """The plan for these weights; or None, and why they are to be copied."""
    global _plan
    if not _undisturbed():
        return None, "the worker runs several calls at once"
    signature: list[Any] = []
    if not _describe(weights, signature, set(), sys.modules.get("torch")):
        return None, "they are not plain arrays in memory of their own"
    if _plan is None or _plan.signature != signature:
        _plan = _made(weights, signature)
    plan = _plan
    plan.sights += 1
    if eager:
        return plan, ""
    if sum(size for _, size in plan.spans) < _WORTH:
        return None, "they are small"
    if plan.sights < _SIGHTS:
        return None, "they were not at this place before"
    if not plan.gathered and plan.sights >= plan.try_at:
        plan.gathered = gathered(plan.spans)
        plan.try_at *= 2
    if not plan.gathered:
        return None, "the system gives no huge pages for them"
    return plan, ""


def _made(weights: Any, signature: list[Any]) -> Plan:
    packed = pack(weights)
    spans = [_span(buffer) for buffer in packed.buffers]
    digest = digest_of(packed.data, [size for _, size in spans], packed.private)
    # Not 0, and not that of the process before, if this one was restarted.
    return Plan(signature, secrets.randbits(63) | 1, digest, spans)


def _span(buffer: memoryview) -> tuple[int, int]:
    if not buffer.nbytes:
        return 0, 0
    return np.frombuffer(buffer, np.uint8).__array_interface__["data"][0], buffer.nbytes


def digest_of(stream: Any, sizes: Sequence[int], private: Sequence[bool]) -> bytes:
    """The same for values that are the same but for what their arrays contain."""
    found = hashlib.blake2b(stream, digest_size=DIGEST)
    found.update(repr(([int(s) for s in sizes], [bool(p) for p in private])).encode())
    return found.digest()


def _undisturbed() -> bool:
    """Whether no other call of this actor can run while one waits."""
    if threading.current_thread() is not threading.main_thread():
        return False
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return True
    return False


def _describe(node: Any, found: list[Any], seen: set[int], torch: Any) -> bool:
    """Append what ``node`` is, down to addresses. False if it is more than arrays in containers."""
    kind = type(node)
    if torch is not None and (kind is torch.Tensor or kind is torch.nn.Parameter):
        plain = (
            node.is_cpu
            and node.layout is torch.strided
            and node.is_contiguous()
            and not node.is_conj()
            and not node.is_neg()
        )
        address = node.data_ptr() if plain else 0
        found.append((kind, address, node.dtype, node.shape, node.requires_grad))
    elif kind is np.ndarray:
        address = node.__array_interface__["data"][0]
        plain = node.flags.c_contiguous and node.dtype.kind != "O"
        found.append((kind, address, node.dtype, node.shape))
    elif kind is list or kind is tuple:
        found.append((kind, len(node)))
        return all(_describe(value, found, seen, torch) for value in node)
    elif kind is dict or kind is OrderedDict:
        found.append((kind, list(node)))
        return all(_describe(value, found, seen, torch) for value in node.values())
    else:
        return False
    if not plain or (address in seen and node.shape.count(0) == 0):
        return False
    seen.add(address)
    return True


def _allow(server: int) -> None:
    """Let ``server`` read our memory where a process may otherwise read only its children's."""
    pr_set_ptracer = 0x59616D61
    # Fails where there is no such restriction; whether reading works is then seen by reading.
    _libc().prctl(pr_set_ptracer, ctypes.c_ulong(server), 0, 0, 0)


# -- huge pages ------------------------------------------------------------------------------------
#
# To read another process's memory the kernel looks up and pins every page. With pages of 4 KB that
# takes four times as long as the copying itself; with pages of 2 MB it costs next to nothing. The
# kernel is asked to move memory into huge pages where it lies: addresses and contents stay as they
# are, and nobody notices but by speed. It takes some copies' time, once.


def gathered(spans: Sequence[tuple[int, int]]) -> bool:
    """Whether most of the memory (address, size) is in huge pages now.

    False also where the kernel is too old, has no such pages, or none is free; nothing is lost.
    """
    total = sum(size for _, size in spans)
    inside = sum(_huge_bytes(low, high) for low, high in _joined(spans))
    return inside >= _MOST * total


def _joined(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for low, size in sorted(spans):
        if found and low - found[-1][1] <= _REACH:
            start, end = found[-1]
            found[-1] = (start, max(end, low + size))
        else:
            found.append((low, low + size))
    return found


def _huge_bytes(low: int, high: int) -> int:
    # One by one: where one cannot be had, the others still can.
    return _HUGE * sum(map(_collapsed, range(-(-low // _HUGE) * _HUGE, high - _HUGE + 1, _HUGE)))


def _collapsed(block: int) -> bool:
    madvise, place = _libc().madvise, ctypes.c_void_p(block)
    # Twice: what is in the way may be there only for a moment.
    return any(madvise(place, ctypes.c_size_t(_HUGE), _MADV_COLLAPSE) == 0 for _ in range(2))


@functools.cache
def _libc() -> Any:
    return ctypes.CDLL(None)
