"""The large part of ``Permutation``: a Feistel network over arrays of positions."""

from __future__ import annotations

from math import isqrt

import numpy as np
import numpy.typing as npt

from miniray.data.permutation import Positions

_ROUNDS = 8
_MULTIPLY_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = np.uint64(0x94D049BB133111EB)
_SHIFT_30, _SHIFT_27, _SHIFT_31 = np.uint64(30), np.uint64(27), np.uint64(31)


def mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64: every input bit moves every output bit. Changes ``x``."""
    x ^= x >> _SHIFT_30
    x *= _MULTIPLY_1
    x ^= x >> _SHIFT_27
    x *= _MULTIPLY_2
    x ^= x >> _SHIFT_31
    return x


def hashes(n: int, first: int, second: int) -> list[int]:
    """What ``permutation`` sorts by, for ``range(n)``, many times faster than one by one."""
    mixed = mix(mix(np.arange(n, dtype=np.uint64) + np.uint64(first)) ^ np.uint64(second))
    return mixed.tolist()  # type: ignore[no-any-return]


class Network:
    """A bijection of ``range(n)`` for arrays of positions."""

    def __init__(self, n: int, key: int) -> None:
        self._n = np.uint64(n)
        left = isqrt(n - 1) + 1
        self._height, self._width = np.uint64(left), np.uint64(-(-n // left))
        self._keys = mix(np.arange(1, _ROUNDS + 1, dtype=np.uint64) + np.uint64(key))

    def __call__(self, positions: Positions) -> Positions:
        result = self._once(positions.astype(np.uint64))
        outside = result >= self._n
        while outside.any():
            result[outside] = self._once(result[outside])
            outside = result >= self._n
        return result.astype(np.int64)

    def _once(self, x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        height, width = self._height, self._width
        left, right = x // width, x % width
        for number, key in enumerate(self._keys):
            if number % 2 == 0:
                left = (left + mix(right + key) % height) % height
            else:
                right = (right + mix(left + key) % width) % width
        joined: npt.NDArray[np.uint64] = left * width + right
        return joined
