"""Read by type checkers, not run: actors, typed ones and plain ones."""

from collections.abc import Iterator

from typing_extensions import reveal_type

import miniray


class Counter(miniray.Actor):
    def __init__(self, start: int, step: int = 1) -> None:
        self.value, self.step = start, step

    @miniray.method
    def add(self, n: int) -> int:
        self.value += n
        return self.value

    @miniray.method
    def twice(self, n: int) -> str:
        reveal_type(self.add(n))  # reveal: int
        self.add("a")  # error
        return str(self.add(n))

    @miniray.method
    async def later(self, n: int) -> bytes:
        return b""

    @miniray.method
    def upto(self, n: int) -> Iterator[int]:
        yield from range(n)

    @miniray.method(num_returns=2)
    def both(self, n: int) -> tuple[int, int]:
        return n, n

    def helper(self, n: int) -> int:
        return n


counter = Counter.remote(1)
reveal_type(counter)  # reveal: Counter
reveal_type(counter.add.remote(1))  # reveal: ObjectRef[int]
reveal_type(miniray.get(counter.twice.remote(1)))  # reveal: str
reveal_type(counter.later.remote(1))  # reveal: ObjectRef[bytes]
reveal_type(counter.upto.remote(1))  # reveal: ObjectRefGenerator[int]
counter.both.remote(1)
counter.add.remote(miniray.put(1))
miniray.kill(counter)

Counter.remote("a")  # error
Counter.remote()  # error
counter.add.remote("a")  # error
counter.add.remote()  # error
counter.both.remote("a")  # error
counter.subtract.remote(1)  # error
counter.helper.remote(1)  # error


def use(handle: Counter) -> int:
    """The class is the handle's type."""
    return miniray.get(handle.add.remote(1))


reveal_type(use(Counter.options(num_cpus=1).remote(1, step=2)))  # reveal: int
Counter.options(num_cpus=1).remote("a")  # error

# A decorator on top changes nothing but the options.
Named = miniray.remote(name="counter")(Counter)
reveal_type(Named.remote(1).add.remote(1))  # reveal: ObjectRef[int]
Named.remote("a")  # error


class Plain:
    def __init__(self, start: int) -> None:
        self.value = start

    def add(self, n: int) -> int:
        return self.value + n


# A class that is no Actor: anything goes, as far as the checker can see.
PlainActor = miniray.remote(Plain)
reveal_type(PlainActor.remote(1))  # reveal: ActorHandle[Plain]
PlainActor.remote(1).add.remote(1)
PlainActor.options(num_cpus=1).remote(1).add.options(num_returns=2).remote(1)
