"""A keyed shuffle with random access: position → row in constant time and memory.

Up to 4096 rows, the permutation is a table sorted by keyed hashes. Above that, it is a Feistel
network over the smallest near-square rectangle that holds all rows: each round adds a keyed hash of
one coordinate to the other, which is invertible, so the network is a bijection. Positions that fall
outside of the rows (fewer than one in fifty) pass through the network again until they fall inside.

The result depends only on the key and the size. It doesn't depend on NumPy's version, the platform
or earlier calls. It is suitable for shuffling and not for cryptography.
"""

from __future__ import annotations

import hashlib
from math import isqrt
from typing import Any

import numpy as np
import numpy.typing as npt

from miniray.data.locations import Int64s

_TABLE_ROWS = 4096
_ROUNDS = 8

#: Largest number of rows that can be addressed.
MAX_ROWS = 2**62


def derive_key(*parts: Any) -> int:
    """Return 64 bits derived from the text of ``parts``: seed, purpose, epoch."""
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply the finalizer of splitmix64 in place: every input bit changes every output bit."""
    x ^= x >> 30
    x *= 0xBF58476D1CE4E5B9
    x ^= x >> 27
    x *= 0x94D049BB133111EB
    x ^= x >> 31
    return x


class Permutation:
    """A bijection of ``range(n)``. Positions outside of it aren't detected."""

    def __init__(self, n: int, key: int) -> None:
        if not 0 <= n <= MAX_ROWS:
            raise ValueError(f"Cannot permute {n} rows. The maximum is 2**62.")
        self.n = n
        self._table: Int64s | None = None
        if n <= _TABLE_ROWS:
            first, second = mix(np.array([(key + i) % 2**64 for i in (1, 2)], dtype=np.uint64))
            hashes = mix(mix(np.arange(n, dtype=np.uint64) + first) ^ second)
            self._table = np.argsort(hashes, kind="stable").astype(np.int64)
            return
        self._height = isqrt(n - 1) + 1
        self._width = -(-n // self._height)
        self._keys = mix(np.arange(1, _ROUNDS + 1, dtype=np.uint64) + np.uint64(key))

    def map_positions(self, positions: npt.ArrayLike) -> Int64s:
        """Return the rows at ``positions``."""
        asked = np.asarray(positions, dtype=np.int64)
        if self._table is not None:
            return self._table[asked]
        rows = self._apply_network(asked.astype(np.uint64))
        while (outside := rows >= self.n).any():
            rows[outside] = self._apply_network(rows[outside])
        return rows.astype(np.int64)

    def _apply_network(self, x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        left, right = x // self._width, x % self._width
        for number, key in enumerate(self._keys):
            if number % 2 == 0:
                left = (left + mix(right + key) % self._height) % self._height
            else:
                right = (right + mix(left + key) % self._width) % self._width
        return left * self._width + right
