"""Text on a terminal: how wide, in which colours, and runs as tables.

Colours are for terminals only, and none where ``NO_COLOR`` is set. In a pipe everything is whole.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
import unicodedata
from typing import TYPE_CHECKING, Any, TextIO

import click

if TYPE_CHECKING:
    from rich.console import Console

    from miniray.report import Run

_HEAD = ["run", "state", "started", "took", "ranks", "epochs", "metrics"]
#: Which columns give way where a terminal is narrow, the first first. Never the run's own: a name
#: must be one that can be copied.
_GIVE_WAY = ["ranks", "took", "started", "epochs"]
_ROOM = 40  # columns that metrics want, if they fill them
_STATES = {"finished": "green", "running": "cyan", "failed": "red", "died": "red"}


def coloured(stream: TextIO) -> bool:
    """Whether it is a terminal that may show colours."""
    dumb = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return stream.isatty() and not dumb


def paint(text: str, colour: str | None, stream: TextIO | None = None) -> str:
    """``text`` in a colour where ``stream`` (standard output) is a terminal that may show one."""
    wanted = colour is not None and coloured(stream or sys.stdout)
    return click.style(text, fg=colour) if wanted else text


def columns() -> float:
    """How wide a line may be: the terminal's width, and any in a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else math.inf


def console() -> Console:
    """rich's, which breaks lines between words on a terminal, and none in a pipe."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else 100_000)


def width(text: str) -> int:
    """Columns it takes: a Chinese character has two."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def printable(text: str) -> str:
    """Without what would move the cursor, colour the rest, or cannot be written at all."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def fitted(line: str, used: int = 0) -> str:
    """The line cut to what the terminal has left after ``used`` columns; whole in a pipe."""
    room = columns() - used
    if width(line) <= room:
        return line
    while line and width(line) >= room:
        line = line[:-1]
    return f"{line}…"


# -- runs -----------------------------------------------------------------------------------------


def show(runs: list[Run]) -> None:
    """A line a run. Where that leaves metrics too little room, a second one has them."""
    rows = [dict(zip(_HEAD, _HEAD, strict=True)), *map(_row, runs)]
    longest = max(width(row["metrics"]) for row in rows)
    widths = _fitting(rows, _GIVE_WAY, longest) or _fitting(rows, _GIVE_WAY[:2], _ROOM)
    if widths:
        for row in rows:
            click.echo(_line(row, widths, fitted(row["metrics"], _used(widths))))
        return
    widths = _fitting(rows, _GIVE_WAY, -2) or dict.fromkeys(_HEAD[:2], 0)
    click.echo(_line(rows[0], widths))
    for row in rows[1:]:
        rest = [f"{k} {row[k]}" for k in reversed(_GIVE_WAY) if k not in widths and row[k]]
        below = fitted("  ".join(filter(None, [row["metrics"], *rest])), 2)
        click.echo(f"{_line(row, widths)}\n  {below}".rstrip())


def _fitting(rows: list[dict[str, str]], spare: list[str], room: float) -> dict[str, int]:
    """Widths by column, without those of ``spare`` that must go; {} where ``room`` is not left."""
    widths = {name: max(width(row[name]) for row in rows) for name in _HEAD[:-1]}
    for name in spare:
        if _used(widths) + room > columns():
            del widths[name]
    return widths if _used(widths) + room <= columns() else {}


def _line(row: dict[str, str], widths: dict[str, int], metrics: str = "") -> str:
    cells = {k: row[k] + " " * (most - width(row[k])) for k, most in widths.items()}
    cells["state"] = paint(cells["state"], _STATES.get(row["state"]))
    return "  ".join([*cells.values(), metrics]).rstrip()


def _used(widths: dict[str, int]) -> int:
    return sum(widths.values()) + 2 * len(widths)


def _row(run: Run) -> dict[str, str]:
    return {
        "run": printable(run.name),
        "state": run.state,
        "started": _ago(run.started),
        "took": _took(run.seconds),
        "ranks": str(run.world_size or ""),
        "epochs": _epochs(run),
        "metrics": printable(_metrics(run.last_metrics())),
    }


def _epochs(run: Run) -> str:
    """How many are done; they are counted from 0."""
    last = run.last_metrics().get("epoch")
    return str(last + 1) if isinstance(last, int) else ""


def _ago(moment: float | None) -> str:
    if moment is None:
        return ""
    age = time.time() - moment
    for size, word in ((86400, "d"), (3600, "h"), (60, "min")):
        if age >= size:
            return f"{age // size:.0f} {word} ago"
    return "now" if age < 5 else f"{max(0.0, age):.0f} s ago"


def _took(value: float | None) -> str:
    from miniray.doctor.findings import seconds

    return "" if value is None else seconds(value)


def _metrics(last: dict[str, Any]) -> str:
    from miniray.report.series import NOT_A_SCORE

    shown = [f"{k} {_plain(v)}" for k, v in last.items() if k not in NOT_A_SCORE and _plain(v)]
    return "  ".join(shown[:4])


def _plain(value: Any) -> str:
    """A number for a table; "" for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return ""
    return str(value) if isinstance(value, int) else f"{value:.4g}"


def compare(runs: list[Run], bests: list[dict[str, Any]], settings: list[dict[str, Any]]) -> None:
    """A column a run: last and best value of every metric, and the settings that differ."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("", overflow="fold")
    for run in runs:
        table.add_column(Text(run.name), justify="right", overflow="fold")

    def row(name: str, cells: list[str], style: str = "") -> None:
        table.add_row(Text(name), *(Text(cell or "–") for cell in cells), style=style)

    row("state", [run.state for run in runs])
    row("took", [_took(run.seconds) for run in runs])
    row("ranks", [str(run.world_size or "") for run in runs])
    row("epochs", [_epochs(run) for run in runs])
    lasts = [run.last_metrics() for run in runs]
    for key in _keys(lasts):
        if key != "epoch":
            row(key, [_plain(last.get(key)) for last in lasts])
    for key in _keys(bests):
        row(f"best {key}", [_plain(best.get(key)) for best in bests], "bold")
    for key in dict.fromkeys(key for each in settings for key in each):
        values = [str(each.get(key, "–")) for each in settings]
        if len(set(values)) > 1:
            row(key, values, "dim")
    console().print(table)


def _keys(records: list[dict[str, Any]]) -> list[str]:
    """Numbers of any of the records, in order of appearance."""
    items = [item for record in records for item in record.items()]
    return list(dict.fromkeys(key for key, value in items if _plain(value)))
