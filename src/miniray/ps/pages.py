"""Memory in huge pages: what another process reads quickly.

To read another process's memory the kernel looks up and pins every page. With pages of 4 KB that
takes four times as long as the copying itself; with pages of 2 MB it costs next to nothing.
``gathered`` asks the kernel to move memory into huge pages where it lies: addresses and contents
stay as they are, and nobody notices but by speed. It takes some copies' time, once.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

_HUGE = 2 << 20
_MADV_COLLAPSE = 25  # Linux 6.1
#: Neighbours this close lie in one piece of memory, whatever is between them.
_REACH = 64 << 10
#: So much of the memory must be in huge pages; its ends never are.
_MOST = 0.75


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
    madvise = _madvise()
    # Twice: what is in the way may be there only for a moment.
    return any(madvise(block, _HUGE, _MADV_COLLAPSE) == 0 for _ in range(2))


@functools.cache
def _madvise() -> Any:
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function
