"""The run's numbers as line charts, in SVG inside the page, and its epochs as a table.

Colours are CSS's, so light, dark and paper are one drawing. Large inputs become small pictures:
lines are thinned to their extremes, and what a pointer can ask for is a hundred columns with a
title each. Values that are not finite are crosses at the foot.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

from miniray.report.html import Markup, escape, figure, section, short, table, tag
from miniray.report.run import Run
from miniray.report.series import Curve, Points, by_rank, flat, spread, thinned

_MOST_CHARTS = 24
_MOST_ROWS = 200
_MOST_KEYS = 8
WIDTH, HEIGHT = 400, 216
LEFT, RIGHT, TOP, BOTTOM = 50, 10, 10, 34
_COLUMNS = 100  #: places a pointer can ask about
_MARKS = 60  #: crosses for values that are not finite
#: A curve that spans more than the first is drawn on a logarithmic scale, if half of it lies below
#: this share of its height: a rate that was near 0 once has a scale of its own.
_LOGARITHMIC, _LOW = 1000.0, 0.1
_COLOURS = 8
_MOST_POINTS = 3200  #: of all lines of a chart


def curves(run: Run, found: Sequence[Curve]) -> Markup:
    """A chart for each metric, with its held-out twin; then those by rank."""
    groups: dict[str, list[Curve]] = {}
    for curve in found:
        groups.setdefault(curve.group, []).append(curve)
    word = run.unit
    level = [c for members in groups.values() if all(c.level for c in members) for c in members]
    drawn = {k: members for k, members in groups.items() if not all(c.level for c in members)}
    charts = [chart(name, members, word) for name, members in list(drawn.items())[:_MOST_CHARTS]]
    left = len(drawn) - len(charts)
    note = f"{left} more metrics are in the table below." if left > 0 else ""
    charts += _ranks(run)
    same = ", ".join(f"{curve.name} {_last(curve)}" for curve in level)
    return section(
        "Curves",
        tag("div", *charts, cls="charts") if charts else "",
        tag("p", f"The same all the time: {same}", cls="soft") if same else "",
        note=note,
    )


def chart(title: str, members: Sequence[Curve], x_label: str, *, from_zero: bool = False) -> Markup:
    """One chart with its legend: the last value of each line, unless there are too many."""
    legend = []
    if len(members) <= _MOST_KEYS:
        legend = [
            (colour(i, len(members)), curve.name if len(members) > 1 else "last", _last(curve))
            for i, curve in enumerate(members)
        ]
    broken = sum(len(curve.broken) for curve in members)
    shown = [title]
    if broken:
        word = "value is" if broken == 1 else "values are"
        shown.append(tag("span", f" · {broken} {word} not finite", cls="bad"))
    caption = tag("span", *shown)
    drawn = lines(members, x_label, f"{title} by {x_label}", from_zero=from_zero)
    return figure(caption, drawn, legend)


def _last(curve: Curve) -> str:
    return short(curve.points[-1][1]) if curve.points else ""


def _ranks(run: Run) -> list[Markup]:
    """Draw the loss by step from the rank records, and metrics that exist for each rank.

    Each attempt of a rank has a curve: its steps are numbered from 1.
    """
    losses = []
    for rank in run.record:
        attempts: dict[int, Points] = {}
        for step in rank.history:
            if step.loss is not None:
                attempts.setdefault(step.attempt, []).append((float(step.step), step.loss))
        for attempt, points in attempts.items():
            part = f", attempt {attempt + 1}" if len(attempts) > 1 else ""
            losses.append(Curve(f"rank {rank.rank}{part}", points))
    charts = [chart("loss by step and rank", losses, "step")] if losses else []
    word = run.unit
    return charts + [
        chart(f"{name} by rank", members, word)
        for name, members in by_rank(run.metrics, run.world_size).items()
    ]


def epochs(run: Run) -> Markup:
    """The lines of metrics.jsonl as a table; of very many, some evenly chosen."""
    if not run.metrics:
        return Markup()
    rows = [flat(record) for record in spread(run.metrics, _MOST_ROWS)]
    keys = list(dict.fromkeys(key for row in rows for key in row))
    simple = (bool, int, float)
    cells = [[v if isinstance(v := row.get(key), simple) else None for key in keys] for row in rows]
    note = ""
    if len(rows) < len(run.metrics):
        note = f"{len(rows)} of {len(run.metrics):,} lines; metrics.jsonl has them all."
    word = run.unit.capitalize() + "s"
    return section(word, table(keys, cells), note=note)


# -- drawing --------------------------------------------------------------------------------------


def colour(index: int, count: int) -> str:
    """The colour of a line: one of eight that were chosen, else evenly round the circle."""
    if count <= _COLOURS:
        return f"var(--c{index % _COLOURS})"
    return f"hsl({round(360 * index / count)} 60% 50%)"


def lines(curves: Sequence[Curve], x_label: str, label: str, *, from_zero: bool = False) -> str:
    """A chart of curves over one axis. Without a finite value it is an empty frame with crosses."""
    finite = [point for curve in curves for point in curve.finite]
    every = [x for curve in curves for x, _ in curve.points]
    across = _Linear(min(every, default=0.0), max(every, default=1.0), LEFT, WIDTH - RIGHT)
    up = _scale([y for _, y in finite], from_zero)
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">']
    parts += _grid(across, up, x_label)
    for index, curve in enumerate(curves):
        parts.append(_line(curve, colour(index, len(curves)), across, up, len(curves)))
    parts += _crosses(curves, across, x_label)
    parts += _columns(curves, across, x_label)
    return "".join([*parts, "</svg>"])


class _Linear:
    """Values to places on the paper. A range of nothing gets one around it."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        if not high > low:
            margin = abs(low) * 0.1 or 0.5
            low, high = low - margin, high + margin
        self.low, self.high, self.start, self.end = low, high, start, end
        self._unit = 1.0 if math.isfinite(high - low) else 0.5  # 1e308 - -1e308 is no number

    def __call__(self, value: float) -> float:
        low, high = self.low * self._unit, self.high * self._unit
        return self.start + (value * self._unit - low) / (high - low) * (self.end - self.start)

    def ticks(self, about: int, whole: bool = False) -> list[float]:
        return round_steps(self.low, self.high, about, whole)


class _Log(_Linear):
    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        super().__init__(math.log10(low), math.log10(high), start, end)

    def __call__(self, value: float) -> float:
        return super().__call__(math.log10(value))

    def ticks(self, about: int, whole: bool = False) -> list[float]:
        first, last = math.ceil(self.low - 1e-9), math.floor(self.high + 1e-9)
        every = max(1, math.ceil((last - first) / about))
        return [10.0**power for power in range(first, last + 1, every)]


def _scale(values: Sequence[float], from_zero: bool) -> _Linear:
    low, high = min(values, default=0.0), max(values, default=1.0)
    bottom, top = float(HEIGHT - BOTTOM), float(TOP)
    wide = low > 0 and high / low > _LOGARITHMIC and not from_zero
    if wide and sorted(values)[len(values) // 2] < _LOW * high:
        return _Log(low, high, bottom, top)
    if from_zero:
        low = min(0.0, low)
    margin = 0.05 * high - 0.05 * low
    low = low if from_zero else max(low - margin, -sys.float_info.max)
    return _Linear(low, min(high + margin, sys.float_info.max), bottom, top)


def _grid(across: _Linear, up: _Linear, x_label: str) -> list[str]:
    foot = HEIGHT - BOTTOM
    parts = []
    ticks = up.ticks(4)
    for value, label in zip(ticks, _labels(ticks, up), strict=True):
        y = f"{up(value):.1f}"
        parts.append(f'<path class="g" d="M{LEFT} {y}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{up(value) + 4:.1f}" class="e">{label}</text>')
    parts += [
        f'<text x="{min(across(value), WIDTH - 16):.1f}" y="{foot + 15}" class="m">'
        f"{short(value)}</text>"
        for value in across.ticks(6, whole=True)
    ]
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<path class="a" d="M{LEFT} {foot}H{WIDTH - RIGHT}"/>')
    parts.append(f'<text x="{middle:.0f}" y="{HEIGHT - 4}" class="m">{escape(x_label)}</text>')
    return parts


def _labels(ticks: Sequence[float], up: _Linear) -> list[str]:
    """With as many digits as place them: 3.1415 and 3.1418 would both be 3.142."""
    labels, near = [short(value) for value in ticks], 0.02 * (up.high - up.low)
    for digits in range(5, 10):
        if all(_says(label, value, near) for label, value in zip(labels, ticks, strict=True)):
            break
        labels = [f"{value:.{digits}g}" for value in ticks]
    return labels


def _says(label: str, value: float, near: float) -> bool:
    """Whether the label is the value; one with a unit is taken to be."""
    try:
        return abs(float(label) - value) <= near
    except ValueError:
        return True


def _line(curve: Curve, stroke: str, across: _Linear, up: _Linear, count: int) -> str:
    pieces = []
    for piece in _pieces(curve.points):
        drawn = thinned(piece, max(40, _MOST_POINTS // max(count, _COLOURS)))
        points = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in drawn)
        if len(drawn) == 1:
            x, y = points.split(",")
            pieces.append(f'<circle cx="{x}" cy="{y}" r="2.5" style="fill:{stroke}"/>')
        else:
            thin = ' class="l t"' if count > _COLOURS else ' class="l"'
            pieces.append(f'<polyline{thin} style="stroke:{stroke}" points="{points}"/>')
    return "".join(pieces)


def _pieces(points: Points) -> list[Points]:
    """A curve cut where a value is not finite: a line across the gap would be an invention."""
    pieces: list[Points] = [[]]
    for x, y in points:
        if math.isfinite(y):
            pieces[-1].append((x, y))
        elif pieces[-1]:
            pieces.append([])
    return [piece for piece in pieces if piece]


def _crosses(curves: Sequence[Curve], across: _Linear, x_label: str) -> list[str]:
    broken = [(x, y, curve.name) for curve in curves for x, y in curve.broken]
    parts = []
    for x, y, name in spread(broken, _MARKS):
        at, foot = across(x), HEIGHT - BOTTOM - 6
        title = escape(f"{name}: {y} at {x_label} {short(x)}")
        arms = f"M{at - 4:.1f} {foot - 4}l8 8m0 -8l-8 8"
        parts.append(f'<path class="x" d="{arms}"><title>{title}</title></path>')
    return parts


def _columns(curves: Sequence[Curve], across: _Linear, x_label: str) -> list[str]:
    """What the pointer finds: a stripe of the chart, with the values there as its title."""
    known = [dict(curve.points) for curve in curves]
    places = spread(sorted({x for values in known for x in values}), _COLUMNS)
    width = min(40.0, (WIDTH - LEFT - RIGHT) / max(1, len(places)))
    parts = []
    for x in places:
        said = [
            f"{curve.name} {short(values[x])}"
            for curve, values in zip(curves, known, strict=True)
            if x in values
        ]
        more = [f"… and {len(said) - 12} more"] if len(said) > 12 else []
        title = escape("\n".join([f"{x_label} {short(x)}", *said[:12], *more]))
        parts.append(
            f'<path class="h" stroke-width="{width:.1f}" d="M{across(x):.1f} {TOP}V'
            f'{HEIGHT - BOTTOM}"><title>{title}</title></path>'
        )
    return parts


def round_steps(low: float, high: float, about: int, whole: bool = False) -> list[float]:
    """Some ``about`` multiples of 1, 2 or 5 × a power of ten between ``low`` and ``high``."""
    span = high - low
    if not 1e-300 < span < math.inf:
        return [low] if math.isfinite(low) else []
    rough = span / about * (1 - 1e-9)  # 0.02 must do where 0.020000000000000018 is wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    if whole:
        step = max(1.0, step)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]
