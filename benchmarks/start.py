"""Measure the time and memory of imports and of `miniray --help`.

    python benchmarks/start.py [--quick] [--json PATH] [--markdown]

Each is a fresh interpreter, and each is followed by a bare one that does nothing; a figure is the
median of the differences, so that the interpreter's own start is not counted. They take turns. The
first round only warms the disk's cache and writes what is compiled, as an installation does.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import common
from common import Line, median

#: Title → (what the interpreter is given, seconds it may take at most).
CASES: dict[str, tuple[list[str], float | None]] = {
    "import miniray": (["-c", "import miniray"], 0.100),
    "import miniray; miniray.remote": (["-c", "import miniray; miniray.remote"], 0.100),
    "import miniray.data": (["-c", "import miniray.data"], None),
    "import miniray.train": (["-c", "import miniray.train"], None),
    "miniray --help": (["-m", "miniray", "--help"], None),
    "import ray": (["-c", "import ray"], None),
    "import torch": (["-c", "import torch"], None),
}
BARE = ["-c", "pass"]
COLUMNS = ["time on a processor", "time"]


Samples = dict[str, list[float]]


def interpreter(arguments: list[str]) -> tuple[float, float]:
    """(seconds, of which on a processor) of a fresh one, from its start to its end."""
    environment = {**os.environ, "PYTHONPATH": str(common.ROOT / "src")}
    used, begin = processor_seconds(), time.perf_counter()
    subprocess.run(
        [sys.executable, *arguments], env=environment, stdout=subprocess.DEVNULL, check=True
    )
    return time.perf_counter() - begin, processor_seconds() - used


def processor_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def measure(cases: list[str], rounds: int) -> dict[str, Samples]:
    """By case, what it took over the bare interpreter after it: ``wall`` and ``cpu``."""
    found: dict[str, Samples] = {name: {"wall": [], "cpu": []} for name in cases}
    for number in range(-1, rounds):
        for name in cases:
            whole, bare = interpreter(CASES[name][0]), interpreter(BARE)
            if number >= 0:
                found[name]["wall"].append(whole[0] - bare[0])
                found[name]["cpu"].append(whole[1] - bare[1])
    return found


def summarise(samples: dict[str, Samples]) -> list[Line]:
    lines = []
    for name, of in samples.items():
        limit, wall = CASES[name][1], median(of["wall"])
        goal = "" if limit is None else f"{common.human(limit, 's')} at most"
        reached = None if limit is None else wall <= limit
        cells = [common.human(median(of["cpu"]), "s"), common.human(wall, "s")]
        lines.append(Line(f"`{name}`", cells, goal, reached))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="three rounds")
    parser.add_argument("--json", type=Path, default=common.RESULTS / "start.json", metavar="PATH")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    arguments = parser.parse_args()
    peers = [name for name in ("ray", "torch") if importlib.util.find_spec(name) is None]
    cases = [name for name in CASES if name.removeprefix("import ") not in peers]
    samples = measure(cases, 3 if arguments.quick else 11)
    lines, columns = summarise(samples), COLUMNS
    if arguments.markdown:
        print(common.markdown_table(columns, lines))
    else:
        common.print_table("starting", columns, lines)
    record = {
        "finished": common.stamp(),
        "machine": common.machine(),
        "versions": common.versions("miniray", "ray", "torch"),
        "samples": samples,
        "table": [vars(line) for line in lines],
    }
    common.write_json(arguments.json, record)
    print(f"all samples: {arguments.json}")


if __name__ == "__main__":
    main()
