"""Resolve the command-line arguments that identify runs, and provide shell completion for them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

RUNS_DIR = Path("runs")

runs_dir_option = click.option(
    "--runs-dir",
    type=click.Path(path_type=Path, file_okay=False),
    default=RUNS_DIR,
    show_default=True,
    help="Directory that contains the runs.",
)

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


class NoRunError(click.ClickException):
    """The run doesn't exist.

    The message names the directory that was searched and suggests how to find or create a run.
    """

    exit_code = 2


def resolve(target: str, runs_dir: Path, *, folder: bool = False) -> Path:
    """Return the directory of the run that ``target`` identifies.

    Args:
        target: The path or name of the run, ``latest``, or the ID of one of its processes.
        runs_dir: Directory that contains the runs.
        folder: If True, also accept a directory that contains runs.

    Raises:
        NoRunError: The run doesn't exist. If there is a run with a similar name, the message
            suggests that name.
    """
    from miniray.runs.listing import is_run, list_runs

    places = [Path(target), *([runs_dir / target] if Path(target).name == target else [])]
    folders = [place for place in places if place.is_dir()]
    if folders:  # Prefer a run to a plain directory of the same name.
        found = next(filter(is_run, folders), folders[0])
        inside = [] if folder or is_run(found) else list_runs(found)
        if inside:
            raise NoRunError(
                f"{found} contains several runs. Choose one of them, such as {inside[0].path}."
            )
        return found
    if target == "latest":
        runs = list_runs(runs_dir)
        if runs:
            return runs[0].path
        raise NoRunError(f"No runs in {runs_dir.absolute()}. {how_to_get_one(runs_dir)}")
    if target.isascii() and target.isdigit():
        return _find_run_of_process(int(target), runs_dir)
    import difflib

    known = names(runs_dir)
    if not known:
        hint = how_to_get_one(runs_dir)
        raise NoRunError(f"{target} isn't a run directory, and {runs_dir} has no runs. {hint}")
    near = difflib.get_close_matches(target, ["latest", *known], n=1)
    hint = f"Did you mean {near[0]}?" if near else "Run `miniray runs` to list all runs."
    raise NoRunError(f"{target} is neither a run directory nor a run in {runs_dir}. {hint}")


def how_to_get_one(runs_dir: Path) -> str:
    """Return a hint that tells the user how to proceed if ``runs_dir`` contains no runs."""
    if runs_dir == RUNS_DIR:
        return "Create one with `miniray demo classify`, or pass a different --runs-dir."
    return "Check --runs-dir."


def _find_run_of_process(pid: int, runs_dir: Path) -> Path:
    from miniray.doctor.diagnose import find_run_of_process

    try:
        return find_run_of_process(pid, runs_dir)
    except FileNotFoundError as error:
        raise NoRunError(str(error)) from error


def names(runs_dir: Path) -> list[str]:
    """Return the sorted names of the directories in ``runs_dir``.

    Hidden directories and names that a shell can't complete are omitted.
    """
    try:
        found = [path.name for path in runs_dir.iterdir() if path.is_dir()]
    except OSError:
        return []
    return sorted(name for name in found if name[0] != "." and name.isprintable())


def complete_runs(
    ctx: click.Context, param: click.Parameter | None, incomplete: str
) -> list[CompletionItem]:
    """Provide shell completion for ``latest``, run names and paths."""
    from click.shell_completion import CompletionItem

    runs_dir = ctx.params.get("runs_dir") or RUNS_DIR
    found = [name for name in ["latest", *names(Path(runs_dir))] if name.startswith(incomplete)]
    if found:
        return [CompletionItem(name) for name in found]
    return [CompletionItem(incomplete, type="dir")]


def complete_files(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Provide shell completion for paths of files."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="file")]


#: Arguments that identify one run, and one or more runs.
run_argument = click.argument(
    "target", metavar="[RUN_DIR | PID | latest]", default="latest", shell_complete=complete_runs
)
runs_argument = click.argument(
    "targets", metavar="RUN...", nargs=-1, required=True, shell_complete=complete_runs
)
