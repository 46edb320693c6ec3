"""Read by mypy with the plugin, not run: classes as they are written for Ray."""

from collections.abc import Iterator

from typing_extensions import reveal_type

import miniray


@miniray.remote
class Worker:
    def __init__(self, worker_id: int, *, lr: float = 0.1) -> None:
        self.worker_id, self.lr = worker_id, lr

    def train_epoch(self, epoch: int, batch_size: int = 32) -> dict[str, float]:
        return {"loss": self.lr / (epoch + 1)}

    async def fetch(self, name: str) -> bytes:
        return name.encode()

    def stream(self, n: int) -> Iterator[int]:
        yield from range(n)

    @staticmethod
    def version(of: str) -> str:
        return of

    @classmethod
    def made(cls, n: int) -> int:
        return n

    def untyped(self, x):  # type: ignore[no-untyped-def]
        return x


@miniray.remote(num_cpus=1)
class Small:
    def ping(self) -> int:
        return 1


class Base:
    def __init__(self, name: str) -> None:
        self.name = name

    def who(self) -> str:
        return self.name


@miniray.remote
class Derived(Base):
    pass


worker = Worker.remote(0, lr=0.5)
reveal_type(worker)  # reveal: ActorHandle[Worker]
reveal_type(worker.train_epoch.remote(1))  # reveal: ObjectRef[dict[str, float]]
reveal_type(miniray.get(worker.train_epoch.remote(1, batch_size=8)))  # reveal: dict[str, float]
reveal_type(worker.fetch.remote("a"))  # reveal: ObjectRef[bytes]
reveal_type(worker.stream.remote(1))  # reveal: ObjectRefGenerator[int]
reveal_type(worker.version.remote("a"))  # reveal: ObjectRef[str]
reveal_type(worker.made.remote(1))  # reveal: ObjectRef[int]
reveal_type(Small.remote().ping.remote())  # reveal: ObjectRef[int]
reveal_type(Derived.remote("a").who.remote())  # reveal: ObjectRef[str]
worker.untyped.remote(1, 2)
worker.train_epoch.remote(miniray.put(1))
worker.train_epoch.options(num_returns=1).remote(1)
miniray.kill(worker)

Worker.remote("a")  # error
Worker.remote()  # error
Worker.remote(0, momentum=0.9)  # error
Derived.remote(1)  # error
Small.remote(1)  # error
worker.train_epoch.remote("a")  # error
worker.train_epoch.remote(1, batches=8)  # error
worker.train.remote(1)  # error
worker.version.remote(1)  # error

two_cpus = Worker.options(num_cpus=2)
reveal_type(two_cpus.remote(0).fetch.remote("a"))  # reveal: ObjectRef[bytes]
two_cpus.remote("a")  # error

# Not decorated: the methods of its handles.
Undecorated = miniray.remote(Base)
reveal_type(Undecorated.remote("a").who.remote())  # reveal: ObjectRef[str]
Undecorated.remote("a").whom.remote()  # error
