"""One measurement of ``ps.py``, in a process of its own: a system, so many workers and tensors.

    python benchmarks/ps_rows.py --system miniray --workers 4 --tensors 10 --out samples.json

Every worker holds the same number of bytes in float32 tensors. A sync leaves the mean on all of
them: with a parameter server by ``get_weights`` and ``param.copy_(new)``, with gloo in place.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch


class Worker:
    """The worker of the user guide: tensors out, tensors copied in."""

    def __init__(self, index: int, tensors: int, numbers: int) -> None:
        torch.set_num_threads(1)
        self.params = [torch.full((numbers,), float(index)) for _ in range(tensors)]

    def get_weights(self) -> list[torch.Tensor]:
        return self.params

    def set_weights(self, weights: list[torch.Tensor]) -> None:
        for param, new in zip(self.params, weights, strict=True):
            param.copy_(new)

    def first(self) -> float:
        return float(self.params[0][0])


class ArrayWorker(Worker):
    """The same with numpy arrays, which Ray's store hands out without a copy."""

    def get_weights(self) -> list[Any]:  # type: ignore[override]
        return [param.numpy() for param in self.params]

    def set_weights(self, weights: list[Any]) -> None:
        for param, new in zip(self.params, weights, strict=True):
            np.copyto(param.numpy(), new)


class PlainServer:
    """A straightforward parameter server: what one writes first, without a needless copy."""

    def sync_from_workers(self, workers: list[Any]) -> None:
        import ray

        weights = ray.get([worker.get_weights.remote() for worker in workers])
        mean = []
        for first, *others in zip(*weights, strict=True):
            total = first + others[0]
            for other in others[1:]:
                total += other
            total /= len(workers)
            mean.append(total)
        ref = ray.put(mean)
        ray.get([worker.set_weights.remote(ref) for worker in workers])


Samples = dict[str, list[float]]


def timed(sync: Any, rounds: int) -> list[float]:
    """Seconds of each sync after three that warm up."""
    samples = []
    for i in range(rounds + 3):
        start = time.perf_counter()
        sync()
        if i >= 3:
            samples.append(time.perf_counter() - start)
    return samples


def run_miniray(workers: int, tensors: int, numbers: int, rounds: int) -> Samples:
    import miniray
    from miniray import ps

    miniray.init(num_workers=1, log_to_driver=False)
    actor = miniray.remote(Worker)
    handles = [actor.remote(i, tensors, numbers) for i in range(workers)]
    server = ps.create_parameter_server("average")
    pid = server_pid(server)
    phases: list[dict[str, float]] = []
    memory = Memory(pid)
    first = time.perf_counter()
    miniray.get(server.sync_from_workers.remote(handles))
    first = time.perf_counter() - first

    def sync() -> None:
        phases.append(miniray.get(server.sync_from_workers.remote(handles))["seconds"])

    samples = timed(sync, rounds)
    with memory:
        for _ in range(5):
            sync()
    means = miniray.get([handle.first.remote() for handle in handles])
    assert means == [(workers - 1) / 2] * workers, means
    ways = list(miniray.get(server.get_stats.remote())["transport"].values())
    miniray.shutdown()
    size = 4 * tensors * numbers
    return {
        "sync": samples,
        "first": [first],
        **{phase: [p[phase] for p in phases[3 : 3 + rounds]] for phase in phases[0]},
        "server_memory": [memory.grown / size],
        "read": [ways.count("read") / workers],
    }


def server_pid(server: Any) -> int:
    import miniray

    try:
        miniray.get(server.get_weights.remote())
    except miniray.errors.TaskError as error:  # it has no weights yet, and says where
        return error.pid
    raise AssertionError


class Memory:
    """The largest memory of a process's own while in the ``with`` block, over what it had before.

    Its own: private pages, and shared segments it wrote. Segments of the workers that it reads are
    the workers' own, and stay theirs whether it looks at them or not.
    """

    def __init__(self, pid: int) -> None:
        self._path = Path(f"/proc/{pid}/smaps")
        self._before = self._now()
        self._peak = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _now(self) -> int:
        total, writes = 0, False
        for line in self._path.read_text().splitlines():
            key, _, rest = line.partition(":")
            if "-" in key.split(" ")[0]:
                writes = "rw-s" in line and "memfd" in line
            elif key == "Anonymous" or (writes and key == "Rss"):
                total += int(rest.split()[0]) * 1024
        return total

    def __enter__(self) -> None:
        self._thread.start()

    def _watch(self) -> None:
        while not self._done.is_set():
            self._peak = max(self._peak, self._now())

    def __exit__(self, *exc_info: object) -> None:
        self._done.set()
        self._thread.join()

    @property
    def grown(self) -> int:
        return self._peak - self._before


def run_ray(workers: int, tensors: int, numbers: int, rounds: int) -> Samples:
    """Workers that give tensors, as anybody's would, and such that give numpy arrays."""
    import ray

    ray.init(num_cpus=workers + 2, log_to_driver=False, include_dashboard=False)
    samples: Samples = {}
    for name, cls in (("sync", Worker), ("arrays", ArrayWorker)):
        actor = ray.remote(cls)
        handles = [actor.remote(i, tensors, numbers) for i in range(workers)]
        server = ray.remote(PlainServer).remote()

        def sync(server: Any = server, handles: list[Any] = handles) -> None:
            ray.get(server.sync_from_workers.remote(handles))

        samples[name] = timed(sync, rounds)
        means = ray.get([handle.first.remote() for handle in handles])
        assert means == [(workers - 1) / 2] * workers, means
        for handle in (server, *handles):
            ray.kill(handle)
    ray.shutdown()
    return samples


#: Bytes that DDP reduces at a time unless told otherwise.
BUCKET = 25 * 1024 * 1024


def run_gloo(workers: int, tensors: int, numbers: int, rounds: int) -> Samples:
    """All-reduce of one flat tensor of all bytes, and in buckets that are under way at once.

    Both in place: what it takes to bring tensors into a bucket and back is not counted. ``sync``
    is the faster of the two.
    """
    import torch.multiprocessing as processes

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    queue: Any = processes.get_context("spawn").Queue()
    arguments = (workers, tensors, numbers, rounds, port, queue)
    context = processes.spawn(gloo_rank, arguments, nprocs=workers, join=False)
    samples: Samples = queue.get(timeout=280)
    while not context.join():
        pass
    return {"sync": min(samples.values(), key=statistics.median), **samples}


def gloo_rank(
    rank: int, workers: int, tensors: int, numbers: int, rounds: int, port: int, queue: Any
) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=workers)
    flat = torch.full((tensors * numbers,), float(rank))

    def reduce(parts: Sequence[torch.Tensor]) -> None:
        under_way = [dist.all_reduce(part, async_op=True) for part in parts]
        for part, work in zip(parts, under_way, strict=True):
            work.wait()
            part.div_(workers)
        dist.barrier()

    buckets = flat.split(BUCKET // flat.element_size())
    samples = {
        "flat": timed(lambda: reduce([flat]), rounds),
        "buckets": timed(lambda: reduce(buckets), rounds),
    }
    assert float(flat[0]) == (workers - 1) / 2
    if rank == 0:
        queue.put(samples)
    dist.destroy_process_group()


SYSTEMS = {
    "miniray": run_miniray,
    "gloo": run_gloo,
    "ray": run_ray,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--system", choices=SYSTEMS, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--tensors", type=int, required=True)
    parser.add_argument("--megabytes", type=float, default=100)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, required=True)
    a = parser.parse_args()
    numbers = int(a.megabytes * 1e6 / 4 / a.tensors)
    a.out.write_text(json.dumps(SYSTEMS[a.system](a.workers, a.tensors, numbers, a.rounds)))


if __name__ == "__main__":
    main()
