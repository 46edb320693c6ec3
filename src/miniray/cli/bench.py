"""``miniray bench``: run the benchmarks of a checkout."""

from __future__ import annotations

import ast
from pathlib import Path

import click

from miniray.cli import print_definitions
from miniray.cli.demo import exec_script, find_script

EPILOG = """\b
Examples:
  miniray bench                    list the benchmarks
  miniray bench engine --quick     run a benchmark with one of its options
  miniray bench ps --help          show the options of a benchmark
"""


@click.command(
    epilog=EPILOG, context_settings={"ignore_unknown_options": True, "help_option_names": []}
)
@click.argument(
    "args",
    nargs=-1,
    type=click.UNPROCESSED,
    metavar="[NAME [ARGS]...]",
    shell_complete=lambda ctx, param, incomplete: [
        name for name in find_benchmarks() if name.startswith(incomplete)
    ],
)
@click.pass_context
def bench(ctx: click.Context, args: tuple[str, ...]) -> None:
    """Run the benchmark NAME with the arguments ARGS. Without NAME, list the benchmarks.

    You need a checkout of the repository to run a benchmark. Each benchmark compares miniray with
    the peers that are installed.
    """
    if args and args[0] in ("-h", "--help"):
        click.echo(ctx.get_help())
        return
    found = find_benchmarks()
    if not found:
        raise click.ClickException(
            "The installed package doesn't include the benchmarks. Clone the repository, run "
            "`pip install -e '.[bench]'` in it, and then `miniray bench`."
        )
    if not args:
        print_definitions(ctx, {name: text for name, (_, text) in found.items()})
    elif args[0] in found:
        exec_script(found[args[0]][0], args[1:])
    else:
        raise click.UsageError(f"No such benchmark {args[0]!r}. Benchmarks: {', '.join(found)}.")


def find_benchmarks() -> dict[str, tuple[Path, str]]:
    """Return a dict that maps the name of each benchmark to its path and its description."""
    found: dict[str, tuple[Path, str]] = {}
    folder = find_script("benchmarks")
    for path in sorted(folder.glob("*.py")) if folder is not None else ():
        text = path.read_text("utf-8")
        if '__name__ == "__main__"' not in text or path.stem.endswith("_rows"):
            continue
        docstring = ast.get_docstring(ast.parse(text)) or ""
        found[path.stem.replace("_", "-")] = (path, docstring.partition("\n")[0])
    return found
