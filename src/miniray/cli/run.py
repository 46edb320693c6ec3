"""``miniray run``: launch a script on several ranks and diagnose hangs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

from miniray import limits
from miniray.cli.targets import complete_files
from miniray.core import machine

EPILOG = """\b
Examples:
  miniray run --nproc 4 train.py --epochs 3
  miniray run --nproc 2 --hang-timeout 20 -m my.package.train
  miniray run --nproc 8 --nnodes 2 --node-rank 0 \\
      --master-addr 10.0.0.1 --master-port 29500 train.py

If you use several machines, set MINIRAY_RUN_TOKEN to the same secret on each.
"""


class _NumRanks(click.IntRange):
    """The number of ranks, which can also be ``gpu``, ``cpu`` or ``auto`` as in torchrun."""

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        if value not in ("gpu", "cpu", "auto"):
            if not str(value).lstrip("-").isdecimal():
                self.fail(f"{value!r} must be a number, gpu, cpu or auto.", param, ctx)
            number: int = super().convert(value, param, ctx)
            return number
        gpus = 0 if value == "cpu" else len(machine.gpu_ids())
        if value == "gpu" and not gpus:
            self.fail("this machine has no GPU.", param, ctx)
        return gpus or limits.cpu_count()


@click.command(
    epilog=EPILOG,
    # Options that follow the script are passed to the script.
    context_settings={"allow_interspersed_args": False},
)
@click.option(
    "--nproc",
    "--nproc-per-node",
    "--nproc_per_node",
    type=_NumRanks(1),
    default=1,
    show_default=True,
    help="Number of ranks on this machine, or gpu, cpu or auto.",
)
@click.option(
    "--nnodes", type=click.IntRange(1), default=1, show_default=True, help="Number of machines."
)
@click.option(
    "--node-rank", "--node_rank", type=click.IntRange(0), default=0, help="Rank of this machine."
)
@click.option(
    "--master-addr",
    "--master_addr",
    default="127.0.0.1",
    show_default=True,
    help="Address of machine 0.",
)
@click.option(
    "--master-port",
    "--master_port",
    type=click.IntRange(1, 65535),
    help="Port on machine 0.  [default: a free port]",
)
@click.option(
    "--standalone", is_flag=True, help="Run on one machine and select a free port (the default)."
)
@click.option(
    "--max-restarts",
    "--max_restarts",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Number of times to restart all ranks after a failure.",
)
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Run directory.  [default: runs/SCRIPT-DATE-TIME]",
)
@click.option(
    "--hang-timeout",
    type=float,
    default=60.0,
    show_default=True,
    help="Seconds without progress before a diagnosis. If a rank is stuck, the run is stopped.",
)
@click.option(
    "--no-instrument",
    is_flag=True,
    help="Don't instrument torch. Record only the data that the script itself reports.",
)
@click.option("-m", "--module", is_flag=True, help="Run SCRIPT as a module, like python -m.")
@click.option("--temporary", is_flag=True, hidden=True)  # see ``Options``
@click.argument("script", shell_complete=complete_files)
@click.argument("args", nargs=-1, type=click.UNPROCESSED, shell_complete=complete_files)
def run(
    script: str,
    args: tuple[str, ...],
    module: bool,
    standalone: bool,
    no_instrument: bool,
    run_dir: Path | None,
    **given: Any,
) -> int:
    """Launch SCRIPT on several ranks, as a drop-in replacement for torchrun.

    If the run hangs, a rank fails, or the collectives of the ranks don't match, the command prints
    a diagnosis and saves it in the run directory. Then the command terminates all ranks and
    exits with a nonzero status.
    """
    from miniray.doctor.launch import launch
    from miniray.doctor.launch_options import Options, check
    from miniray.doctor.runfile import new_directory
    from miniray.runs.listing import is_run, list_runs

    if standalone and given["nnodes"] > 1:
        raise click.UsageError("--standalone requires --nnodes 1.")
    options = Options(
        command=("-m", script, *args) if module else (script, *args),
        run_dir=run_dir,
        instrument=not no_instrument,
        **given,
    )
    try:
        check(options)  # Check the options before creating the run directory.
    except (ValueError, FileNotFoundError) as error:
        raise click.UsageError(str(error)) from error
    if run_dir is not None and not is_run(run_dir) and list_runs(run_dir):
        raise click.UsageError(
            f"{run_dir} contains other runs. Pass the directory of this run, such as "
            f"--run-dir {run_dir / 'NAME'}."
        )
    if run_dir is None:
        run_dir = new_directory(Path("runs"), Path(script).stem)
        options = dataclasses.replace(options, run_dir=run_dir)
    code = launch(options)
    if options.node_rank == 0 and not options.temporary:
        _write_report(run_dir)
    return code


def _write_report(run_dir: Path) -> None:
    """Write the report of the run.

    If the report can't be written, print the error without changing the exit status of the run.
    """
    from miniray.report import write_report

    try:
        message = f"report: {write_report(run_dir)}"
    except Exception as error:
        message = f"couldn't write the report of {run_dir}: {error}"
    click.echo(f"[miniray run] {message}", err=True)
