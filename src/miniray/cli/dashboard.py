"""``miniray dashboard``: runs, live, in the browser."""

from __future__ import annotations

from pathlib import Path

import click

from miniray.cli.targets import complete_runs, resolve, runs_dir_option

EPILOG = """\b
Examples:
  miniray dashboard                      all runs under runs/
  miniray dashboard my-run               begin with one of them
  miniray dashboard --port 8080 --no-browser  print the address and open nothing
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
def dashboard(target: str, port: int, no_browser: bool, runs_dir: Path) -> int:
    """Show runs live: ranks, phases, curves, logs, stacks.

    Reads run directories, and binds to this machine only. Ends with Ctrl-C.
    """
    try:
        run = resolve(target, runs_dir) if target else None
    except FileNotFoundError as error:
        click.echo(f"error: {error}", err=True)
        return 2
    root = runs_dir if run is None else run.absolute().parent
    try:
        from miniray.dashboard import serve

        serve(
            root,
            run=None if run is None else run.absolute().name,
            host="127.0.0.1",
            port=port,
            open_browser=not no_browser,
        )
    except ImportError as error:
        raise click.ClickException(
            f"the dashboard cannot run ({error}): pip install 'miniray[dashboard]'"
        ) from error
    return 0
