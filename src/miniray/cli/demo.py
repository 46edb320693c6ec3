"""``miniray demo``: something to look at within seconds of installing.

All but the first are scripts that come with miniray. In a checkout these are in ``examples``,
``recipes`` and ``benchmarks`` beside ``src``; a wheel has the examples of the demos in
``miniray/demos/scripts``, and neither recipes nor benchmarks.
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
from miniray.cli import Group, listed
from miniray.cli.targets import runs_dir_option
from miniray.cli.terminal import console

EPILOG = """\b
Examples:
  miniray demo                    π by four actors (needs nothing else)
  miniray demo --actors 8 --seed 7
  miniray demo classify           train a classifier on four workers
  miniray demo gan --epochs 20    a demo's own options come after its name
  miniray demo geoguessr --quick  see it run; too short to learn anything
  miniray demo --list             which there are, and what they need
"""

#: The demo that is meant when none is named.
_DEFAULT = "pi"
PACKAGE = Path(miniray.__file__).resolve().parent
#: Import name → what to install, where the two differ.
_PACKAGES = {"sklearn": "scikit-learn", "PIL": "pillow"}


@dataclasses.dataclass(frozen=True)
class Script:
    """A demo that is an example of the repository, run as it is."""

    path: str
    text: str
    needs: tuple[str, ...] = ("torch", "sklearn", "matplotlib")
    extra: str = "examples"  #: what to install of miniray for it
    args: tuple[str, ...] = ()  #: before the user's


SCRIPTS = {
    "classify": Script(
        "examples/train_framework_demo.py",
        "An image classifier on four workers, weights averaged (half a minute).",
        args=("classification",),
    ),
    "gan": Script(
        "examples/distributed_gan_v2.py",
        "A GAN with two losses, synced every five epochs (a minute).",
    ),
    "ddp": Script(
        "examples/ddp_digits.py",
        "Gradients averaged in every step, two ranks (half a minute).",
    ),
    "pipeline": Script(
        "examples/pipeline_gpt.py",
        "A small GPT cut into four stages, 1F1B (a minute).",
        ("torch", "matplotlib"),
    ),
    "geoguessr": Script(
        "recipes/geoguessr/train_ppo.py",
        "A vision-language policy learns where photos were taken, by GRPO (three minutes).",
        ("torch", "pyarrow", "PIL", "matplotlib"),
        "data,examples",
    ),
}


class _Demo(Group):
    """``miniray demo X``: X is a demo; without one, or with options first, it is π."""

    usual = _DEFAULT
    shows_usual = False  # they are of one demo among six
    own_options = ("-h", "--help", "--list", "--json")

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [_DEFAULT, *SCRIPTS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in SCRIPTS:
            return _command(cmd_name, SCRIPTS[cmd_name])
        return super().get_command(ctx, cmd_name)


@click.group(cls=_Demo, epilog=EPILOG, invoke_without_command=True)
@click.option("--list", "wanted", is_flag=True, help="Show which demos can run here.")
@click.option("--json", "as_json", is_flag=True, help="With --list: for a program.")
@click.pass_context
def demo(ctx: click.Context, wanted: bool, as_json: bool) -> None:
    """See it work.

    Each demo is a small complete program whose source is meant to be read; it leaves a run, with a
    report, under runs/.
    """
    if not wanted:
        return
    rows = {_DEFAULT: ("π by parallel actors (ten seconds).", "")}
    rows |= {name: (script.text, _obstacle(script)) for name, script in SCRIPTS.items()}
    if as_json:
        found = {name: {"text": text, "obstacle": why} for name, (text, why) in rows.items()}
        click.echo(json.dumps(found, ensure_ascii=False))
        return
    listed(ctx, {k: f"{text} Not here: {why}" if why else text for k, (text, why) in rows.items()})


def _obstacle(script: Script) -> str:
    """Why it cannot run here, and what to do; "" where it can."""
    absent = missing(script.needs)
    if absent:
        return f"{', '.join(absent)} not installed: pip install 'miniray[{script.extra}]'"
    if find(script.path) is None:
        return f"this installation came without {script.path}: get the sources and run it there"
    return ""


def _command(name: str, script: Script) -> click.Command:
    """The command of a script: what it does not know is the script's own."""

    @click.command(
        name=name,
        short_help=script.text,
        context_settings={"ignore_unknown_options": True, "help_option_names": []},
    )
    @click.argument("args", nargs=-1, type=click.UNPROCESSED)
    def run_script(args: tuple[str, ...]) -> None:
        why = _obstacle(script)
        if why:
            raise click.ClickException(f"`miniray demo {name}` cannot run: {why}")
        path = find(script.path)
        assert path is not None
        become(path, [*script.args, *args])

    return run_script


@demo.command(name=_DEFAULT, epilog=EPILOG)
@click.option("--actors", type=click.IntRange(1, 256), default=4, show_default=True)
@click.option(
    "--batches",
    type=click.IntRange(1),
    default=400,
    show_default=True,
    help="Batches an actor draws.",
)
@click.option(
    "--batch-size",
    type=click.IntRange(1),
    default=1_000_000,
    show_default=True,
    help="Points in a batch.",
)
@click.option("--seed", type=click.IntRange(0), default=1, show_default=True)
@click.option(
    "--backend",
    type=click.Choice(["local", "inline", "ray"]),
    help="Where the actors run.  [default: local; MINIRAY_BACKEND overrides]",
)
@click.option("--name", help="Name of the run.  [default: monte-carlo-DATE-TIME]")
@runs_dir_option
def pi(backend: str | None, name: str | None, runs_dir: Path, **config: int) -> None:
    """Estimate π with parallel actors.

    Each actor throws darts at a square and reports its hits to one more actor that keeps the score.
    Ends with a table and a report in RUNS_DIR/NAME/report.html.
    """
    from miniray import demos
    from miniray.train.rundir import RunDirectory

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
    click.echo(f"\nreport: {report}")
    others = ", ".join(SCRIPTS)
    click.echo(f"next:   miniray demo classify  (others: {others.removeprefix('classify, ')})")


# -- scripts --------------------------------------------------------------------------------------


def find(name: str) -> Path | None:
    """``examples/x.py`` in the checkout we run from, else in the installed package."""
    checkout, installed = PACKAGE.parent.parent, PACKAGE / "demos" / "scripts"
    roots = [checkout] if (checkout / "pyproject.toml").exists() else []
    return next((r / name for r in [*roots, installed] if (r / name).exists()), None)


def missing(modules: Sequence[str]) -> list[str]:
    """Those of the packages that are not installed, by the names pip knows."""
    return [_PACKAGES.get(m, m) for m in modules if importlib.util.find_spec(m) is None]


def become(script: Path, args: Sequence[str]) -> None:
    """Run the script in place of this process: signals, exit status and terminal are its own."""
    shown = os.path.relpath(script) if script.is_relative_to(Path.cwd()) else str(script)
    click.echo(f"$ python {shlex.join([shown, *args])}", err=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, str(script), *args])
