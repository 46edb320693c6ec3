"""Parameter sync: miniray's server, gloo's all-reduce, and a plain server on Ray actors.

    python benchmarks/ps.py [--quick] [--no-ray] [--json PATH] [--markdown]

Weights of 100 MB in 10 and in 400 tensors on 2 and 4 workers. All systems run in turn in fresh
processes, twice, so that a change of the machine's load meets all. gloo's figure is for all bytes
in place, as one flat tensor or in DDP's buckets, whichever is faster. Ray's is for workers that
give tensors; below it is that for numpy arrays, which Ray hands out without a copy. GB/s count what
the workers give and get. Figures are medians of all samples; the JSON file has every one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import common
from common import Line, median

ROWS_FILE = Path(__file__).with_name("ps_rows.py")
CASES = [(2, 10), (2, 400), (4, 10), (4, 400)]
MEGABYTES = 100

#: Wanted: so many times faster than gloo (with 4 workers) and than the plain server on Ray; and the
#: server's own memory at most so many times the weights.
GLOO_FACTOR, RAY_FACTOR, MEMORY_FACTOR = 2.0, 5.0, 2.5

Samples = dict[str, list[float]]


def measure(
    systems: list[str], repetitions: int, rounds: int, size: float, say: Callable[[str], None]
) -> dict[str, dict[str, Samples]]:
    """Samples by case and system."""
    found: dict[str, dict[str, Samples]] = {_name(c): {s: {} for s in systems} for c in CASES}
    for repetition in range(repetitions):
        for case in CASES:
            for system in systems if repetition % 2 == 0 else reversed(systems):
                say(f"{repetition + 1}/{repetitions}  {system}: {_name(case)}")
                for name, values in _run(system, case, rounds, size).items():
                    found[_name(case)][system].setdefault(name, []).extend(values)
    return found


def _run(system: str, case: tuple[int, int], rounds: int, size: float) -> Samples:
    arguments = ["--system", system, "--workers", case[0], "--tensors", case[1]]
    arguments += ["--rounds", rounds, "--megabytes", size]
    return common.run_measured(ROWS_FILE, [str(a) for a in arguments])


def _name(case: tuple[int, int]) -> str:
    return f"{case[0]} workers, {case[1]} tensors"


def summarise(found: dict[str, dict[str, Samples]]) -> list[Line]:
    lines = []
    for (workers, _), (name, samples) in zip(CASES, found.items(), strict=True):
        lines.append(_factor_line(name, samples, "gloo", GLOO_FACTOR if workers == 4 else None))
        if "ray" in samples:
            lines.append(_factor_line("  and Ray", samples, "ray", RAY_FACTOR))
            lines.append(_factor_line("  and Ray, arrays", samples, "ray", None, "arrays"))
        lines.append(_phases_line(samples["miniray"]))
        lines.append(_speed_line(samples["miniray"], workers))
        lines.append(_transport_line(samples["miniray"]))
        lines.append(_memory_line(samples["miniray"]))
    return lines


def _speed_line(samples: Samples, workers: int) -> Line:
    speed = 2 * workers * MEGABYTES / 1000 / median(samples["sync"])
    return Line("  to and from the workers", [f"{speed:.1f} GB/s", "", ""])


def _transport_line(samples: Samples) -> Line:
    share = f"{100 * sum(samples['read']) / len(samples['read']):.0f} %"
    return Line("  workers whose memory was read", [share, "", ""])


def _factor_line(
    title: str, samples: dict[str, Samples], other: str, goal: float | None, way: str = "sync"
) -> Line:
    mine, theirs = median(samples["miniray"]["sync"]), median(samples[other][way])
    factor = theirs / mine
    cells = [common.human(mine, "s"), f"{other} {common.human(theirs, 's')}", f"{factor:.1f}×"]
    reached = None if goal is None else factor >= goal
    return Line(title, cells, "" if goal is None else f"{goal:g}×", reached)


def _phases_line(samples: Samples) -> Line:
    parts = [common.human(median(samples[p]), "s") for p in ("collect", "combine", "distribute")]
    return Line("  collect + combine + distribute", [" + ".join(parts), "", ""])


def _memory_line(samples: Samples) -> Line:
    largest = max(samples["server_memory"])
    cells = ["", "", f"{largest:.2f}×"]
    goal = f"< {MEMORY_FACTOR:g}×"
    return Line("  server's memory over the weights", cells, goal, largest < MEMORY_FACTOR)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one repetition, few syncs")
    parser.add_argument("--no-ray", action="store_true", help="without Ray")
    parser.add_argument("--json", type=Path, default=common.RESULTS / "ps.json", metavar="PATH")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    arguments = parser.parse_args()

    systems = ["miniray", "gloo"] if arguments.no_ray else ["miniray", "gloo", "ray"]
    repetitions, rounds = (1, 5) if arguments.quick else (2, 12)
    started = common.stamp()

    def say(text: str) -> None:
        print(text, flush=True)

    found = measure(systems, repetitions, rounds, MEGABYTES, say)
    lines = summarise(found)
    columns = ["miniray", "other", "ratio"]
    if arguments.markdown:
        print(common.markdown_table(columns, lines))
    else:
        common.print_table("Sync of 100 MB of weights", columns, lines)
    record = {
        "started": started,
        "finished": common.stamp(),
        "machine": common.machine(),
        "versions": common.versions("miniray", "torch", "ray", "numpy"),
        "repetitions": repetitions,
        "rounds": rounds,
        "samples": found,
        "table": [vars(line) for line in lines],
    }
    common.write_json(arguments.json, record)
    print(f"all samples: {arguments.json}")


if __name__ == "__main__":
    main()
