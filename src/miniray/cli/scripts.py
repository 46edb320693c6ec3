"""Scripts that come with miniray: where they are, and handing the process over to one.

In a checkout they are in ``examples``, ``recipes`` and ``benchmarks`` beside ``src``. A wheel has
the examples of the demos in ``miniray/demos/scripts``, and neither recipes nor benchmarks.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import click

import miniray

PACKAGE = Path(miniray.__file__).resolve().parent
#: Import name → what to install, where the two differ.
_PACKAGES = {"sklearn": "scikit-learn", "PIL": "pillow"}


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
