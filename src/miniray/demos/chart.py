"""A self-contained HTML page with one SVG chart: no script, no network, light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

# The drawing area inside the SVG: room for the labels on the left and below.
_WIDTH, _HEIGHT = 760, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 16, 14, 44

_STYLE = """
:root { color-scheme: light dark; --ink: #1d232b; --soft: #5d6875; --line: #d7dde4;
        --paper: #ffffff; --card: #f6f8fa; --main: #1f6feb; --band: #1f6feb2e; --truth: #c4432b; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e8ed; --soft: #98a4b1; --line: #333c46; --paper: #12161b; --card: #1a2027;
          --main: #6cb0ff; --band: #6cb0ff33; --truth: #ff8e75; } }
* { box-sizing: border-box }
body { margin: 0 auto; padding: 2rem 1rem 3rem; max-width: 54rem; background: var(--paper);
       color: var(--ink); font: 16px/1.5 system-ui, sans-serif }
h1 { margin: 0; font-size: 1.5rem } p.headline { margin: .3rem 0 1.5rem; font-size: 1.1rem }
figure { margin: 0 0 1.5rem; padding: 1rem; background: var(--card); border-radius: 10px }
figcaption { margin-top: .5rem; color: var(--soft); font-size: .9rem }
svg { display: block; width: 100%; height: auto } svg text { fill: var(--soft); font-size: 12px }
.grid { stroke: var(--line) } .band { fill: var(--band) }
.estimate { fill: none; stroke: var(--main); stroke-width: 2; stroke-linejoin: round }
.truth { stroke: var(--truth); stroke-width: 1.5; stroke-dasharray: 6 5 }
.scroll { overflow-x: auto } table { width: 100%; border-collapse: collapse }
th, td { padding: .4rem .6rem; text-align: right; border-bottom: 1px solid var(--line);
         font-variant-numeric: tabular-nums; white-space: nowrap }
th { color: var(--soft); font-weight: 600 } th:first-child, td:first-child { text-align: left }
tbody tr:last-child { font-weight: 700 }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(9rem, 1fr)); gap: .8rem;
     margin: 1.5rem 0 0 } dt { color: var(--soft); font-size: .85rem } dd { margin: 0 }
@media print { body { padding: 0 } figure { break-inside: avoid } }
"""


def page(
    title: str,
    headline: str,
    figure: str,
    caption: str,
    rows: Sequence[Sequence[str]],
    facts: dict[str, str],
) -> str:
    """The whole document. ``figure`` is markup and goes in as it is; all else is text."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in rows[0])
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>\n" for row in rows[1:]
    )
    details = "".join(
        f"<div><dt>{escape(key)}</dt><dd>{escape(value)}</dd></div>" for key, value in facts.items()
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
<p class="headline">{escape(headline)}</p>
<figure>
{figure}
<figcaption>{escape(caption)}</figcaption>
</figure>
<div class="scroll"><table>
<thead><tr>{head}</tr></thead>
<tbody>
{body}</tbody>
</table></div>
<dl>{details}</dl>
</body>
</html>
"""


def convergence(points: Sequence[tuple[int, float, float]], truth: float) -> str:
    """An SVG of an estimate with its error band by sample size, and the true value.

    ``points`` are (samples, estimate, standard error), in rising order of samples.
    """
    logs = [math.log10(n) for n, _, _ in points]
    x_low, x_high = logs[0], max(logs[-1], logs[0] + 0.1)
    low = min(truth, *(value - 2 * error for _, value, error in points))
    high = max(truth, *(value + 2 * error for _, value, error in points))
    margin = 0.05 * (high - low) or 0.05
    low, high = low - margin, high + margin

    def x(log: float) -> float:
        return _LEFT + (log - x_low) / (x_high - x_low) * (_WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return _TOP + (high - value) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    def path(values: Sequence[tuple[float, float]]) -> str:
        return " ".join(f"{x(log):.1f},{y(value):.1f}" for log, value in values)

    upper = [(log, v + 2 * e) for log, (_, v, e) in zip(logs, points, strict=True)]
    lower = [(log, v - 2 * e) for log, (_, v, e) in zip(logs, points, strict=True)]
    middle = [(log, v) for log, (_, v, _) in zip(logs, points, strict=True)]
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="estimate by sample size">'
    ]
    bottom = _HEIGHT - _BOTTOM
    parts += [
        f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" '
        f'y1="{y(value):.1f}" y2="{y(value):.1f}"/>'
        f'<text x="{_LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.6g}</text>'
        for value in _round_steps(low, high, 5)
    ]
    parts += [
        f'<line class="grid" x1="{x(log):.1f}" x2="{x(log):.1f}" y1="{_TOP}" y2="{bottom}"/>'
        f'<text x="{x(log):.1f}" y="{bottom + 18}" text-anchor="middle">{_short(log)}</text>'
        for log in _decades(x_low, x_high)
    ]
    parts += [
        f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 6}" text-anchor="middle">'
        "points drawn</text>",
        f'<polygon class="band" points="{path(upper)} {path(lower[::-1])}"/>',
        f'<line class="truth" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" '
        f'y1="{y(truth):.1f}" y2="{y(truth):.1f}"/>',
        f'<polyline class="estimate" points="{path(middle)}"/>',
        "</svg>",
    ]
    return "\n".join(parts)


def _round_steps(low: float, high: float, about: int) -> list[float]:
    """Some ``about`` multiples of 1, 2 or 5 × a power of ten between ``low`` and ``high``."""
    rough = (high - low) / about * (1 - 1e-9)  # 0.02 must do where 0.020000000000000018 is wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def _decades(low: float, high: float) -> list[float]:
    """Logarithms to mark: whole powers of ten, or both ends where there are fewer than two."""
    whole = [float(i) for i in range(math.ceil(low - 1e-9), math.floor(high + 1e-9) + 1)]
    return whole if len(whole) > 1 else [low, high]


def _short(log: float) -> str:
    value = 10**log
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size * 0.9999:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"
