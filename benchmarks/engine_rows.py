"""The workloads of ``engine.py``: the same code for miniray and for Ray, in a fresh process.

``api`` is the module ``miniray`` or ``ray``; nothing below knows which. Each row is a function that
returns its raw samples. Imports are kept out of the top of this file: the first row measures them.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WORKERS = 4
LARGE = 200_000_000
SMALL = 2_000_000

now = time.perf_counter

_kept: list[Any] = []  # idle actors that shutdown has to end


def start(name: str) -> Any:
    """The module, imported and initialised."""
    api = importlib.import_module(name)
    if name == "ray":
        api.init(address="local", num_cpus=WORKERS, include_dashboard=False, logging_level="ERROR")
    else:
        api.init(num_workers=WORKERS, backend="local")
    return api


# -- life cycle -----------------------------------------------------------------------------------


def make_actor(api: Any) -> Any:
    class Actor:
        def ping(self) -> int:
            return 1

    return api.remote(Actor)


def startup(name: str) -> tuple[Any, float]:
    """Import, init and the answer of a first task."""
    begin = now()
    api = start(name)

    def answer() -> int:
        return 42

    assert api.get(api.remote(answer).remote()) == 42
    return api, now() - begin


def actor_start(api: Any, scale: float) -> list[float]:
    """From ``.remote()`` to the answer of a first call; the class is known from the second on."""
    actor_class, samples, keep = make_actor(api), [], []
    for _ in range(max(3, int(8 * scale))):
        begin = now()
        actor = actor_class.remote()
        api.get(actor.ping.remote())
        samples.append(now() - begin)
        keep.append(actor)
        if len(keep) == WORKERS:
            keep.clear()
            time.sleep(0.5)  # the old ones end, which is not what is measured
    return samples


def memory(api: Any, scale: float) -> list[float]:
    """Megabytes (proportional set size) of this process and all below it, with four idle actors."""
    import psutil

    actor_class = make_actor(api)
    actors = [actor_class.remote() for _ in range(WORKERS)]
    _kept.extend(actors)
    api.get([actor.ping.remote() for actor in actors])
    time.sleep(max(1.0, 4 * scale))
    me = psutil.Process()
    total = 0
    for process in [me, *me.children(recursive=True)]:
        try:
            total += process.memory_full_info().pss
        except psutil.NoSuchProcess:
            continue
    return [total / 1e6]


def shutdown(api: Any) -> float:
    begin = now()
    api.shutdown()
    return now() - begin


# -- calls ----------------------------------------------------------------------------------------


def rates(count: int, run: Callable[[int], None], rounds: int = 3) -> list[float]:
    """Calls a second of ``run(count)``, after a first one to warm up."""
    run(max(1, count // 10))
    samples = []
    for _ in range(rounds):
        begin = now()
        run(count)
        samples.append(count / (now() - begin))
    return samples


def call_sync(api: Any, scale: float) -> list[float]:
    actor = make_actor(api).remote()

    def run(count: int) -> None:
        for _ in range(count):
            api.get(actor.ping.remote())

    return rates(int(2000 * scale), run)


def call_async(api: Any, scale: float) -> list[float]:
    actor = make_actor(api).remote()
    return rates(
        int(10000 * scale), lambda count: api.get([actor.ping.remote() for _ in range(count)])
    )


def actor_to_actor(api: Any, scale: float) -> list[float]:
    class Caller:
        def run(self, other: Any, count: int) -> None:
            for _ in range(count):
                api.get(other.ping.remote())

    caller, other = api.remote(Caller).remote(), make_actor(api).remote()
    return rates(int(2000 * scale), lambda count: api.get(caller.run.remote(other, count)))


def n_to_n(api: Any, scale: float) -> list[float]:
    class Caller:
        def run(self, others: list[Any], count: int) -> None:
            api.get([others[i % len(others)].ping.remote() for i in range(count)])

    callers = [api.remote(Caller).remote() for _ in range(4)]
    others = [make_actor(api).remote() for _ in range(4)]

    def run(count: int) -> None:
        api.get([caller.run.remote(others, count // 4) for caller in callers])

    return rates(int(16000 * scale), run)


def tasks(api: Any, scale: float) -> list[float]:
    def nothing() -> None:
        pass

    task = api.remote(nothing)
    return rates(int(5000 * scale), lambda count: api.get([task.remote() for _ in range(count)]))


# -- data -----------------------------------------------------------------------------------------


def gigabytes_per_second(api: Any, scale: float, move: Callable[[], Any]) -> list[float]:
    """Of moving LARGE bytes, in the steady state: pages that can be warm are."""
    samples = []
    for i in range(4 + max(6, int(20 * scale))):
        begin = now()
        kept = move()
        took = now() - begin
        del kept
        if i >= 4:
            samples.append(LARGE / took / 1e9)
    return samples


def memcpy(api: Any, scale: float) -> list[float]:
    """The limit: a copy into memory that is there and warm."""
    import numpy as np

    source, target = np.ones(LARGE, np.uint8), np.ones(LARGE, np.uint8)
    return gigabytes_per_second(api, scale, lambda: np.copyto(target, source))


def put(api: Any, scale: float) -> list[float]:
    import numpy as np

    array = np.ones(LARGE, np.uint8)
    return gigabytes_per_second(api, scale, lambda: api.put(array))


def make_holder(api: Any) -> Any:
    class Holder:
        def __init__(self, size: int) -> None:
            import numpy as np

            self.array = np.ones(size, np.uint8)

        def held(self) -> Any:
            return self.array

    return api.remote(Holder)


def returned(api: Any, scale: float) -> list[float]:
    holder = make_holder(api).remote(LARGE)
    return gigabytes_per_second(api, scale, lambda: api.get(holder.held.remote()))


def get_seconds(api: Any, scale: float, size: int) -> list[float]:
    """``get`` alone, of what another process has put there already."""
    holder = make_holder(api).remote(size)
    samples = []
    for i in range(3 + max(6, int(20 * scale))):
        ref = holder.held.remote()
        api.wait([ref])
        begin = now()
        value = api.get(ref)
        took = now() - begin
        assert value.nbytes == size
        del value, ref
        if i >= 3:
            samples.append(took)
    return samples


#: In the order they run; a group is one process, so that none disturbs the figures of another.
GROUPS: dict[str, dict[str, Callable[[Any, float], list[float]]]] = {
    "life": {"actor_start": actor_start, "memory": memory},
    "calls": {
        "call_sync": call_sync,
        "call_async": call_async,
        "actor_to_actor": actor_to_actor,
        "n_to_n": n_to_n,
        "tasks": tasks,
    },
    "data": {
        "memcpy": memcpy,
        "put": put,
        "returned": returned,
        "get_large": lambda api, scale: get_seconds(api, scale, LARGE),
        "get_small": lambda api, scale: get_seconds(api, scale, SMALL),
    },
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--api", choices=["miniray", "ray"], required=True)
    parser.add_argument("--group", choices=list(GROUPS), required=True)
    parser.add_argument("--rows", required=True, help="comma-separated")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()

    faulthandler.enable()  # SIGABRT, when this takes too long, shows where
    api, seconds = startup(arguments.api)
    samples = {"startup": [seconds]}
    for row, measure in GROUPS[arguments.group].items():
        if row in arguments.rows.split(","):
            print(f"{arguments.api}: {row}", file=sys.stderr, flush=True)
            samples[row] = measure(api, arguments.scale)
    samples["shutdown"] = [shutdown(api)]
    arguments.out.write_text(json.dumps(samples))


if __name__ == "__main__":
    main()
