"""``miniray demo``: run a demo right after the installation.

The default demo is part of this package. The other demos are scripts. In a checkout, the scripts
are in the directories ``examples`` and ``recipes``. A wheel contains only the examples, which are
in the directory ``miniray/demos/scripts``.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import click

import miniray
from miniray.cli import Group, print_definitions
from miniray.cli.targets import runs_dir_option
from miniray.cli.terminal import console

EPILOG = """\b
Examples:
  miniray demo                    estimate π with four actors (needs no extra)
  miniray demo --actors 8 --seed 7
  miniray demo classify           train a classifier on four workers
  miniray demo gan --epochs 20    pass an option to a demo
  miniray demo geoguessr --quick  a short run that doesn't learn anything
  miniray demo --list             list the demos and their requirements
"""

_DEFAULT = "pi"
PACKAGE = Path(miniray.__file__).resolve().parent
#: Names of packages whose import name differs from the package name, by import name.
_PACKAGES = {"sklearn": "scikit-learn", "PIL": "pillow"}


@dataclasses.dataclass(frozen=True)
class Script:
    """A demo that runs an example script from the repository."""

    path: str
    text: str
    needs: tuple[str, ...] = ("torch", "sklearn", "matplotlib")
    extra: str = "examples"  #: Extras of miniray that install the packages in ``needs``.
    args: tuple[str, ...] = ()  #: Arguments that precede those of the user.


SCRIPTS = {
    "classify": Script(
        "examples/train_framework_demo.py",
        "Train an image classifier on four workers that average their weights (30 s).",
        args=("classification",),
    ),
    "gan": Script(
        "examples/distributed_gan_v2.py",
        "Train a GAN with two losses and a sync every five epochs (1 min).",
    ),
    "ddp": Script(
        "examples/ddp_digits.py",
        "Train a digit classifier with DDP on two ranks (30 s).",
    ),
    "pipeline": Script(
        "examples/pipeline_gpt.py",
        "Train a small GPT as a pipeline of four stages with 1F1B (1 min).",
        ("torch", "matplotlib"),
    ),
    "geoguessr": Script(
        "recipes/geoguessr/train_ppo.py",
        "Train a vision-language model with GRPO to locate photos (3 min).",
        ("torch", "pyarrow", "PIL", "matplotlib"),
        "data,examples",
    ),
}


class _Demo(Group):
    """The group of all demos. The default demo estimates π."""

    default_command = _DEFAULT
    shows_default_options = False  # They apply only to one of the six demos.
    group_options = ("-h", "--help", "--list", "--json")

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [_DEFAULT, *SCRIPTS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in SCRIPTS:
            return _create_command(cmd_name, SCRIPTS[cmd_name])
        return super().get_command(ctx, cmd_name)


@click.group(cls=_Demo, epilog=EPILOG, invoke_without_command=True)
@click.option("--list", "list_demos", is_flag=True, help="List the demos and their requirements.")
@click.option("--json", "as_json", is_flag=True, help="With --list, print JSON.")
@click.pass_context
def demo(ctx: click.Context, list_demos: bool, as_json: bool) -> None:
    """Run a demo.

    Each demo is a small, complete program that is easy to read. Each demo creates a run
    directory with a report in runs/.
    """
    if not list_demos:
        return
    rows = {_DEFAULT: ("Estimate π with parallel actors (10 s).", "")}
    rows |= {name: (script.text, _find_obstacle(script)) for name, script in SCRIPTS.items()}
    if as_json:
        found = {name: {"text": text, "obstacle": why} for name, (text, why) in rows.items()}
        click.echo(json.dumps(found, ensure_ascii=False))
        return
    print_definitions(
        ctx,
        {k: f"{text} Not available: {why}" if why else text for k, (text, why) in rows.items()},
    )


def _find_obstacle(script: Script) -> str:
    """Return the reason why the script can't run and a suggested fix, or "" if it can run."""
    missing = find_missing_packages(script.needs)
    if missing:
        return f"install {', '.join(missing)} with pip install 'miniray[{script.extra}]'."
    if find_script(script.path) is None:
        return f"this installation has no {script.path}. Clone the repository and run it there."
    return ""


def _create_command(name: str, script: Script) -> click.Command:
    """Create a command that passes all of its arguments to the script."""

    @click.command(
        name=name,
        short_help=script.text,
        context_settings={"ignore_unknown_options": True, "help_option_names": []},
    )
    @click.argument("args", nargs=-1, type=click.UNPROCESSED)
    def run_script(args: tuple[str, ...]) -> None:
        obstacle = _find_obstacle(script)
        if obstacle:
            raise click.ClickException(f"`miniray demo {name}` can't run: {obstacle}")
        path = find_script(script.path)
        assert path is not None
        exec_script(path, [*script.args, *args])

    return run_script


@demo.command(name=_DEFAULT, epilog=EPILOG)
@click.option(
    "--actors",
    type=click.IntRange(1, 256),
    default=4,
    show_default=True,
    help="Number of actors.",
)
@click.option(
    "--batches",
    type=click.IntRange(1),
    default=400,
    show_default=True,
    help="Number of batches per actor.",
)
@click.option(
    "--batch-size",
    type=click.IntRange(1),
    default=1_000_000,
    show_default=True,
    help="Number of points per batch.",
)
@click.option(
    "--seed", type=click.IntRange(0), default=1, show_default=True, help="Seed of the points."
)
@click.option(
    "--backend",
    type=click.Choice(["local", "inline", "ray"]),
    help="Engine that runs the actors. MINIRAY_BACKEND overrides it.  [default: local]",
)
@click.option("--name", help="Name of the run.  [default: monte-carlo-DATE-TIME]")
@runs_dir_option
def pi(backend: str | None, name: str | None, runs_dir: Path, **config: int) -> None:
    """Estimate π with parallel actors.

    Each actor draws random points in a square and counts how many of them lie inside the circle.
    Another actor adds up these counts. The demo prints a table and writes a report to
    RUNS_DIR/NAME/report.html.
    """
    from miniray import demos
    from miniray.train.run.directory import RunDirectory

    folder = RunDirectory.open(None, name, "monte-carlo", root=runs_dir)
    try:
        result = demos.run(demos.Config(**config), backend=backend)
    except BaseException:
        folder.discard_if_empty()
        raise
    report = demos.record(folder, result)
    shown = console()
    shown.print(f"\n{demos.headline(result)}\n", style="bold")
    shown.print(demos.table(result))
    click.echo(f"\nReport: {report}")
    others = ", ".join(name for name in SCRIPTS if name != "classify")
    click.echo(f"Next:   miniray demo classify  (others: {others})")


# -- scripts --------------------------------------------------------------------------------------


def find_script(name: str) -> Path | None:
    """Return the path of a script such as ``examples/x.py``, or None if it isn't available.

    The script is looked up in the checkout first and then in the installed package.
    """
    checkout, installed = PACKAGE.parent.parent, PACKAGE / "demos" / "scripts"
    roots = [checkout] if (checkout / "pyproject.toml").exists() else []
    return next((r / name for r in [*roots, installed] if (r / name).exists()), None)


def find_missing_packages(modules: Sequence[str]) -> list[str]:
    """Return the package names of all ``modules`` that aren't installed."""
    return [_PACKAGES.get(m, m) for m in modules if importlib.util.find_spec(m) is None]


def exec_script(script: Path, args: Sequence[str]) -> None:
    """Print the command line of the script, and replace this process with the script.

    The script therefore receives all signals and determines the exit status.
    """
    shown = os.path.relpath(script) if script.is_relative_to(Path.cwd()) else str(script)
    click.echo(f"$ python {shlex.join([shown, *args])}", err=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, str(script), *args])
