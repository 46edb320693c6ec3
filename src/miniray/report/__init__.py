"""A run as one page: ``write_report(run_dir)`` makes ``report.html`` from the files of a run.

The page needs nothing else: no network, no script, no other file. Whatever of a run is missing or
damaged (a killed driver, boxes of ``attach`` without a trainer) is left out, and said. Needs no
torch.
"""

from __future__ import annotations

import os
from pathlib import Path

import miniray
from miniray.doctor.diagnose import examine
from miniray.doctor.runfile import replace_text
from miniray.report import charts, overview, ranks, series, story
from miniray.report.html import escape, tag
from miniray.report.run import Run, find_runs, read
from miniray.runs import files

__all__ = ["Run", "find_runs", "read", "write_report"]

#: By this we know a page of ours, and never write over another one.
_MARK = '<meta name="generator" content="miniray report">'


def write_report(
    run_dir: str | os.PathLike[str], path: str | os.PathLike[str] | None = None
) -> Path:
    """Write ``report.html`` into the run's directory, or to ``path``; returns where it is.

    ``FileNotFoundError`` where there is no run, ``FileExistsError`` where a ``report.html`` is
    that this did not write. A reader of a file sees the old page or all of the new one.
    """
    run = read(run_dir)
    target = run.path / "report.html" if path is None else Path(path)
    if path is None and target.exists() and _MARK not in _beginning(target):
        raise FileExistsError(
            f"{target} was written by something else: give another path (--output)"
        )
    text = render(run)
    if target.exists() and not target.is_file():  # a pipe, a device: there is nothing to replace
        target.write_text(text, encoding="utf-8")
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    replace_text(target.resolve(), text)
    return target


def render(run: Run) -> str:
    """The page as text."""
    lines = series.curves(run.metrics)
    found = examine(run.record)  # the files alone: nothing is asked of processes that live
    parts = [
        overview.head(run),
        overview.failure(run),
        overview.findings(run, found, lines),
        overview.tiles(run, lines),
        charts.curves(run, lines),
        ranks.time_spent(run),
        story.sync(run),
        ranks.data(run),
        ranks.memory(run),
        ranks.overview(run),
        story.failures(run),
        charts.epochs(run),
        story.environment(run),
        overview.damaged(run),
        tag("footer", f"miniray {miniray.__version__} · made from {run.path.absolute()}"),
    ]
    body = "\n".join(part for part in parts if part)
    style = Path(__file__).with_name("style.css").read_text("utf-8")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
{_MARK}
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(run.name)}</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def _beginning(path: Path) -> str:
    with files.open_file(path) as file:
        return file.read(1000).decode("utf-8", "replace")
