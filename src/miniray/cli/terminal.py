"""Print text and tables of runs in a format that fits the terminal.

Colors are used only if the output is a terminal and ``NO_COLOR`` isn't set. Output that is written
to a pipe isn't truncated.
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
#: Columns to drop on a narrow terminal, in this order. The name of the run is never dropped, so
#: that the user can copy it.
_DROPPABLE = ["ranks", "took", "started", "epochs"]
_ROOM = 40  # terminal columns that are needed for the metrics
_STATES = {"finished": "green", "running": "cyan", "failed": "red", "died": "red"}


def supports_color(stream: TextIO) -> bool:
    """Return True if the stream is a terminal that supports colors and colors aren't disabled."""
    dumb = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return stream.isatty() and not dumb


def paint(text: str, color: str | None, stream: TextIO | None = None) -> str:
    """Return ``text`` with escape sequences for the color if ``stream`` supports colors.

    The default stream is the standard output.
    """
    wanted = color is not None and supports_color(stream or sys.stdout)
    return click.style(text, fg=color) if wanted else text


def columns() -> float:
    """Return the number of columns of the terminal, or infinity if the output isn't a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else math.inf


def console() -> Console:
    """Return a rich console that wraps long lines only if the output is a terminal."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else 100_000)


def width(text: str) -> int:
    """Return the number of terminal columns that the text needs.

    Wide characters, such as Chinese characters, need two columns.
    """
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def printable(text: str) -> str:
    """Replace control characters and other characters that can't be printed."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def truncate_line(line: str, used: int = 0) -> str:
    """Truncate the line to the width of the terminal, of which ``used`` columns are occupied.

    If the output isn't a terminal, return the line unchanged.
    """
    room = columns() - used
    if width(line) <= room:
        return line
    while line and width(line) >= room:
        line = line[:-1]
    return f"{line}…"


# -- runs -----------------------------------------------------------------------------------------


def show(runs: list[Run]) -> None:
    """Print one line per run.

    If the terminal is too narrow for the metrics, print them on a second line.
    """
    rows = [dict(zip(_HEAD, _HEAD, strict=True)), *map(_row, runs)]
    longest = max(width(row["metrics"]) for row in rows)
    widths = _fitting(rows, _DROPPABLE, longest) or _fitting(rows, _DROPPABLE[:2], _ROOM)
    if widths:
        for row in rows:
            click.echo(_line(row, widths, truncate_line(row["metrics"], _used(widths))))
        return
    widths = _fitting(rows, _DROPPABLE, -2) or dict.fromkeys(_HEAD[:2], 0)
    click.echo(_line(rows[0], widths))
    for row in rows[1:]:
        rest = [f"{k} {row[k]}" for k in reversed(_DROPPABLE) if k not in widths and row[k]]
        below = truncate_line("  ".join(filter(None, [row["metrics"], *rest])), 2)
        click.echo(f"{_line(row, widths)}\n  {below}".rstrip())


def _fitting(rows: list[dict[str, str]], spare: list[str], room: float) -> dict[str, int]:
    """Return the width of each column of the table.

    Drop the columns in ``spare``, one after the other, until at least ``room`` terminal columns
    remain for the metrics. Return {} if there still isn't enough space.
    """
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
    """Return the number of completed epochs, as ``2 of 3``. Metrics number epochs from 0."""
    last, total = run.last_metrics().get("epoch"), run.config.get("epochs")
    if not isinstance(last, int):
        return ""
    return f"{last + 1} of {total}" if type(total) is int and total > last else str(last + 1)


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
    """Format a number for a table. Return "" if the value isn't a number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return ""
    return str(value) if isinstance(value, int) else f"{value:.4g}"


def compare(runs: list[Run], scores: list[dict[str, Any]], settings: list[dict[str, Any]]) -> None:
    """Print a table with one column per run.

    The rows contain the last and the best value of each metric, and the settings that differ
    between runs. ``scores`` has the values of each run; see ``miniray.cli.runs``.
    """
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
    for key in _keys([score["last"] for score in scores]):
        row(key, [_plain(score["last"].get(key)) for score in scores])
    for key in _keys([score["best"] for score in scores]):
        row(f"best {key}", [_best(score, key) for score in scores], "bold")
    for key in dict.fromkeys(key for each in settings for key in each):
        values = [str(each.get(key, "–")) for each in settings]
        if len(set(values)) > 1:
            row(key, values, "dim")
    console().print(table)


def _best(score: dict[str, Any], key: str) -> str:
    """Return the best value of a metric and its place, such as ``0.5 (step 40)``."""
    value = _plain(score["best"].get(key))
    return f"{value} ({score['axis']} {score['best_at'][key]:,})" if value else ""


def _keys(records: list[dict[str, Any]]) -> list[str]:
    """Return the names of all numeric fields in the order in which they first appear."""
    items = [item for record in records for item in record.items()]
    return list(dict.fromkeys(key for key, value in items if _plain(value)))
