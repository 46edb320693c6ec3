"""``miniray ...``: one command a file, imported when it is called.

``main`` is the console script. It turns errors into one line and an exit code: 0 fine, 1 it failed,
2 wrong usage, 130 interrupted. ``--debug`` shows tracebacks instead.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from miniray import __version__
from miniray.errors import TaskError

#: Command → (where it lives, what the list of commands says about it). The text is here so that
#: listing the commands imports none of them.
COMMANDS = {
    "demo": ("miniray.cli.demo:demo", "Estimate π with four actors and write a report."),
    "doctor": ("miniray.cli.doctor:doctor", "Say what is wrong with a run, its data or its speed."),
    "run": ("miniray.cli.run:run", "Run a script as several ranks and say why when it is stuck."),
    "status": ("miniray.cli.status:status", "Show versions, hardware and usable engines."),
    "top": ("miniray.cli.top:top", "Show the ranks of a run, live."),
}

EPILOG = """\b
Examples:
  miniray demo                    see it work (about ten seconds)
  miniray demo --backend inline   the same in one process, for a debugger
  miniray status --json           what this machine offers, for a program
"""


class LazyGroup(click.Group):
    """A group that knows its commands by name and imports one only to run it or show its help."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.command(
    cls=LazyGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=EPILOG,
)
@click.version_option(__version__, prog_name="miniray")
@click.option(
    "--debug", is_flag=True, expose_value=False, help="Show tracebacks; also after the command."
)
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Ray's actor API on one machine with nothing to start, and training on top of it."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    args = list(sys.argv[1:] if argv is None else argv)
    # Taken out here and not by click: it must work before and after the command's name, and also
    # when click itself is what fails.
    debug = "--debug" in args
    args = [a for a in args if a != "--debug"]
    for stream in (sys.stdout, sys.stderr):
        # A terminal that has no π gets a question mark, not a UnicodeEncodeError.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    sys.exit(_run(args, debug))


def _run(args: list[str], debug: bool) -> int:
    try:
        result: Any = cli.main(args=args, prog_name="miniray", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        if debug:
            raise
        _complain("interrupted")
        return 130
    except BrokenPipeError:
        # The reader (head, less) went away. Nothing more can be said; keep the interpreter from
        # trying to flush into it once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:  # the last resort before the user's eyes
        if debug:
            raise
        _complain(f"error: {_in_short(error)}")
        click.echo("(--debug shows where this comes from)", err=True)
        return 1


def _in_short(error: Exception) -> str:
    """The message without a traceback; that of a remote error is part of its text."""
    if isinstance(error, TaskError):
        where = f"{error.function} failed in {error.worker} (pid {error.pid})"
        return f"{where}: {error.remote_traceback.rstrip().rpartition(chr(10))[2]}"
    return str(error) or type(error).__name__


def _complain(message: str) -> None:
    coloured = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    click.echo(click.style(message, fg="red") if coloured else message, err=True)
