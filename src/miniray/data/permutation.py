"""A keyed shuffle with random access: position → row in constant time and memory.

Up to 4096 rows the permutation is a table, sorted by keyed hashes. Above that it is a Feistel
network over a rectangle of the least size that holds all rows: each round adds a keyed hash of one
coordinate to the other, which can always be undone, so the whole is a bijection. Positions that
land outside of the rows (fewer than one in fifty) go through the network again until they land
inside.

The result depends on the key and the size alone: not on numpy's version, the platform or what was
asked for before. It is good for shuffling and worthless for cryptography.
"""

from __future__ import annotations

import hashlib
from math import isqrt
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Positions: TypeAlias = npt.NDArray[np.int64]

_TABLE = 4096
_ROUNDS = 8
_MULTIPLY_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = np.uint64(0x94D049BB133111EB)
_SHIFT_30, _SHIFT_27, _SHIFT_31 = np.uint64(30), np.uint64(27), np.uint64(31)

#: More rows than this cannot be addressed.
MOST_ROWS = 2**62


def derive_key(*parts: Any) -> int:
    """64 bits from anything with a stable text: seed, epoch, what the key is for."""
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64: every input bit moves every output bit. Changes ``x``."""
    x ^= x >> _SHIFT_30
    x *= _MULTIPLY_1
    x ^= x >> _SHIFT_27
    x *= _MULTIPLY_2
    x ^= x >> _SHIFT_31
    return x


class Permutation:
    """A bijection of ``range(n)``; call it with an array of positions."""

    def __init__(self, n: int, key: int) -> None:
        if not 0 <= n <= MOST_ROWS:
            raise ValueError(f"cannot permute {n} rows: the most is 2**62")
        self.n = n
        self._table: Positions | None = None
        keys = _mix(np.arange(1, _ROUNDS + 1, dtype=np.uint64) + np.uint64(key))
        if n <= _TABLE:
            hashes = _mix(_mix(np.arange(n, dtype=np.uint64) + keys[0]) ^ keys[1])
            self._table = np.argsort(hashes, kind="stable").astype(np.int64)
        else:
            self._left = isqrt(n - 1) + 1
            self._right = -(-n // self._left)
            self._keys = keys

    def __call__(self, positions: npt.ArrayLike) -> Positions:
        """Rows at ``positions``, each of which must be in ``range(n)`` (not checked)."""
        asked = np.asarray(positions, dtype=np.int64)
        if self._table is not None:
            return self._table[asked]
        result = self._network(asked.astype(np.uint64))
        outside = result >= np.uint64(self.n)
        while outside.any():
            result[outside] = self._network(result[outside])
            outside = result >= np.uint64(self.n)
        return result.astype(np.int64)

    def _network(self, x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        height, width = np.uint64(self._left), np.uint64(self._right)
        left, right = x // width, x % width
        for number, key in enumerate(self._keys):
            if number % 2 == 0:
                left = (left + _mix(right + key) % height) % height
            else:
                right = (right + _mix(left + key) % width) % width
        joined: npt.NDArray[np.uint64] = left * width + right
        return joined
