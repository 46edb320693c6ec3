"""Loss and metrics by epoch, and by rank where the run has them so."""

from __future__ import annotations

from collections.abc import Sequence

from miniray.report.html import Markup, figure, section, short, table, tag
from miniray.report.run import Run
from miniray.report.series import Curve, by_rank, flat, spread
from miniray.report.svg import colour, lines

_MOST_CHARTS = 24
_MOST_ROWS = 200
_MOST_KEYS = 8


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
    """Loss by step from the ranks' boxes, and metrics that were written for each rank."""
    losses = []
    for rank in run.record:
        steps = (*rank.spans, *rank.steps)
        points = [(float(step.step), step.loss) for step in steps if step.loss is not None]
        if points:
            losses.append(Curve(f"rank {rank.rank}", points))
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
    keys = [key for key in keys if any(_simple(row.get(key)) for row in rows)]
    cells = [[v if _simple(v := row.get(key)) else None for key in keys] for row in rows]
    note = ""
    if len(rows) < len(run.metrics):
        note = f"{len(rows)} of {len(run.metrics):,} lines; metrics.jsonl has them all."
    word = run.unit.capitalize() + "s"
    return section(word, table(keys, cells), note=note)


def _simple(value: object) -> bool:
    return isinstance(value, (bool, int, float))
