"""Read by type checkers, not run: remote functions and what their refs give.

``# reveal: TYPE`` after ``reveal_type``, ``# error`` where a checker must complain.
"""

from collections.abc import AsyncIterator, Iterator

from typing_extensions import reveal_type

import miniray


@miniray.remote
def scale(x: int, by: float = 1.0) -> float:
    return x * by


@miniray.remote(num_cpus=2)
def heavy(x: int) -> str:
    return str(x)


@miniray.remote(max_retries=0)
async def lines(name: str) -> AsyncIterator[str]:
    yield name


@miniray.remote(num_cpus=1, num_returns=2)
def halves(x: int) -> tuple[int, int]:
    return x // 2, x - x // 2


@miniray.remote
def count(up_to: int) -> Iterator[int]:
    yield from range(up_to)


@miniray.remote
async def fetch(name: str) -> bytes:
    return name.encode()


@miniray.remote
async def stream(name: str) -> AsyncIterator[bytes]:
    yield name.encode()


reveal_type(scale.remote(1))  # reveal: ObjectRef[float]
reveal_type(scale.remote(1, by=2.0))  # reveal: ObjectRef[float]
reveal_type(fetch.remote("a"))  # reveal: ObjectRef[bytes]
reveal_type(count.remote(3))  # reveal: ObjectRefGenerator[int]
reveal_type(stream.remote("a"))  # reveal: ObjectRefGenerator[bytes]
for item in count.remote(3):
    reveal_type(miniray.get(item))  # reveal: int

scale.remote("a")  # error
scale.remote()  # error
scale.remote(1, to=2.0)  # error
fetch.remote(1)  # error
heavy.remote("a")  # error
reveal_type(heavy.remote(1))  # reveal: ObjectRef[str]
reveal_type(lines.remote("a"))  # reveal: ObjectRefGenerator[str]
first, second = halves.remote(4)
halves.remote("a")  # error

# A ref in place of the value.
scale.remote(miniray.put(1), 2.0)
scale.remote(1, miniray.put(2.0))
scale.remote(scale.remote(1))

# Options keep the signature.
reveal_type(scale.options(num_cpus=2).remote(1))  # reveal: ObjectRef[float]
scale.options(num_cpus=2).remote("a")  # error
scale.options(num_returns=2).remote(1)

# The verbs.
reveal_type(miniray.put("a"))  # reveal: ObjectRef[str]
reveal_type(miniray.get(scale.remote(1)))  # reveal: float
reveal_type(miniray.get([scale.remote(1), scale.remote(2)]))  # reveal: list[float]
different = miniray.get([scale.remote(1), fetch.remote("a")])
ready, others = miniray.wait([fetch.remote("a"), fetch.remote("b")])
reveal_type(ready)  # reveal: list[ObjectRef[bytes]]
reveal_type(others)  # reveal: list[ObjectRef[bytes]]
miniray.get(1)  # error


async def main() -> None:
    reveal_type(await fetch.remote("a"))  # reveal: bytes
