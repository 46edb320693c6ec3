"""``miniray top``: show the ranks of a run in the terminal."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from miniray.cli.targets import resolve, run_argument, runs_dir_option

if TYPE_CHECKING:
    from rich.console import Group

    from miniray.doctor.model import RunRecord

EPILOG = """\b
Examples:
  miniray top                  show the newest run under runs/
  miniray top runs/my-run --interval 0.5
  miniray top latest --once    print one snapshot
"""


@click.command(epilog=EPILOG)
@run_argument
@click.option("--once", is_flag=True, help="Print one snapshot and exit.")
@click.option(
    "--interval",
    type=click.FloatRange(0.1),
    default=1.0,
    show_default=True,
    help="Seconds between updates.",
)
@runs_dir_option
def top(target: str, once: bool, interval: float, runs_dir: Path) -> int:
    """Show a live view of the step, phase, loss, memory and state of each rank.

    Below the ranks, the command shows the memory and the disk space that snapshots, the object
    store, checkpoints and the row cache use.

    The command exits when the run ends. To quit earlier, press Ctrl-C. The exit status is 2 if the
    run directory contains no records of ranks.
    """
    from rich.console import Console
    from rich.live import Live

    from miniray.doctor.reader import read_run
    from miniray.runs.run_info import get_state

    run_dir = resolve(target, runs_dir)
    console = Console(highlight=False)
    run = read_run(run_dir)
    if once or not console.is_terminal:
        console.print(frame(run, None, console.width))
        return 0 if run.ranks else 2
    before = None
    with Live(frame(run, None, console.width), console=console, auto_refresh=False) as live:
        try:
            while any(record.alive for record in run) or (
                not run.ranks and get_state(run.run) in ("running", "unknown")  # May start.
            ):
                time.sleep(interval)
                before, run = run, read_run(run_dir)
                live.update(frame(run, before, console.width), refresh=True)
        except KeyboardInterrupt:
            return 0
    return 0 if run.ranks else 2


def frame(run: RunRecord, before: RunRecord | None, width: int) -> Group:
    """Format the verdict of the doctor, the facts about the run, the ranks and the storage."""
    from rich.console import Group
    from rich.text import Text

    from miniray.doctor import render
    from miniray.doctor.diagnose import examine
    from miniray.report.storage import format_storage, measure_storage, read_events

    diagnosis = examine(run, before)
    storage = format_storage(measure_storage(run, read_events(run.path)))
    parts: list[object] = [Text(render.wrapped(diagnosis.verdict, width), style="bold")]
    if diagnosis.readable:
        parts += [Text(f"{run.path}", style="dim")]  # Show the run that `latest` refers to.
        parts += [Text(render.facts_line(diagnosis.case, width), style="dim")]
        parts += [render.rank_table(diagnosis.case, width)]
        parts += [Text(line) for line in render.gpu_lines(diagnosis.case)]
        if storage:
            parts += [Text(storage, style="dim")]
    return Group(*parts)  # type: ignore[arg-type]
