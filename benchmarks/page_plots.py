"""Plots of the benchmark page as SVG text: the same JSON gives the same bytes.

Colours are of middle brightness, so that a picture without a background is readable on a light and
on a dark page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from common import median
from page_figures import (
    Record,
    interval_ends,
    memory_bytes,
    ratio_of,
    size,
    times,
    worker_counts,
)

OURS, THEIRS, TEXT, LINE = "#1f9e8f", "#8c96a8", "#7b8594", "#9aa3b0"
WIDTH, LABELS, BAR, GAP = 760, 270, 20, 10
FONT = "font-family='system-ui, -apple-system, Segoe UI, sans-serif'"


@dataclass(frozen=True)
class Bar:
    label: str
    value: float
    text: str
    ours: bool = True


def bars(title: str, rows: Sequence[Bar], unit: float | None = None) -> str:
    """Horizontal bars; with ``unit`` the scale is logarithmic, and a line marks that value."""
    top, right = 40, 24 + 8 * max(len(row.text) for row in rows)
    height = top + len(rows) * (BAR + GAP) + 10
    space = WIDTH - LABELS - right
    values = [row.value for row in rows]
    if unit is None:
        low, high = 0.0, max(values)
    else:
        low, high = math.log(min(*values, unit) / 1.6), math.log(max(*values, unit))

    def x(value: float) -> float:
        place = value if unit is None else math.log(value)
        return LABELS + space * (place - low) / (high - low)

    parts = [_text(0, 16, title, size=15, weight="600")]
    for number, row in enumerate(rows):
        y = top + number * (BAR + GAP)
        start, end = (LABELS, x(row.value)) if unit is None else sorted((x(unit), x(row.value)))
        parts.append(_text(LABELS - 12, y + 15, row.label, anchor="end"))
        parts.append(
            f"<rect x='{start:.1f}' y='{y}' width='{max(end - start, 2):.1f}' height='{BAR}' "
            f"rx='3' fill='{OURS if row.ours else THEIRS}'/>"
        )
        parts.append(_text(end + 8, y + 15, row.text, weight="600"))
    if unit is not None:
        at = x(unit)
        parts.append(
            f"<line x1='{at:.1f}' x2='{at:.1f}' y1='{top - 8}' y2='{height - 8}' "
            f"stroke='{LINE}' stroke-dasharray='4 3'/>"
        )
    return _svg(height, parts)


def curves(title: str, across: str, series: dict[str, list[tuple[float, float]]]) -> str:
    """Lines over numbers of workers, both scales logarithmic; the dashed line is the ideal."""
    left, top, bottom, right, height = 60, 40, 50, 190, 340
    points = [point for line in series.values() for point in line]
    largest = max(max(point) for point in points)

    def at(value: float, start: float, end: float) -> float:
        return start + (end - start) * math.log(max(value, 1)) / math.log(largest)

    def place(point: tuple[float, float]) -> tuple[float, float]:
        return at(point[0], left, WIDTH - right), at(point[1], height - bottom, top)

    parts = [_text(0, 16, title, size=15, weight="600")]
    for tick in sorted({point[0] for point in points}):
        x, y = place((tick, tick))
        parts.append(_text(x, height - bottom + 20, f"{tick:g}", anchor="middle"))
        parts.append(_text(left - 12, y + 4, f"{tick:g}×", anchor="end"))
    parts.append(_text((left + WIDTH - right) / 2, height - 8, across, anchor="middle"))
    ideal = place((largest, largest))
    start = place((1, 1))
    parts.append(
        f"<line x1='{start[0]:.1f}' y1='{start[1]:.1f}' x2='{ideal[0]:.1f}' y2='{ideal[1]:.1f}' "
        f"stroke='{LINE}' stroke-dasharray='4 3'/>"
    )
    parts.append(_text(ideal[0] + 10, ideal[1] + 4, "ideal"))
    for number, (name, line) in enumerate(series.items()):
        colour = OURS if number == 0 else THEIRS
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, line))
        parts.append(
            f"<polyline points='{joined}' fill='none' stroke='{colour}' stroke-width='2.5'/>"
        )
        for x, y in map(place, line):
            parts.append(f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3.5' fill='{colour}'/>")
        x, y = place(line[-1])
        parts.append(_text(x + 10, y + 4, f"{name}, {line[-1][1]:.2f}×", weight="600"))
    return _svg(height, parts)


def _text(
    x: float, y: float, words: str, *, anchor: str = "start", size: int = 13, weight: str = "400"
) -> str:
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}' font-size='{size}' "
        f"font-weight='{weight}' fill='{TEXT}'>{escape(words)}</text>"
    )


def _svg(height: float, parts: Sequence[str]) -> str:
    head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height:g}' {FONT}>"
    return "\n".join([head, *parts, "</svg>"]) + "\n"


# -- one function a benchmark ----------------------------------------------------------------------


def engine(record: Record) -> str | None:
    from engine import ROWS

    samples = record["samples"]
    if "ray" not in samples:
        return None
    found = []
    for row in ROWS.values():
        if row.needs[0] in samples["miniray"]:
            mine, theirs = (median(samples[api][row.needs[0]]) for api in ("miniray", "ray"))
            ratio = ratio_of(mine, theirs, row.unit.endswith("/s"))
            found.append(Bar(row.title.partition(" (")[0], ratio, times(ratio), ratio >= 1))
    found.sort(key=lambda bar: -bar.value)
    return bars("miniray against Ray: how many times better (logarithmic)", found, unit=1)


def train(record: Record) -> str:
    from train import PEERS

    walls = {name: median(of["wall"]) for name, of in record["samples"].items()}
    found = [
        Bar(PEERS[name].title, wall, f"{wall:.1f} s", PEERS[name].package == "miniray")
        for name, wall in sorted(walls.items(), key=lambda pair: pair[1])
    ]
    return bars("Wall time of the whole command, 3 epochs on 2 workers (less is better)", found)


def scaling(record: Record) -> str:
    series = {}
    for system, counts in worker_counts(record).items():
        rates = [median(record["samples"][f"{system}-{n}"]["rate_whole"]) for n in counts]
        title = {"torchrun": "torchrun DDP"}.get(system, system)
        series[title] = [(n, rate / rates[0]) for n, rate in zip(counts, rates, strict=True)]
    return curves("Speed-up over one worker", "workers", series)


def sync_interval(record: Record) -> str:
    ends = interval_ends(record)
    found = [
        Bar(title, end["loss"], f"{end['loss']:.3f}, {end['bytes'] / 1e6:,.0f} MB", "=" in title)
        for title, end in ends.items()
    ]
    return bars("Held-out loss, and bytes moved (less is better)", found)


def ps(record: Record) -> str:
    found = []
    for case, samples in record["samples"].items():
        mine = median(samples["miniray"]["sync"])
        for other, title in (("gloo", "gloo"), ("ray", "Ray server")):
            if other in samples:
                ratio = median(samples[other]["sync"]) / mine
                found.append(Bar(f"{case}: {title}", ratio, times(ratio), ratio >= 1))
    return bars("A sync of 100 MB a worker: how many times faster than the other", found, unit=1)


def data(record: Record) -> str:
    from data import PEERS

    rates = {name: median(of["raw"]) for name, of in record["samples"].items() if of.get("raw")}
    found = [
        Bar(PEERS[name].title, rate, f"{rate:,.0f}", name == "miniray_data")
        for name, rate in sorted(rates.items(), key=lambda pair: -pair[1])
    ]
    return bars("Rows a second, encoded, 4 ranks (more is better)", found)


def data_first(record: Record) -> str:
    from data import PEERS

    waits = {
        name: median(of["first_batch"])
        for name, of in record["samples"].items()
        if of.get("first_batch")
    }
    found = [
        Bar(PEERS[name].title, wait, f"{wait:.2f} s", name == "miniray_data")
        for name, wait in sorted(waits.items(), key=lambda pair: pair[1])
    ]
    return bars("Time to the first batch (less is better)", found)


def memory_table(record: Record) -> str:
    found = memory_bytes(record)
    rows = [
        ("one driver feeds all", "driver", False),
        ("sharded, decoded at once, a node", "sharded_node", False),
        ("miniray, a node", "node", True),
    ]
    drawn = [Bar(label, found[key], size(found[key]), ours) for label, key, ours in rows]
    return bars("Memory of one machine (logarithmic, less is better)", drawn, unit=1e8)


def bubble(record: Record) -> str:
    found = []
    for name, of in record["samples"]["bubble"].items():
        measured, formula = median(of["bubble"]), of["formula"][0]
        found.append(Bar(name, measured, f"{100 * measured:.1f} %"))
        found.append(Bar("by the formula", formula, f"{100 * formula:.1f} %", ours=False))
    return bars("The bubble, measured and by the formula (less is better)", found)


def rl(record: Record) -> str:
    from rl import SYSTEMS

    found = [
        Bar(SYSTEMS[n].title, median(of["rate"]), f"{median(of['rate']):,.0f}", "trl" not in n)
        for n, of in record["training"].items()
    ]
    return bars("Sampled tokens a second, updates included (more is better)", found)


#: Plots by the name of their file in docs/images, with the results each is made from.
PLOTS: dict[str, tuple[str, Callable[[Record], str | None]]] = {
    "bench-engine": ("engine", engine),
    "bench-train": ("train", train),
    "bench-scaling": ("scaling", scaling),
    "bench-sync-interval": ("sync_interval", sync_interval),
    "bench-ps": ("ps", ps),
    "bench-data": ("data", data),
    "bench-data-first": ("data", data_first),
    "bench-memory": ("memory_table", memory_table),
    "bench-bubble": ("bubble", bubble),
    "bench-rl": ("rl", rl),
}
