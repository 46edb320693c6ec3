"""``miniray runs``: list, compare and delete runs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from miniray.cli import Group, terminal
from miniray.cli.targets import (
    NoRunError,
    how_to_get_one,
    json_option,
    resolve,
    runs_argument,
    runs_dir_option,
)

if TYPE_CHECKING:
    from miniray.report import Run

EPILOG = """\b
Examples:
  miniray runs                          list all runs, newest first
  miniray runs --json                   print JSON
  miniray runs compare my-run latest    compare metrics and settings
  miniray runs delete my-run other-run  delete runs after confirmation
"""


class _Runs(Group):
    default_command = "list"


@click.group(cls=_Runs, epilog=EPILOG)
def runs() -> None:
    """List, compare and delete runs."""


@runs.command(
    name="list",
    epilog=EPILOG,
    short_help="List runs, newest first (the default).",
)
@json_option
@click.option("-n", "--number", type=click.IntRange(1), help="Show only the N most recent runs.")
@runs_dir_option
def list_(as_json: bool, number: int | None, runs_dir: Path) -> None:
    """List runs, newest first. This is the default command of `miniray runs`."""
    from miniray.report import find_runs

    found = find_runs(runs_dir)
    shown = found[:number]
    if as_json:
        click.echo(json.dumps([summary(run) for run in shown], allow_nan=False))
    elif not found:
        click.echo(f"No runs in {runs_dir.absolute()}. {how_to_get_one(runs_dir)}")
    else:
        terminal.show(shown)
        if len(shown) < len(found):
            click.echo(f"… and {len(found) - len(shown)} older")


def summary(run: Run) -> dict[str, Any]:
    """Return the fields that ``--json`` prints for a run.

    NaN and infinite values are converted to strings.
    """
    return {
        "name": run.name,
        "path": str(run.path.absolute()),
        "state": run.state,
        "kind": run.kind,
        "started": run.started,
        "seconds": run.seconds,
        "world_size": run.world_size,
        "metrics": _finite(run.last_metrics()),
    }


@runs.command(epilog=EPILOG, short_help="Compare metrics and settings of runs.")
@runs_argument
@json_option
@runs_dir_option
def compare(targets: tuple[str, ...], as_json: bool, runs_dir: Path) -> None:
    """Compare the metrics of runs, and show the settings that differ.

    The metrics are those of the report: of logged steps if the run has any, and of epochs.
    """
    from miniray.report import read

    try:
        found = [read(resolve(target, runs_dir)) for target in targets]
    except FileNotFoundError as error:
        raise NoRunError(str(error)) from error
    scores, settings = [_scores(run) for run in found], [_settings(run) for run in found]
    if as_json:
        entries = [
            summary(run) | score | {"settings": given}
            for run, score, given in zip(found, scores, settings, strict=True)
        ]
        click.echo(json.dumps(_finite(entries), allow_nan=False))
    else:
        terminal.compare(found, scores, settings)


def _scores(run: Run) -> dict[str, Any]:
    """Return the last and the best value of each curve in the run's report.

    ``best_at`` is the place of the best value on the x axis of the curves, ``axis``.
    """
    from miniray.report.series import STEP_FACTS

    scores = [curve for curve in run.curves if curve.name not in STEP_FACTS]
    bests = {curve.name: curve.best for curve in scores if curve.best is not None}
    return {
        "axis": run.axis,
        "last": {curve.name: curve.points[-1][1] for curve in run.curves},
        "best": {name: value for name, (_, value) in bests.items()},
        "best_at": {name: int(x) if x.is_integer() else x for name, (x, _) in bests.items()},
    }


def _settings(run: Run) -> dict[str, Any]:
    from miniray.report.series import flatten

    found: dict[str, Any] = {f"config.{k}": value for k, value in flatten(run.config).items()}
    versions = run.info.get("versions")
    if isinstance(versions, dict):
        found |= {f"version.{key}": value for key, value in versions.items()}
    return found


@runs.command(epilog=EPILOG, short_help="Delete run directories.")
@runs_argument
@click.option("-y", "--yes", is_flag=True, help="Don't ask for confirmation.")
@runs_dir_option
def delete(targets: tuple[str, ...], yes: bool, runs_dir: Path) -> None:
    """Delete run directories with their metrics, logs, checkpoints and models.

    The command deletes only run directories that were written by miniray. Runs that are in progress
    can't be deleted. If one RUN can't be deleted, the command doesn't delete any of them.
    """
    named = [resolve(target, runs_dir) for target in targets]
    for path in named:
        obstacle = find_obstacle(path)
        if obstacle:
            raise click.ClickException(f"Can't delete {path}: {obstacle}.")
    chosen = list({path.resolve(): path for path in named}.values())  # Ignore duplicates.
    for path in chosen:
        click.echo(f"{path}  {_size(path) / 1e6:,.1f} MB")
    if not yes:
        if not sys.stdin.isatty():
            raise click.UsageError("Standard input isn't a terminal. Use --yes to confirm.")
        click.confirm(f"Delete {len(chosen)} run{'s' * (len(chosen) > 1)}?", abort=True)
    for path in chosen:
        _remove(path)
    click.echo(f"deleted {len(chosen)} run{'s' * (len(chosen) > 1)}")


def find_obstacle(path: Path) -> str:
    """Return the reason why ``path`` must not be deleted, or "" if it may be deleted."""
    from miniray.report import read
    from miniray.report.run import is_created_by_miniray
    from miniray.runs.listing import is_run
    from miniray.train.run.lock import find_holder

    if path.is_symlink():
        return "it is a symbolic link"
    resolved = path.resolve()
    if not is_run(path) or not is_created_by_miniray(path):
        return "it isn't a run directory of miniray"
    if Path.cwd().resolve().is_relative_to(resolved):
        return "it contains the current directory"
    if (resolved / ".git").exists():
        return "it contains a git repository"
    inner = next((p.parent for p in resolved.glob("*/run.json")), None)
    if inner is not None:
        return f"it contains a different run, {inner.name}"
    living = read(path).living
    if living:
        return f"the run is still in progress ({living})"
    holder = find_holder(resolved)
    if holder is not None:
        return f"process {holder.get('pid', '?')} on host {holder.get('host', '?')} has locked it"
    return ""


def _remove(path: Path) -> None:
    """Delete a run directory.

    The directory is renamed first, so that a partially deleted run is never listed.
    """
    import shutil

    aside = path.with_name(f".{path.name}.{os.getpid()}.deleted")
    os.rename(path, aside)
    shutil.rmtree(aside)


def _size(path: Path) -> int:
    return sum(p.lstat().st_size for p in path.rglob("*") if not p.is_dir())


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        from miniray.doctor.findings import plain

        return plain(value)
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list) else value
