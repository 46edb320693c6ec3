"""Draw metrics as SVG line charts, and list the values in a table.

The colors are CSS variables, so the same chart can be shown in light mode, in dark mode and in
print. To keep the page small, each chart draws a limited number of points and has tooltips for at
most 100 x values. A value that isn't finite is drawn as a cross at the bottom of the chart.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

from miniray.doctor.findings import plural
from miniray.report.html import Markup, escape, figure, format_number, section, table, tag
from miniray.report.run import Run
from miniray.report.series import (
    Curve,
    Points,
    extract_rank_curves,
    flatten,
    sample_evenly,
    thin_points,
)

_MOST_CHARTS = 24
_MOST_ROWS = 200
_MOST_KEYS = 8
WIDTH, HEIGHT = 400, 216
LEFT, RIGHT, TOP, BOTTOM = 64, 10, 10, 34
_TOOLTIPS = 100  #: maximum number of x values that have a tooltip
_MARKS = 60  #: maximum number of crosses for values that aren't finite
#: The scale of a chart is logarithmic if two conditions hold: the highest value is more than
#: ``_LOGARITHMIC`` times the lowest, and the median is less than ``_LOW`` times the highest value.
#: Because of the second condition, an accuracy that starts near 0 is drawn on a linear scale.
_LOGARITHMIC, _LOW = 1000.0, 0.1
_COLORS = 8
_MOST_TITLE = 30  #: maximum number of characters in the title of the y axis
_MOST_POINTS = 3200  #: maximum number of points in all curves of a chart


def render_curves(run: Run, found: Sequence[Curve]) -> Markup:
    """Return the section that contains a chart for each metric and the charts by rank.

    If a metric was also computed on held-out data, both curves are drawn in the same chart.
    """
    groups: dict[str, list[Curve]] = {}
    for curve in found:
        groups.setdefault(curve.group, []).append(curve)
    level = [g for g in groups.values() if all(c.is_constant for c in g)]
    single = [g for g in groups.values() if all(c.is_single for c in g)]
    drawn = {name: g for name, g in groups.items() if g not in level and g not in single}
    charts = [
        render_chart(name, members, run.axis)
        for name, members in list(drawn.items())[:_MOST_CHARTS]
    ]
    left = len(drawn) - len(charts)
    note = f"The table below contains {left} more metrics." if left > 0 else ""
    charts += _render_rank_charts(run)
    same = ", ".join(f"{c.name} {_format_last(c)}" for members in level for c in members)
    once = ", ".join(
        f"{c.name} {_format_last(c)} ({run.axis} {format_number(c.points[0][0])})"
        for members in single
        for c in members
    )
    return section(
        "curves",
        "Curves",
        tag("div", *charts, cls="charts") if charts else "",
        tag("p", f"Constant: {same}", cls="soft") if same else "",
        tag("p", f"Recorded once: {once}", cls="soft") if once else "",
        note=note,
    )


def render_chart(
    title: str,
    members: Sequence[Curve],
    x_label: str,
    *,
    y_label: str | None = None,
    from_zero: bool = False,
) -> Markup:
    """Return a chart with its legend.

    The legend shows the last value of each curve. If the chart has too many curves, the legend is
    omitted.
    """
    legend = []
    if len(members) <= _MOST_KEYS:
        legend = [
            (
                color(i, len(members)),
                curve.name if len(members) > 1 else "last value",
                _format_last(curve),
            )
            for i, curve in enumerate(members)
        ]
    broken = sum(len(curve.broken) for curve in members)
    shown = [title]
    if broken:
        shown.append(tag("span", f" · {plural(broken, 'non-finite value')}", cls="bad"))
    caption = tag("span", *shown)
    drawn = render_svg(members, x_label, y_label or title, from_zero=from_zero)
    return figure(caption, drawn, legend)


def _format_last(curve: Curve) -> str:
    return format_number(curve.points[-1][1]) if curve.points else ""


def _render_rank_charts(run: Run) -> list[Markup]:
    """Draw the losses from the rank records and the metrics that were recorded for each rank.

    The curve of a rank continues over the attempts of a trainer. Other scripts number the steps of
    each attempt from 1, so every attempt is a separate curve.
    """
    losses = []
    for rank in run.record:
        attempts: dict[int, Points] = {}
        for step in rank.global_history:
            if step.loss is not None:
                attempt = 0 if rank.has_global_steps else step.attempt
                attempts.setdefault(attempt, []).append((float(step.step), step.loss))
        for attempt, points in attempts.items():
            part = f", attempt {attempt + 1}" if len(attempts) > 1 else ""
            losses.append(Curve(f"rank {rank.rank}{part}", points))
    # A step of reinforcement learning has several optimizer steps.
    word = "optimizer step" if run.has_steps_as_epochs else "step"
    charts = [render_chart("loss by rank", losses, word, y_label="loss")] if losses else []
    return charts + [
        render_chart(f"{name} by rank", members, run.axis, y_label=name)
        for name, members in extract_rank_curves(run.records, run.world_size).items()
    ]


def render_epochs(run: Run) -> Markup:
    """Return a table with the lines of ``metrics.jsonl``.

    If the file is long, the table contains an evenly spaced sample of its lines.
    """
    if not run.metrics:
        return Markup()
    rows = [flatten(record) for record in sample_evenly(run.epochs, _MOST_ROWS)]
    keys = list(dict.fromkeys(key for row in rows for key in row))
    if run.has_steps_as_epochs and "step" in keys:
        keys = [key for key in keys if key != "epoch"]  # which is the same
    simple = (bool, int, float)
    cells = [[v if isinstance(v := row.get(key), simple) else None for key in keys] for row in rows]
    note = ""
    if len(rows) < len(run.metrics):
        note = f"{len(rows)} of {len(run.metrics):,} lines. metrics.jsonl contains all of them."
    word = run.unit.capitalize() + "s"
    return section("epochs", word, table(keys, cells), note=note)


# -- drawing --------------------------------------------------------------------------------------


def color(index: int, count: int) -> str:
    """Return the color of the curve with this index in a chart of ``count`` curves.

    Charts with more than eight curves use evenly spaced hues instead of the predefined colors.
    """
    if count <= _COLORS:
        return f"var(--c{index % _COLORS})"
    return f"hsl({round(360 * index / count)} 60% 50%)"


def render_svg(
    curves: Sequence[Curve], x_label: str, y_label: str, *, from_zero: bool = False
) -> str:
    """Return an SVG chart in which all curves share the same axes.

    If none of the values are finite, the chart shows only crosses.
    """
    finite = [point for curve in curves for point in curve.finite]
    every = [x for curve in curves for x, _ in curve.points]
    across = _LinearScale(min(every, default=0.0), max(every, default=1.0), LEFT, WIDTH - RIGHT)
    up = _choose_scale([y for _, y in finite], from_zero)
    label = escape(f"{y_label} by {x_label}")
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">']
    parts += _render_grid(across, up, x_label, y_label)
    for index, curve in enumerate(curves):
        parts.append(_render_line(curve, color(index, len(curves)), across, up, len(curves)))
    parts += _render_crosses(curves, across, x_label)
    parts += _render_tooltips(curves, across, x_label)
    return "".join([*parts, "</svg>"])


class _LinearScale:
    """Map values to coordinates.

    If the lowest value equals the highest value, the range of the scale is widened.
    """

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        if not high > low:
            margin = abs(low) * 0.1 or 0.5
            low, high = low - margin, high + margin
        self.low, self.high, self.start, self.end = low, high, start, end
        self._unit = 1.0 if math.isfinite(high - low) else 0.5  # 1e308 - -1e308 overflows

    def __call__(self, value: float) -> float:
        low, high = self.low * self._unit, self.high * self._unit
        return self.start + (value * self._unit - low) / (high - low) * (self.end - self.start)

    def ticks(self, about: int, whole: bool = False) -> list[float]:
        return round_ticks(self.low, self.high, about, whole)


class _LogScale(_LinearScale):
    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        super().__init__(math.log10(low), math.log10(high), start, end)

    def __call__(self, value: float) -> float:
        return super().__call__(math.log10(value))

    def ticks(self, about: int, whole: bool = False) -> list[float]:
        first, last = math.ceil(self.low - 1e-9), math.floor(self.high + 1e-9)
        every = max(1, math.ceil((last - first) / about))
        return [10.0**power for power in range(first, last + 1, every)]


def _choose_scale(values: Sequence[float], from_zero: bool) -> _LinearScale:
    low, high = min(values, default=0.0), max(values, default=1.0)
    bottom, top = float(HEIGHT - BOTTOM), float(TOP)
    wide = low > 0 and high / low > _LOGARITHMIC and not from_zero
    if wide and sorted(values)[len(values) // 2] < _LOW * high:
        return _LogScale(low, high, bottom, top)
    if from_zero:
        low = min(0.0, low)
    margin = 0.05 * high - 0.05 * low
    low = low if from_zero else max(low - margin, -sys.float_info.max)
    return _LinearScale(low, min(high + margin, sys.float_info.max), bottom, top)


def _render_grid(across: _LinearScale, up: _LinearScale, x_label: str, y_label: str) -> list[str]:
    foot = HEIGHT - BOTTOM
    parts = []
    ticks = up.ticks(4)
    for value, label in zip(ticks, _format_ticks(ticks, up), strict=True):
        y = f"{up(value):.1f}"
        parts.append(f'<path class="g" d="M{LEFT} {y}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{up(value) + 4:.1f}" class="e">{label}</text>')
    parts += [
        f'<text x="{min(across(value), WIDTH - 16):.1f}" y="{foot + 15}" class="m">'
        f"{format_number(value)}</text>"
        for value in across.ticks(6, whole=True)
    ]
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<path class="a" d="M{LEFT} {foot}H{WIDTH - RIGHT}"/>')
    parts.append(f'<text x="{middle:.0f}" y="{HEIGHT - 4}" class="m">{escape(x_label)}</text>')
    if len(y_label) > _MOST_TITLE:
        y_label = f"{y_label[: _MOST_TITLE - 1]}…"
    turned = f'transform="translate(11 {(TOP + foot) / 2:.0f}) rotate(-90)"'
    parts.append(f'<text {turned} class="m">{escape(y_label)}</text>')
    return parts


def _format_ticks(ticks: Sequence[float], up: _LinearScale) -> list[str]:
    """Format the labels of ticks with enough digits to distinguish neighboring ticks.

    For example, the labels for 3.1415 and 3.1418 must not both be ``3.142``.
    """
    labels, near = [format_number(value) for value in ticks], 0.02 * (up.high - up.low)
    for digits in range(5, 10):
        if all(_is_precise(label, value, near) for label, value in zip(labels, ticks, strict=True)):
            break
        labels = [f"{value:.{digits}g}" for value in ticks]
    return labels


def _is_precise(label: str, value: float, near: float) -> bool:
    """Return True if the label is close enough to the value of the tick.

    Labels with a unit, such as ``1.44k``, always count as precise.
    """
    try:
        return abs(float(label) - value) <= near
    except ValueError:
        return True


def _render_line(
    curve: Curve, stroke: str, across: _LinearScale, up: _LinearScale, count: int
) -> str:
    pieces = []
    for piece in _split_at_gaps(curve.points):
        drawn = thin_points(piece, max(40, _MOST_POINTS // max(count, _COLORS)))
        points = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in drawn)
        if len(drawn) == 1:
            x, y = points.split(",")
            pieces.append(f'<circle cx="{x}" cy="{y}" r="2.5" style="fill:{stroke}"/>')
        else:
            thin = ' class="l t"' if count > _COLORS else ' class="l"'
            pieces.append(f'<polyline{thin} style="stroke:{stroke}" points="{points}"/>')
    return "".join(pieces)


def _split_at_gaps(points: Points) -> list[Points]:
    """Split a curve at values that aren't finite, so that no line is drawn across the gap."""
    pieces: list[Points] = [[]]
    for x, y in points:
        if math.isfinite(y):
            pieces[-1].append((x, y))
        elif pieces[-1]:
            pieces.append([])
    return [piece for piece in pieces if piece]


def _render_crosses(curves: Sequence[Curve], across: _LinearScale, x_label: str) -> list[str]:
    broken = [(x, y, curve.name) for curve in curves for x, y in curve.broken]
    parts = []
    for x, y, name in sample_evenly(broken, _MARKS):
        at, foot = across(x), HEIGHT - BOTTOM - 6
        title = escape(f"{name}: {y} at {x_label} {format_number(x)}")
        arms = f"M{at - 4:.1f} {foot - 4}l8 8m0 -8l-8 8"
        parts.append(f'<path class="x" d="{arms}"><title>{title}</title></path>')
    return parts


def _render_tooltips(curves: Sequence[Curve], across: _LinearScale, x_label: str) -> list[str]:
    """Return invisible vertical stripes whose tooltips show the values at their x position."""
    known = [dict(curve.points) for curve in curves]
    positions = sample_evenly(sorted({x for values in known for x in values}), _TOOLTIPS)
    width = min(40.0, (WIDTH - LEFT - RIGHT) / max(1, len(positions)))
    parts = []
    for x in positions:
        values_here = [
            f"{curve.name} {format_number(values[x])}"
            for curve, values in zip(curves, known, strict=True)
            if x in values
        ]
        more = [f"… and {len(values_here) - 12} more"] if len(values_here) > 12 else []
        title = escape("\n".join([f"{x_label} {format_number(x)}", *values_here[:12], *more]))
        parts.append(
            f'<path class="h" stroke-width="{width:.1f}" d="M{across(x):.1f} {TOP}V'
            f'{HEIGHT - BOTTOM}"><title>{title}</title></path>'
        )
    return parts


def round_ticks(low: float, high: float, about: int, whole: bool = False) -> list[float]:
    """Return the positions of the ticks in a range.

    The number of ticks is approximately ``about``. The distance between two ticks is 1, 2 or 5
    times a power of ten.
    """
    span = high - low
    if not 1e-300 < span < math.inf:
        return [low] if math.isfinite(low) else []
    rough = span / about * (1 - 1e-9)  # accept 0.02 instead of 0.020000000000000018
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    if whole:
        step = max(1.0, step)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]
