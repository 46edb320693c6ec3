"""``miniray bench``: the benchmarks of a checkout."""

from __future__ import annotations

import ast
from pathlib import Path

import click

from miniray.cli import listed
from miniray.cli.demo import become, find

EPILOG = """\b
Examples:
  miniray bench                    which there are
  miniray bench engine --quick     one of them, with its own options
  miniray bench ps --help          what it can do
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
        name for name in benchmarks() if name.startswith(incomplete)
    ],
)
@click.pass_context
def bench(ctx: click.Context, args: tuple[str, ...]) -> None:
    """Run the benchmark NAME of a checkout with its own ARGS; without a name, list them.

    Benchmarks come with the sources only, and compare with what is installed of miniray's peers.
    """
    if args and args[0] in ("-h", "--help"):
        click.echo(ctx.get_help())
        return
    found = benchmarks()
    if not found:
        raise click.ClickException(
            "benchmarks are not part of the installed package: get the sources (pip download "
            "--no-binary miniray miniray, or a clone) and run `miniray bench` from there after "
            "`pip install -e '.[bench]'`"
        )
    if not args:
        listed(ctx, {name: text for name, (_, text) in found.items()})
    elif args[0] in found:
        become(found[args[0]][0], args[1:])
    else:
        raise click.UsageError(f"There is no benchmark {args[0]!r}; there are: {', '.join(found)}")


def benchmarks() -> dict[str, tuple[Path, str]]:
    """Name → (script, its first line), of the checkout's files that can be run; {} without one."""
    found: dict[str, tuple[Path, str]] = {}
    folder = find("benchmarks")
    for path in sorted(folder.glob("*.py")) if folder is not None else ():
        text = path.read_text("utf-8")
        if '__name__ == "__main__"' not in text or path.stem.endswith("_rows"):
            continue
        said = ast.get_docstring(ast.parse(text)) or ""
        found[path.stem.replace("_", "-")] = (path, said.partition("\n")[0])
    return found
