"""``miniray run``: torchrun's place taken by a launcher that says why a run is stuck."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

from miniray.cli.targets import complete_files
from miniray.core import machine

EPILOG = """\b
Examples:
  miniray run --nproc 4 train.py --epochs 3
  miniray run --nproc 2 --hang-timeout 20 -m my.package.train
  miniray run --nproc 8 --nnodes 2 --node-rank 0 \\
      --master-addr 10.0.0.1 --master-port 29500 train.py

Launchers of several machines need the same secret in MINIRAY_RUN_TOKEN.
"""


class _Ranks(click.IntRange):
    """A number, or torchrun's words for one."""

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        if value not in ("gpu", "cpu", "auto"):
            if not str(value).lstrip("-").isdecimal():
                self.fail(f"{value!r} is neither a number nor gpu, cpu or auto.", param, ctx)
            number: int = super().convert(value, param, ctx)
            return number
        gpus = 0 if value == "cpu" else len(machine.gpu_ids())
        if value == "gpu" and not gpus:
            self.fail("there is no GPU here.", param, ctx)
        return gpus or machine.cpu_count()


@click.command(
    epilog=EPILOG,
    # What comes after the script is the script's, also what looks like an option of ours.
    context_settings={"allow_interspersed_args": False},
)
@click.option(
    "--nproc",
    "--nproc-per-node",
    "--nproc_per_node",
    type=_Ranks(1),
    default=1,
    show_default=True,
    help="Ranks on this machine; gpu, cpu or auto: as many as there are.",
)
@click.option("--nnodes", type=click.IntRange(1), default=1, show_default=True, help="Machines.")
@click.option(
    "--node-rank", "--node_rank", type=click.IntRange(0), default=0, help="Which of them this is."
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
    help="Port on machine 0.  [default: a free one]",
)
@click.option("--standalone", is_flag=True, help="One machine and a free port, as it is anyway.")
@click.option(
    "--max-restarts",
    "--max_restarts",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="How often all ranks are started again after a failure.",
)
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where the run is recorded.  [default: runs/SCRIPT-DATE-TIME]",
)
@click.option(
    "--hang-timeout",
    type=float,
    default=60.0,
    show_default=True,
    help="Seconds without any movement until the run is diagnosed, and ended if a rank is stuck.",
)
@click.option(
    "--no-instrument", is_flag=True, help="Leave torch alone: only what the script itself records."
)
@click.option("-m", "--module", is_flag=True, help="Run a module, as python -m does.")
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
    """Run SCRIPT with ARGS as several ranks, with torchrun's environment.

    Every rank is recorded. When nothing moves any more, a rank fails, or the ranks' collectives do
    not match, the diagnosis is printed and kept in the run directory, every rank is ended, and the
    exit status is not 0.
    """
    from miniray.doctor.launch import launch
    from miniray.doctor.launch_options import Options, check
    from miniray.doctor.runfile import new_directory
    from miniray.runs.listing import is_run, list_runs

    if standalone and given["nnodes"] > 1:
        raise click.UsageError("--standalone is for one machine, not for --nnodes of them.")
    options = Options(
        command=("-m", script, *args) if module else (script, *args),
        run_dir=run_dir,
        instrument=not no_instrument,
        **given,
    )
    try:
        check(options)  # before a directory is made for it
    except (ValueError, FileNotFoundError) as error:
        raise click.UsageError(str(error)) from error
    if run_dir is not None and not is_run(run_dir) and list_runs(run_dir):
        raise click.UsageError(
            f"{run_dir} is a folder of runs; --run-dir is that of this run, like {run_dir / 'NAME'}"
        )
    if run_dir is None:
        run_dir = new_directory(Path("runs"), Path(script).stem)
        options = dataclasses.replace(options, run_dir=run_dir)
    code = launch(options)
    if options.node_rank == 0 and not options.temporary:
        _report(run_dir)
    return code


def _report(run_dir: Path) -> None:
    """The run as a page. One that cannot be written is said; the run's own status stays."""
    from miniray.report import write_report

    try:
        said = f"report: {write_report(run_dir)}"
    except Exception as error:  # whatever a reader of files may meet; the run is over
        said = f"no report of {run_dir}: {error}"
    click.echo(f"[miniray run] {said}", err=True)
