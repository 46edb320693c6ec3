"""What benchmarks share: the machine they ran on, medians, a table, a JSON file.

Every figure is kept as raw samples; medians and ratios are made from them when printing.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

T = TypeVar("T")


def median(samples: Sequence[float]) -> float:
    return statistics.median(samples)


def find_median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return an interval that contains the median of the population with at least 95 %.

    The k-th smallest and k-th largest of n sorted values do unless fewer than k of them are on one
    side of it, which has a binomial distribution. With fewer than 6 values, it is their range.
    """
    count = len(values)
    tail, rank = 0.0, 0
    while rank < count // 2:
        tail += math.comb(count, rank) / 2**count
        if 2 * tail > 0.05:
            break
        rank += 1
    rank = max(rank, 1)
    return values[rank - 1], values[count - rank]


def machine() -> dict[str, Any]:
    """Cores, memory and kernel, for the reader who compares two files."""
    cpu = ""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        cpu = lines[0].partition(":")[2].strip() if lines else ""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    from miniray.limits import cpu_count  # only here: peers are measured without miniray

    return {
        "cpu": cpu or platform.processor(),
        "cores": cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
        "system": platform.system(),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def versions(*packages: str) -> dict[str, str]:
    """Installed versions; a package that is not there is left out."""
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def run_measured(script: Path, arguments: Sequence[str], timeout: float = 300) -> dict[str, Any]:
    """Run ``script`` in a fresh interpreter and return the JSON it wrote to its ``--out``.

    Its output is shown only when it fails. The checkout's own miniray is the one imported.
    """
    environment = {k: v for k, v in os.environ.items() if k != "MINIRAY_BACKEND"}
    paths = [str(ROOT / "src"), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "samples.json"
        command = [sys.executable, str(script), *arguments, "--out", str(out)]
        status, output = _run(command, environment, timeout)
        if status != 0 or not out.exists():
            raise RuntimeError(f"{' '.join(command)} ended with {status}:\n{output[-4000:]}")
        samples: dict[str, Any] = json.loads(out.read_text())
        return samples


def tried_again(run: Callable[[], T], say: Callable[[str], None], times: int = 5) -> T:
    """What ``run`` of a peer returns, again and again if it fails, which is said.

    torch 2.13 aborts a process of gloo now and then at its very end, when all steps are done.
    """
    for _ in range(times - 1):
        try:
            return run()
        except RuntimeError as error:
            say(f"failed, and is run again: {error}")
    return run()


def _run(command: list[str], environment: dict[str, str], timeout: float) -> tuple[int | str, str]:
    """(exit status, output); whatever ends the wait, no process of the command is left."""
    process = subprocess.Popen(
        command,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGABRT)  # the script shows where its threads are
        output, _ = process.communicate(timeout=10)
        return f"no answer after {timeout:g} s", output
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


@dataclasses.dataclass
class Line:
    """A line of the table. ``reached`` is None where there is nothing to reach."""

    title: str
    cells: list[str]
    goal: str = ""
    reached: bool | None = None


def print_table(title: str, columns: Sequence[str], lines: Sequence[Line]) -> None:
    """On the terminal, in colour where it has any."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right")
    table.add_column("wanted", justify="right")
    colour = {True: "green", False: "red", None: "none"}
    for line in lines:
        *cells, last = line.cells
        table.add_row(line.title, *cells, f"[{colour[line.reached]}]{last}[/]", line.goal)
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def markdown_table(columns: Sequence[str], lines: Sequence[Line]) -> str:
    """The same table for ``docs/benchmarks.md``; what was missed is in italics."""
    head = ["", *columns, "wanted"]
    rows = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    for line in lines:
        *cells, last = line.cells
        last = {True: f"**{last}**", False: f"*{last}*", None: last}[line.reached]
        rows.append("| " + " | ".join([line.title, *cells, last, line.goal]) + " |")
    return "\n".join(rows)


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Whole or not at all: a benchmark that is interrupted leaves the previous file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(record, indent=1) + "\n")
    temporary.replace(path)


def stamp() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def human(value: float, unit: str) -> str:
    """A figure with three digits and a unit that suits it."""
    if unit == "s":
        for limit, factor, name in ((1, 1e0, "s"), (1e-3, 1e3, "ms"), (0, 1e6, "µs")):
            if value >= limit:
                return f"{_digits(value * factor)} {name}"
    return f"{_digits(value)} {unit}"


def _digits(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"
