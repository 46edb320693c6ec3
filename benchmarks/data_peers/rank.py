"""Run one rank of a loader. Started by ``benchmarks/data.py``."""

from __future__ import annotations

import importlib
import json
import os
import sys

# Instead of this directory, whose modules must not hide packages of the same name.
sys.path[0] = os.path.dirname(sys.path[0])

from data_peers.common import MemoryPeak, Run, measure  # noqa: E402


def main() -> None:
    with open(sys.argv[1]) as file:
        settings = json.load(file)
    channel = settings.pop("channel")  # a socket, by its descriptor
    action = settings.pop("action")
    run = Run(**settings)
    peak = MemoryPeak()
    peak.start()
    peer = importlib.import_module(f"data_peers.{run.loader}")

    def meet() -> None:
        os.write(channel, b"r")
        if not os.read(channel, 1):
            raise SystemExit("the benchmark is gone")

    if action == "prepare":
        peer.prepare(run)
        results = []
    elif hasattr(peer, "drive"):
        results = peer.drive(run, meet)
    else:
        results = [measure(lambda: peer.Loader(run), run, meet, peak)]
    with open(channel, "wb") as answer:
        answer.write(json.dumps(results).encode())


if __name__ == "__main__":
    main()
