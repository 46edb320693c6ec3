"""``miniray doctor``: diagnose a run, the data that a script loads, or the speedup of a script."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from miniray.cli import Group
from miniray.cli.targets import (
    NoRunError,
    complete_files,
    complete_runs,
    json_option,
    resolve,
    run_argument,
    runs_dir_option,
)
from miniray.cli.terminal import columns, supports_color

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from miniray.doctor.diagnose import Diagnosis

EPILOG = """\b
Examples:
  miniray doctor latest                 diagnose the newest run under runs/
  miniray doctor runs/my-run --json     print JSON
  miniray doctor 4711 --watch           watch the run of process 4711
  miniray doctor data --nproc 4 train.py
  miniray doctor speedup train.py --nproc 1,2,4 -- --epochs 1

\b
Exit status: 0 if the run is healthy, 1 if there are findings, 2 if the run
can't be read.
"""

#: Name of the default command. The name contains spaces, so that it can't be the name of a run.
_DEFAULT_COMMAND = "diagnose a run"

#: Number of seconds that ``--watch`` waits between two diagnoses.
_WATCH_INTERVAL_S = 2.0


class _Doctor(Group):
    """The group of the command ``miniray doctor X``. X is either a subcommand or a run."""

    default_command = _DEFAULT_COMMAND

    def uses_default(self, ctx: click.Context, args: list[str]) -> bool:
        return not args or args[0] not in (*self.commands, *self.group_options)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Provide shell completion for subcommands and runs."""
        return [*super().shell_complete(ctx, incomplete), *complete_runs(ctx, None, incomplete)]

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_usage(ctx.command_path, "[OPTIONS] [RUN_DIR | PID | latest]")
        formatter.write_usage(ctx.command_path, "COMMAND ...")


class _DefaultContext(click.Context):
    """A context that hides the name of the default command in error messages."""

    @property
    def command_path(self) -> str:
        assert self.parent is not None
        return self.parent.command_path


@click.group(cls=_Doctor, epilog=EPILOG)
def doctor() -> None:
    """Diagnose a running, hung or finished run.

    The command reads the run directory and requests stack traces from running ranks. It doesn't
    affect the run in any other way.
    """


@doctor.command(name=_DEFAULT_COMMAND, epilog=EPILOG, hidden=True)
@run_argument
@click.option("--watch", is_flag=True, help="Repeat until the run ends.")
@json_option
@click.option(
    "--hang-timeout",
    type=click.FloatRange(0, min_open=True),
    help="Seconds without progress that count as a hang.  [default: setting of the run, or 60]",
)
@runs_dir_option
def examine(
    target: str, watch: bool, as_json: bool, hang_timeout: float | None, runs_dir: Path
) -> int:
    """Diagnose one run."""
    from miniray.doctor.diagnose import diagnose

    run_dir = resolve(target, runs_dir)
    try:
        diagnosis = diagnose(run_dir, hang_timeout=hang_timeout)
        if not as_json and run_dir.name != Path(target).name:  # The target is `latest` or a pid.
            click.echo(f"{run_dir}:")
        _show(diagnosis, as_json)
        while watch and diagnosis.case.live:
            time.sleep(_WATCH_INTERVAL_S)
            before, diagnosis = diagnosis, diagnose(run_dir, hang_timeout=hang_timeout)
            if as_json or _find_kinds(diagnosis) != _find_kinds(before):
                _show(diagnosis, as_json)
            else:
                click.echo(f"{time.strftime('%H:%M:%S')} {diagnosis.verdict}")
        return diagnosis.exit_code
    except FileNotFoundError as error:  # The run has been deleted in the meantime.
        raise NoRunError(str(error)) from error


def _find_kinds(diagnosis: Diagnosis) -> list[tuple[str, tuple[int, ...]]]:
    """Return the findings and the live ranks of a diagnosis as a list that can be compared.

    ``--watch`` prints a full diagnosis only if this value changes.
    """
    found = [(finding.code, finding.ranks) for finding in diagnosis.findings]
    return [*found, ("live", tuple(facts.rank for facts in diagnosis.case.live))]


def _show(diagnosis: Diagnosis, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(diagnosis.to_json(), ensure_ascii=False))
        return
    click.echo(diagnosis.text(int(min(80, columns())), supports_color(sys.stdout)))
    sys.stdout.flush()


examine.context_class = _DefaultContext


_hang_timeout = click.option(
    "--hang-timeout",
    type=click.FloatRange(0, min_open=True),
    default=60.0,
    show_default=True,
    help="Seconds without progress before the ranks are stopped.",
)


@doctor.command(
    name="data",
    epilog=EPILOG,
    short_help="Show which samples each rank of SCRIPT receives.",
    context_settings={"allow_interspersed_args": False},
)
@click.option(
    "--nproc", type=click.IntRange(1), default=2, show_default=True, help="Number of ranks."
)
@json_option
@_hang_timeout
@click.argument("script", type=click.Path(exists=True, dir_okay=False))
@click.argument("args", nargs=-1, type=click.UNPROCESSED, shell_complete=complete_files)
def data(nproc: int, as_json: bool, hang_timeout: float, script: str, args: tuple[str, ...]) -> int:
    """Show which samples each rank of SCRIPT receives, without training a model.

    The command runs the script on --nproc ranks and stops it when it first iterates over a
    DataLoader.
    """
    from miniray.doctor import data_probe

    with tempfile.TemporaryDirectory(prefix="miniray-data-") as folder:
        run_dir = Path(folder) / "run"
        command = ("-m", "miniray.doctor.data_probe", script, *args)
        code = _launch(command, nproc, run_dir, hang_timeout)
        reports = data_probe.read(run_dir, nproc)
    if code or not reports:
        why = "a rank failed before it iterated over" if code else "the script never iterated over"
        click.echo(f"error: {script}: {why} a DataLoader of torch or miniray.data", err=True)
        return 2
    if as_json:
        click.echo(json.dumps([report.to_json() for report in reports], ensure_ascii=False))
    else:
        click.echo("\n\n".join(report.text() for report in reports))
    # The exit code depends only on the first loader, because the purpose of the others is unknown.
    return reports[0].exit_code


def _launch(command: tuple[str, ...], nproc: int, run_dir: Path, hang_timeout: float) -> int:
    """Run the launcher in a subprocess, because it handles signals and adopts orphans."""
    import subprocess

    full = [sys.executable, "-m", "miniray", "run", "--nproc", str(nproc)]
    full += ["--temporary", "--run-dir", str(run_dir), "--hang-timeout", str(hang_timeout)]
    full += command
    return subprocess.run(full, stdout=sys.stderr, check=False).returncode


@doctor.command(name="speedup", epilog=EPILOG, context_settings={"allow_interspersed_args": True})
@click.argument("script", type=click.Path(exists=True, dir_okay=False))
@click.argument("args", nargs=-1, type=click.UNPROCESSED, shell_complete=complete_files)
@click.option(
    "--nproc", "numbers", default="1,2,4", show_default=True, help="Numbers of ranks to compare."
)
@click.option(
    "--threads",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Number of threads per rank in every run.",
)
@_hang_timeout
@click.option(
    "--keep",
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory in which to keep the run directories and the output.",
)
@json_option
def speedup(
    script: str,
    args: tuple[str, ...],
    numbers: str,
    threads: int,
    hang_timeout: float,
    keep: Path | None,
    as_json: bool,
) -> int:
    """Measure how much faster SCRIPT runs on several ranks.

    The command runs the script once for each number of ranks, with the same number of threads per
    rank. Pass the arguments of the script after `--`.
    """
    from miniray.doctor.speedup import measure
    from miniray.limits import cpu_count

    nprocs = _numbers(numbers)
    with tempfile.TemporaryDirectory(prefix="miniray-speedup-") as temporary:
        folder = keep or Path(temporary)
        found = measure((script, *args), nprocs, folder, cpu_count(), threads, hang_timeout)
    click.echo(json.dumps(found.to_json(), indent=2) if as_json else found.text())
    return found.exit_code


def _numbers(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise click.BadParameter(
            f"{text!r} must be a list of numbers such as 1,2,4.", param_hint="--nproc"
        )
    return sorted({int(part) for part in parts})
