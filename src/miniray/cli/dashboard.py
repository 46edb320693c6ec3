"""``miniray dashboard``: show runs in the browser."""

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
  miniray dashboard               show all runs in runs/
  miniray dashboard my-run        show one run
  miniray dashboard other-runs    show all runs in a different directory
  miniray dashboard --no-browser  print the address without opening a browser
"""


@click.command(epilog=EPILOG)
@click.argument("target", metavar="[RUN_DIR | latest]", default="",
                shell_complete=complete_runs)  # fmt: skip
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    show_default=True,
    help="Port to listen on. 0 selects a free port.",
)
@click.option("--no-browser", is_flag=True, help="Print the address instead of opening a browser.")
@runs_dir_option
def dashboard(target: str, port: int, no_browser: bool, runs_dir: Path) -> None:
    """Show a live view of the ranks, phases, metrics, logs and stacks of runs.

    The dashboard only reads the run directories, and its server listens only on 127.0.0.1. To stop
    the server, press Ctrl-C.
    """
    from miniray.runs.listing import is_run

    run = resolve(target, runs_dir, folder=True) if target else None
    if run is not None and not is_run(run):  # The target is a directory that contains runs.
        runs_dir, run = run, None
    root = runs_dir if run is None else run.absolute().parent
    if not root.is_dir():
        raise NoRunError(f"Directory {root.absolute()} doesn't exist. {how_to_get_one(root)}")
    try:
        from miniray.dashboard import serve

        serve(
            root,
            run=None if run is None else run.absolute().name,
            host="127.0.0.1",
            port=port,
            open_browser=not no_browser,
        )
    except ImportError as error:  # The message names the extra to install.
        raise click.ClickException(str(error)) from error
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise click.ClickException(
            f"Port {port} is in use. Omit --port to select a free port."
        ) from error
