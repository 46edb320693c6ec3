"""``miniray dashboard``: runs, live, in the browser."""

from __future__ import annotations

import errno
from pathlib import Path

import click

from miniray.cli.targets import (
    NoRunError,
    complete_runs,
    how_to_get_one,
    resolve,
    runs_dir_option,
)

EPILOG = """\b
Examples:
  miniray dashboard               all runs under runs/
  miniray dashboard my-run        begin with one of them
  miniray dashboard elsewhere     all runs under another folder
  miniray dashboard --no-browser  print the address and open nothing
"""


@click.command(epilog=EPILOG)
@click.argument("target", metavar="[RUN_DIR | latest]", default="",
                shell_complete=complete_runs)  # fmt: skip
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    show_default=True,
    help="Port of this machine; 0 takes a free one.",
)
@click.option("--no-browser", is_flag=True, help="Print the address and open nothing.")
@runs_dir_option
def dashboard(target: str, port: int, no_browser: bool, runs_dir: Path) -> None:
    """Show runs live: ranks, phases, curves, logs, stacks.

    Reads run directories, and binds to this machine only. Ends with Ctrl-C.
    """
    from miniray.runs.listing import is_run

    run = resolve(target, runs_dir, folder=True) if target else None
    if run is not None and not is_run(run):  # a folder of runs
        runs_dir, run = run, None
    root = runs_dir if run is None else run.absolute().parent
    if not root.is_dir():
        raise NoRunError(f"there is no folder {root.absolute()}: {how_to_get_one(root)}")
    try:
        from miniray.dashboard import serve

        serve(
            root,
            run=None if run is None else run.absolute().name,
            host="127.0.0.1",
            port=port,
            open_browser=not no_browser,
        )
    except ImportError as error:  # which says what to install
        raise click.ClickException(str(error)) from error
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise click.ClickException(
            f"port {port} is taken; without --port it is a free one"
        ) from error
