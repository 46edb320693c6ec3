"""A keyed shuffle with random access: position → row in constant time and memory.

Up to 4096 rows the permutation is a table, sorted by keyed hashes. Above that it is a Feistel
network over a rectangle of the least size that holds all rows: each round adds a keyed hash of one
coordinate to the other, which can always be undone, so the whole is a bijection. Positions that
land outside of the rows (fewer than one in fifty) go through the network again until they land
inside.

The result depends on the key and the size alone: not on numpy's version, the platform or what was
asked for before. It is good for shuffling and worthless for cryptography. Only the network needs
numpy, and imports it when it is made, so that a loader of large rows starts without it.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from math import isqrt
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Positions: TypeAlias = "npt.NDArray[np.int64]"

_TABLE = 4096
_ROUNDS = 8
_ALL = 2**64 - 1

#: More rows than this cannot be addressed.
MOST_ROWS = 2**62


def derive_key(*parts: Any) -> int:
    """64 bits from anything with a stable text: seed, epoch, what the key is for."""
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def _mix(x: int) -> int:
    """The finaliser of splitmix64: every input bit moves every output bit."""
    x &= _ALL
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _ALL
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _ALL
    return x ^ x >> 31


def mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The same of all numbers of an array, which is changed."""
    x ^= x >> 30
    x *= 0xBF58476D1CE4E5B9
    x ^= x >> 27
    x *= 0x94D049BB133111EB
    x ^= x >> 31
    return x


def _table(n: int, key: int) -> list[int]:
    first, second = _mix(key + 1), _mix(key + 2)
    if "numpy" in sys.modules:  # many times faster, for the same numbers
        import numpy as np

        found = mix(mix(np.arange(n, dtype=np.uint64) + np.uint64(first)) ^ np.uint64(second))
        hashes: list[int] = found.tolist()
    else:
        hashes = [_mix(_mix(i) ^ second) for i in range(first, first + n)]
    return sorted(range(n), key=hashes.__getitem__)


class Permutation:
    """A bijection of ``range(n)``. Positions that are not in it are not checked for."""

    def __init__(self, n: int, key: int) -> None:
        if not 0 <= n <= MOST_ROWS:
            raise ValueError(f"cannot permute {n} rows: the most is 2**62")
        self.n = n
        self._table: list[int] | None = None
        if n <= _TABLE:
            self._table = _table(n, key)
        else:
            self._network = _Network(n, key)

    def rows(self, positions: Sequence[int]) -> list[int]:
        """Rows at ``positions``."""
        if self._table is None:
            return self(positions).tolist()  # type: ignore[no-any-return]
        table = self._table
        return [table[position] for position in positions]

    def __call__(self, positions: npt.ArrayLike) -> Positions:
        """The same as an array."""
        import numpy as np

        asked = np.asarray(positions, dtype=np.int64)
        if self._table is None:
            return self._network(asked)
        found: Positions = np.array(self._table, dtype=np.int64)[asked]
        return found


class _Network:
    """A bijection of ``range(n)`` for arrays of positions."""

    def __init__(self, n: int, key: int) -> None:
        import numpy as np

        self._n = n
        self._height = isqrt(n - 1) + 1
        self._width = -(-n // self._height)
        self._keys = mix(np.arange(1, _ROUNDS + 1, dtype=np.uint64) + np.uint64(key))

    def __call__(self, positions: Positions) -> Positions:
        result = self._once(positions.astype("uint64"))
        while (outside := result >= self._n).any():
            result[outside] = self._once(result[outside])
        return result.astype("int64")

    def _once(self, x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        left, right = x // self._width, x % self._width
        for number, key in enumerate(self._keys):
            if number % 2 == 0:
                left = (left + mix(right + key) % self._height) % self._height
            else:
                right = (right + mix(left + key) % self._width) % self._width
        return left * self._width + right
