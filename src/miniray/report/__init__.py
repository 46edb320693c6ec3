"""Create an HTML report of a run: ``write_report(run_dir)`` writes the file ``report.html``.

The page is self-contained and loads no scripts, no other files and nothing from the network. If a
part of the run is missing, the report omits the section about this part. Damaged files are listed
at the end of the page. This package doesn't import torch.
"""

from __future__ import annotations

import os
from pathlib import Path

import miniray
from miniray.doctor.diagnose import examine
from miniray.doctor.runfile import replace_text
from miniray.report import charts, overview, ranks, story
from miniray.report.html import escape, tag
from miniray.report.run import Run, find_runs, read
from miniray.runs import files

__all__ = ["Run", "find_runs", "read", "write_report"]

#: Tag that identifies pages written by miniray. A ``report.html`` without this tag is never
#: overwritten.
_MARK = '<meta name="generator" content="miniray report">'


def write_report(
    run_dir: str | os.PathLike[str], path: str | os.PathLike[str] | None = None
) -> Path:
    """Write the report of a run, and return the path of the report.

    The default path is ``report.html`` in the run directory. The file is replaced atomically.

    Raises:
        FileNotFoundError: ``run_dir`` isn't a run directory.
        FileExistsError: A different program wrote the ``report.html`` in the run directory.
    """
    run = read(run_dir)
    target = run.path / "report.html" if path is None else Path(path)
    if path is None and target.exists() and _MARK not in _read_start(target):
        raise FileExistsError(
            f"{target} wasn't written by miniray. Choose a different path with --output."
        )
    text = render(run)
    if target.exists() and not target.is_file():  # pipes and devices can't be replaced
        target.write_text(text, encoding="utf-8")
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    replace_text(target.resolve(), text)
    return target


def render(run: Run) -> str:
    """Return the HTML page of the report."""
    curves = run.curves
    diagnosis = examine(run.record)  # reads files and doesn't send requests to ranks
    parts = [
        overview.render_header(run),
        overview.render_verdict(run, diagnosis, curves),
        overview.render_tiles(run, curves),
        charts.render_curves(run, curves),
        ranks.render_time(run),
        story.render_sync(run),
        ranks.render_data(run),
        ranks.render_memory(run),
        ranks.render_ranks(run),
        story.render_failures(run),
        charts.render_epochs(run),
        story.render_environment(run),
        overview.render_damaged_files(run),
        tag("footer", f"miniray {miniray.__version__} · created from {run.path.absolute()}"),
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


def _read_start(path: Path) -> str:
    with files.open_file(path) as file:
        return file.read(1000).decode("utf-8", "replace")
