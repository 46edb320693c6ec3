"""Two runs of miniray of which one protects itself, in turns. ``recovery.py`` compares them.

    python miniray_turns.py PAIRS OUT

All ranks of both runs stay alive, so that a pair of turns differs by little else than the
protection. Writes a JSON list of turns: which run, its start and end, and the CPU seconds of all
processes. ``workload.py`` records the steps.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from miniray_ddp import Worker
from workload import TURN_STEPS

import miniray
from miniray.train import DDPTrainer


def measure_cpu() -> float:
    """Return the CPU seconds of this process and its descendants so far."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def main(pairs: int, out: Path) -> None:
    turns: list[dict[str, Any]] = []
    with miniray.init(backend="local", num_workers=4):
        trainers = {
            "with": DDPTrainer(num_workers=2, worker=Worker, max_failures=3),
            "without": DDPTrainer(num_workers=2, worker=Worker, snapshot_every=None),
        }
        for number in range(pairs + 1):  # the first pair starts the ranks
            order = ("with", "without") if number % 2 else ("without", "with")
            for name in order:
                start, cpu = time.monotonic(), measure_cpu()
                trainers[name].train(steps=TURN_STEPS)
                turn = {"run": name, "start": start, "end": time.monotonic()}
                turns.append({**turn, "cpu": measure_cpu() - cpu})
        for trainer in trainers.values():
            trainer.shutdown()
    out.write_text(json.dumps(turns[2:]))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
