"""``miniray runs``: which runs there are, how they compare, and away with those not needed."""

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
  miniray runs                          the runs under runs/, newest first
  miniray runs --json                   the same for a program
  miniray runs compare my-run latest    their metrics and settings together
  miniray runs delete my-run other-run  asks first; --yes does not
"""


class _Runs(Group):
    usual = "list"


@click.group(cls=_Runs, epilog=EPILOG)
def runs() -> None:
    """List, compare and delete runs."""


@runs.command(
    name="list",
    epilog=EPILOG,
    short_help="List the runs, newest first; meant where none is named.",
)
@json_option
@click.option("-n", "--number", type=click.IntRange(1), help="The newest so many.")
@runs_dir_option
def list_(as_json: bool, number: int | None, runs_dir: Path) -> None:
    """List the runs, newest first (what `miniray runs` does without a command)."""
    from miniray.report import find_runs

    found = find_runs(runs_dir)
    shown = found[:number]
    if as_json:
        click.echo(json.dumps([summary(run) for run in shown], allow_nan=False))
    elif not found:
        click.echo(f"no runs in {runs_dir.absolute()}: {how_to_get_one(runs_dir)}")
    else:
        terminal.show(shown)
        if len(shown) < len(found):
            click.echo(f"… and {len(found) - len(shown)} older")


def summary(run: Run) -> dict[str, Any]:
    """What ``--json`` says of a run; NaN and the like are texts."""
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


@runs.command(epilog=EPILOG, short_help="Show metrics and settings of several runs side by side.")
@runs_argument
@json_option
@runs_dir_option
def compare(targets: tuple[str, ...], as_json: bool, runs_dir: Path) -> None:
    """Show the metrics of several runs side by side, and the settings in which they differ."""
    from miniray.report import read

    try:
        found = [read(resolve(target, runs_dir)) for target in targets]
    except FileNotFoundError as error:
        raise NoRunError(str(error)) from error
    bests, settings = [_best(run) for run in found], [_settings(run) for run in found]
    if as_json:
        entries = [
            summary(run) | {"best": best, "settings": given}
            for run, best, given in zip(found, bests, settings, strict=True)
        ]
        click.echo(json.dumps(_finite(entries), allow_nan=False))
    else:
        terminal.compare(found, bests, settings)


def _best(run: Run) -> dict[str, Any]:
    from miniray.report.series import curves

    return {c.name: c.best[1] for c in curves(run.metrics) if c.best is not None}


def _settings(run: Run) -> dict[str, Any]:
    from miniray.report.series import flat

    found: dict[str, Any] = {f"config.{k}": value for k, value in flat(run.config).items()}
    versions = run.info.get("versions")
    if isinstance(versions, dict):
        found |= {f"version.{key}": value for key, value in versions.items()}
    return found


@runs.command(epilog=EPILOG, short_help="Delete runs with everything in them.")
@runs_argument
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@runs_dir_option
def delete(targets: tuple[str, ...], yes: bool, runs_dir: Path) -> None:
    """Delete runs with everything in them: metrics, logs, checkpoints, models.

    Nothing but a run directory that miniray wrote is deleted, and no run whose processes live. If
    any of the RUNs is refused, none is deleted.
    """
    named = [resolve(target, runs_dir) for target in targets]
    for path in named:
        why = refusal(path)
        if why:
            raise click.ClickException(f"{path} is not deleted: {why}")
    chosen = list({path.resolve(): path for path in named}.values())  # one may have two names
    for path in chosen:
        click.echo(f"{path}  {_size(path) / 1e6:,.1f} MB")
    if not yes:
        if not sys.stdin.isatty():
            raise click.UsageError("There is no terminal to ask on; --yes deletes without asking.")
        click.confirm(f"Delete {len(chosen)} run{'s' * (len(chosen) > 1)} for good?", abort=True)
    for path in chosen:
        _remove(path)
    click.echo(f"deleted {len(chosen)} run{'s' * (len(chosen) > 1)}")


def refusal(path: Path) -> str:
    """Why ``path`` must not be deleted; "" where it may be."""
    from miniray.report import read
    from miniray.report.run import is_ours, is_run
    from miniray.train.rundir import find_holder

    if path.is_symlink():
        return "it is a link; delete what it leads to"
    whole = path.resolve()
    if not is_run(path) or not is_ours(path):
        return "it is not a run directory of miniray"
    if Path.cwd().resolve().is_relative_to(whole):
        return "it holds the current directory"
    if (whole / ".git").exists():
        return "it holds a git repository"
    inner = next((p.parent for p in whole.glob("*/run.json")), None)
    if inner is not None:
        return f"another run is in it: {inner.name}"
    living = read(path).living
    if living:
        return f"the run is still going on ({living})"
    holder = find_holder(whole)
    if holder is not None:
        return f"process {holder.get('pid', '?')} on host {holder.get('host', '?')} has locked it"
    return ""


def _remove(path: Path) -> None:
    """Take it out of sight first: one that is deleted by half must not look like a run."""
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
