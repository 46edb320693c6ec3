"""``miniray report``: a run as one page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from miniray.cli.targets import NoRunError, json_option, resolve, run_argument, runs_dir_option

EPILOG = """\b
Examples:
  miniray report                        the newest run under runs/
  miniray report runs/my-run --open     and show it in the browser
  miniray report my-run -o my-run.html  elsewhere, to send it to somebody
  miniray report latest --json          what the page says, for a program
"""


@click.command(epilog=EPILOG)
@run_argument
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Where the page goes.  [default: RUN_DIR/report.html]",
)
@click.option("--open", "open_browser", is_flag=True, help="Show it in the browser.")
@json_option
@runs_dir_option
def report(
    target: str, output: Path | None, open_browser: bool, as_json: bool, runs_dir: Path
) -> None:
    """Write a run as one HTML page that needs nothing else.

    Reads the run's directory only: a run that lives, died, or was recorded by another launcher will
    do. Every run of a trainer and of `miniray run` writes its page by itself at its end.
    """
    from miniray.report import read, write_report

    run_dir = resolve(target, runs_dir)
    try:
        path = write_report(run_dir, output)
    except OSError as error:
        if error.errno is None:  # said by us: there is no run, or a page of somebody else
            raise NoRunError(str(error)) from error
        where = output or run_dir / "report.html"
        raise click.ClickException(
            f"the page cannot be written: {where}: {error.strerror}; -o FILE writes it elsewhere"
        ) from error
    if as_json:
        click.echo(json.dumps(_summary(read(run_dir), path), ensure_ascii=False, allow_nan=False))
    else:
        click.echo(f"report: {path}")
    if open_browser:
        click.launch(path.absolute().as_uri())


def _summary(run: Any, path: Path) -> dict[str, Any]:
    from miniray.cli.runs import summary
    from miniray.doctor.diagnose import examine

    findings = [finding.to_json() for finding in examine(run.record).findings]
    return {**summary(run), "report": str(path), "findings": findings}
