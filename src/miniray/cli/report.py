"""``miniray report``: write an HTML report of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from miniray.cli.targets import NoRunError, json_option, resolve, run_argument, runs_dir_option

EPILOG = """\b
Examples:
  miniray report                        write a report of the newest run
  miniray report runs/my-run --open     open the report in the browser
  miniray report my-run -o my-run.html  write the report to a different file
  miniray report latest --json          print a summary as JSON
"""


@click.command(epilog=EPILOG)
@run_argument
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Output file.  [default: RUN_DIR/report.html]",
)
@click.option("--open", "open_browser", is_flag=True, help="Open the report in the browser.")
@json_option
@runs_dir_option
def report(
    target: str, output: Path | None, open_browser: bool, as_json: bool, runs_dir: Path
) -> None:
    """Write a self-contained HTML report of a run.

    The command reads only the run directory, so it also works if the run is still in progress or
    has crashed. Trainers and `miniray run` write the report automatically at the end of a run.
    """
    from miniray.report import read, write_report

    run_dir = resolve(target, runs_dir)
    try:
        path = write_report(run_dir, output)
    except OSError as error:
        if error.errno is None:  # write_report raised the error, not the operating system.
            raise NoRunError(str(error)) from error
        where = output or run_dir / "report.html"
        raise click.ClickException(
            f"Can't write {where}: {error.strerror}. Use -o FILE to write a different file."
        ) from error
    if as_json:
        click.echo(json.dumps(_summary(read(run_dir), path), ensure_ascii=False, allow_nan=False))
    else:
        click.echo(f"Report: {path}")
    if open_browser:
        click.launch(path.absolute().as_uri())


def _summary(run: Any, path: Path) -> dict[str, Any]:
    from miniray.cli.runs import summary
    from miniray.doctor.diagnose import examine

    findings = [finding.to_json() for finding in examine(run.record).findings]
    return {**summary(run), "report": str(path), "findings": findings}
