"""Which run a user means, and which names a shell may offer."""

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
    help="Folder the runs are in.",
)

json_option = click.option("--json", "as_json", is_flag=True, help="Write JSON for a program.")


class NoRunError(click.ClickException):
    """There is no such run: what was looked for, and what to do."""

    exit_code = 2


def resolve(target: str, runs_dir: Path, *, folder: bool = False) -> Path:
    """A run's directory from its path, its name in ``runs_dir``, ``latest``, or a process id.

    ``NoRunError`` says what was looked for, and names what is near. A folder of runs is one of
    these errors too, unless ``folder`` will do.
    """
    from miniray.runs.listing import is_run, list_runs

    places = [Path(target), *([runs_dir / target] if Path(target).name == target else [])]
    folders = [place for place in places if place.is_dir()]
    if folders:  # of two of that name, the one that is a run
        found = next(filter(is_run, folders), folders[0])
        inside = [] if folder or is_run(found) else list_runs(found)
        if inside:
            raise NoRunError(
                f"{found} is a folder of runs: name one of them, like {inside[0].path}"
            )
        return found
    if target == "latest":
        runs = list_runs(runs_dir)
        if runs:
            return runs[0].path
        raise NoRunError(f"no runs in {runs_dir.absolute()}: {how_to_get_one(runs_dir)}")
    if target.isascii() and target.isdigit():
        return _find_run_of_process(int(target), runs_dir)
    import difflib

    known = names(runs_dir)
    if not known:
        hint = how_to_get_one(runs_dir)
        raise NoRunError(f"there is no run directory {target}, and no run in {runs_dir}: {hint}")
    near = difflib.get_close_matches(target, ["latest", *known], n=1)
    hint = f"did you mean {near[0]}?" if near else "`miniray runs` lists those there are"
    raise NoRunError(
        f"there is no run directory {target}, and no run of that name in {runs_dir}: {hint}"
    )


def how_to_get_one(runs_dir: Path) -> str:
    """What to do where ``runs_dir`` has no runs, in a line."""
    if runs_dir == RUNS_DIR:
        return "`miniray demo classify` makes one, --runs-dir looks elsewhere"
    return "is it the folder you meant with --runs-dir?"


def _find_run_of_process(pid: int, runs_dir: Path) -> Path:
    from miniray.doctor.diagnose import find_run_of_process

    try:
        return find_run_of_process(pid, runs_dir)
    except FileNotFoundError as error:
        raise NoRunError(str(error)) from error


def names(runs_dir: Path) -> list[str]:
    """Folders that look like runs, without reading any; none whose name a shell would not take."""
    try:
        found = [path.name for path in runs_dir.iterdir() if path.is_dir()]
    except OSError:
        return []
    return sorted(name for name in found if name[0] != "." and name.isprintable())


def complete_runs(
    ctx: click.Context, param: click.Parameter | None, incomplete: str
) -> list[CompletionItem]:
    """What the shell offers for a run: ``latest``, names, and paths as everywhere."""
    from click.shell_completion import CompletionItem

    runs_dir = ctx.params.get("runs_dir") or RUNS_DIR
    found = [name for name in ["latest", *names(Path(runs_dir))] if name.startswith(incomplete)]
    if found:
        return [CompletionItem(name) for name in found]
    return [CompletionItem(incomplete, type="dir")]


def complete_files(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """What the shell itself offers: a script, and whatever comes after it."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="file")]


#: The argument that names a run, and the one that names several.
run_argument = click.argument(
    "target", metavar="[RUN_DIR | PID | latest]", default="latest", shell_complete=complete_runs
)
runs_argument = click.argument(
    "targets", metavar="RUN...", nargs=-1, required=True, shell_complete=complete_runs
)
