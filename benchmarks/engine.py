"""Compare the local engine with Ray.

    python benchmarks/engine.py [--quick] [--only put,tasks] [--no-ray] [--json PATH] [--markdown]

Both run the same code (``engine_rows.py``) in fresh processes, taking turns, so that a change of
the machine's load meets both. Figures are medians of all samples; the JSON file has every one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import common
from common import Line, median
from engine_rows import GROUPS, LARGE, SMALL

ROWS_FILE = Path(__file__).with_name("engine_rows.py")

Samples = dict[str, list[float]]


@dataclass(frozen=True)
class Row:
    """What ``--only`` chooses. ``needs`` are the measurements; the goal is the factor over Ray."""

    title: str
    unit: str
    needs: tuple[str, ...]
    goal: float | None = None


ROWS: dict[str, Row] = {
    "startup": Row("import + init to first answer", "s", ("startup",), 20),
    "actor_start": Row("actor start to first answer", "s", ("actor_start",), 8),
    "call_sync": Row("actor call 1:1, sync", "calls/s", ("call_sync",), 8),
    "call_async": Row("actor call 1:1, async", "calls/s", ("call_async",), 8),
    "actor_to_actor": Row("actor → actor call, sync", "calls/s", ("actor_to_actor",), 8),
    "n_to_n": Row("n:n actor calls, async (4 callers, 4 actors)", "calls/s", ("n_to_n",), 5),
    "tasks": Row("tasks, async", "tasks/s", ("tasks",), 10),
    "put": Row("put of 200 MB", "GB/s", ("put", "memcpy"), 3),
    "returned": Row("actor returns 200 MB it holds", "GB/s", ("returned", "memcpy"), 3),
    "get": Row("get of 200 MB", "s", ("get_large", "get_small")),
    "memory": Row("memory, idle with 4 actors (PSS)", "MB", ("memory",), 10),
    "shutdown": Row("shutdown, with 4 actors", "s", ("shutdown",), 10),
}

#: Smallest share of a warm memcpy that any single transfer may have.
SHARES = {"put": 0.60, "returned": 0.50}


def measure(
    rows: list[str], apis: list[str], repetitions: int, scale: float, say: Callable[[str], None]
) -> dict[str, Samples]:
    """Samples by api and measurement; each group of measurements is a process of its own."""
    needed = {name for row in rows for name in ROWS[row].needs}
    samples: dict[str, Samples] = {api: {} for api in apis}
    for repetition in range(repetitions):
        for group, measurements in GROUPS.items():
            # Start-up and shutdown are measured by every process, and reported from this one.
            wanted = [name for name in measurements if name in needed]
            if group == "life" and needed & {"startup", "shutdown"} and "memory" not in wanted:
                wanted.append("memory")  # it leaves the four actors that shutdown has to end
            if not wanted:
                continue
            # Taking turns at being first, too.
            for api in apis if repetition % 2 == 0 else reversed(apis):
                say(f"{repetition + 1}/{repetitions}  {api}: {', '.join(wanted)}")
                arguments = ["--api", api, "--group", group, "--rows", ",".join(wanted)]
                result = common.run_measured(ROWS_FILE, [*arguments, "--scale", str(scale)])
                for name, values in result.items():
                    if group == "life" or name not in ("startup", "shutdown"):
                        samples[api].setdefault(name, []).extend(values)
    return samples


def summarise(rows: list[str], samples: dict[str, Samples]) -> list[Line]:
    lines: list[Line] = []
    for key in rows:
        if key == "get":
            lines += _get_lines(samples)
        else:
            lines.append(_ratio_line(ROWS[key], samples))
        if key in SHARES:
            lines.append(_share_line(key, samples))
    return lines


def _ratio_line(row: Row, samples: dict[str, Samples]) -> Line:
    values = {api: median(of[row.needs[0]]) for api, of in samples.items()}
    cells = [common.human(value, row.unit) for value in values.values()]
    if "ray" not in values:
        return Line(row.title, [*cells, ""], _times(row.goal))
    more_is_better = row.unit.endswith("/s")
    ratio = values["miniray"] / values["ray"]
    if not more_is_better:
        ratio = 1 / ratio
    reached = None if row.goal is None else ratio >= row.goal
    return Line(row.title, [*cells, f"{ratio:.1f}×"], _times(row.goal), reached)


def _times(goal: float | None) -> str:
    return "" if goal is None else f"{goal:g}×"


def _share_line(key: str, samples: dict[str, Samples]) -> Line:
    """The slowest single transfer as a share of the warm memcpy of the same processes."""
    shares = {api: min(of[key]) / median(of["memcpy"]) for api, of in samples.items()}
    cells = [
        f"{common.human(min(samples[api][key]), 'GB/s')}, {share:.0%}"
        for api, share in shares.items()
    ]
    reached = shares["miniray"] >= SHARES[key]
    verdict = f"{shares['miniray']:.0%}"
    goal = f"{SHARES[key]:.0%} each time"
    return Line("  the slowest, share of warm memcpy", [*cells, verdict], goal, reached)


def _get_lines(samples: dict[str, Samples]) -> list[Line]:
    growth = {api: median(of["get_large"]) / median(of["get_small"]) for api, of in samples.items()}
    large = _ratio_line(ROWS["get"], samples)
    # A hundred times the bytes: a copy would take a hundred times as long, noise perhaps twice.
    reached = growth["miniray"] < 2
    cells = [f"{value:.2f}× the time" for value in growth.values()]
    title = f"  for {LARGE // SMALL} times the bytes (2 MB → 200 MB)"
    return [
        large,
        Line(title, [*cells, f"{growth['miniray']:.2f}×"], "independent of size", reached),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one repetition, a fifth of the work")
    parser.add_argument("--only", metavar="ROWS", help=f"comma-separated: {', '.join(ROWS)}")
    parser.add_argument("--no-ray", action="store_true", help="miniray alone")
    parser.add_argument("--json", type=Path, default=common.RESULTS / "engine.json", metavar="PATH")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    arguments = parser.parse_args()
    rows = arguments.only.split(",") if arguments.only else list(ROWS)
    unknown = sorted(set(rows) - set(ROWS))
    if unknown:
        parser.error(f"unknown rows {', '.join(unknown)}; there are {', '.join(ROWS)}")

    apis = ["miniray"] if arguments.no_ray else ["miniray", "ray"]
    repetitions, scale = (1, 0.2) if arguments.quick else (3, 1.0)
    started = common.stamp()
    samples = measure(rows, apis, repetitions, scale, lambda text: print(text, flush=True))
    lines = summarise(rows, samples)
    columns = [*apis, "" if arguments.no_ray else "ratio"]
    if arguments.markdown:
        print(common.markdown_table(columns, lines))
    else:
        common.print_table("miniray's local engine and Ray", columns, lines)
    record = {
        "started": started,
        "finished": common.stamp(),
        "machine": common.machine(),
        "versions": common.versions("miniray", "ray", "numpy", "cloudpickle", "psutil"),
        "repetitions": repetitions,
        "scale": scale,
        "samples": samples,
        "table": [vars(line) for line in lines],
    }
    common.write_json(arguments.json, record)
    print(f"all samples: {arguments.json}")


if __name__ == "__main__":
    main()
