"""``miniray ...``: one command a file, imported when it is called; that of shells is here.

``main`` is the console script. It turns errors into one line and an exit code: 0 fine, 1 it failed,
2 wrong usage, 130 interrupted. ``--debug`` shows tracebacks instead.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click

from miniray import __version__
from miniray.cli.terminal import paint
from miniray.errors import TaskError

#: Heading → command → what the list of commands says about it. A command is the function of its
#: name in the module of its name; the texts are here so that listing them imports none.
GROUPS = {
    "Begin": {
        "demo": "See it work: actors, trainers, pipelines, RL.",
        "status": "Show versions, hardware and usable engines.",
    },
    "Run": {
        "run": "Run a script as ranks and say why when it is stuck.",
    },
    "Look at runs": {
        "runs": "List, compare and delete runs.",
        "report": "Write a run as one page, report.html.",
        "top": "Show the ranks of a run, live.",
        "dashboard": "Show runs live in the browser.",
        "doctor": "Say what is wrong with a run, its data, its speed.",
    },
    "More": {
        "bench": "Run a benchmark of a checkout.",
        "completion": "Print a shell's completion script.",
    },
}
COMMANDS = [name for group in GROUPS.values() for name in group]

#: Commands whose last arguments belong to another program.
_PASS_ON = ({"run"}, {"bench"}, {"doctor", "data"})

EPILOG = """\b
Examples:
  miniray demo                    see it work (about ten seconds)
  miniray run --nproc 4 train.py  instead of torchrun
  miniray doctor latest           what is wrong with the newest run
  miniray report latest           the newest run as a page
"""
_IN_SHELLS = """\b
Examples:
  miniray completion bash >> ~/.bashrc
  miniray completion zsh >> ~/.zshrc
  miniray completion fish > ~/.config/fish/completions/miniray.fish
"""


def listed(ctx: click.Context, texts: Mapping[str, str]) -> None:
    """Print names with what they mean, as help does."""
    formatter = ctx.make_formatter()
    with formatter.indentation():
        formatter.write_dl(list(texts.items()))
    click.echo(formatter.getvalue(), nl=False)


class Group(click.Group):
    """Commands with commands of their own: one may be meant by none, and near names are offered.

    ``miniray runs`` alone, or with options, is ``miniray runs list`` where that is ``usual``.
    """

    usual: str | None = None
    shows_usual = True  #: whether the group's help has the usual command's options
    #: Options of the group itself; any other belongs to the usual command.
    own_options: tuple[str, ...] = ("-h", "--help")

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        asked = ctx.resilient_parsing and not args  # a shell wants to know what may come next
        if self.usual is not None and not asked and self.means_usual(ctx, args):
            args = [self.usual, *args]
        return super().parse_args(ctx, args)

    def means_usual(self, ctx: click.Context, args: list[str]) -> bool:
        return not args or (args[0][:1] == "-" and args[0] not in self.own_options)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Those of the usual command too: they can be given without its name."""
        params = self.get_params(ctx)
        usual = self.get_command(ctx, self.usual or "") if self.shows_usual else None
        if usual is not None:
            params = [p for p in usual.params if isinstance(p, click.Option)] + params
        with formatter.section("Options"):
            formatter.write_dl([said for p in params if (said := p.get_help_record(ctx))])
        self.format_commands(ctx, formatter)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        known = self.list_commands(ctx)
        if args and args[0] not in known and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], known, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"There are: {', '.join(known)}."
            raise click.UsageError(f"No such command {args[0]!r}. {hint}", ctx)
        return super().resolve_command(ctx, args)


class LazyGroup(Group):
    """A group that knows its commands by name and imports one only to run it or show its help."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return COMMANDS

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self.commands or cmd_name not in COMMANDS:
            return super().get_command(ctx, cmd_name)
        module = importlib.import_module(f"miniray.cli.{cmd_name}")
        command: click.Command = getattr(module, cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        widest = max(map(len, COMMANDS))
        for heading, commands in GROUPS.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(widest), text) for name, text in commands.items()])


@click.command(
    cls=LazyGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=EPILOG,
)
@click.version_option(__version__, "-V", "--version", prog_name="miniray")
@click.option(
    "--debug", is_flag=True, expose_value=False, help="Show tracebacks; also after the command."
)
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Distributed training in Python, on this machine with nothing to start or on a Ray cluster."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@cli.command(epilog=_IN_SHELLS)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print SHELL's completion script.

    Commands, options and the names of runs under runs/ complete after that, in a new shell.
    """
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None
    script = found(cli, {}, "miniray", "_MINIRAY_COMPLETE")
    # Not ``source()``: bash's asks a bash of this machine for its version, and the script may be
    # meant for another one.
    click.echo(script.source_template % script.source_vars())


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    args = list(sys.argv[1:] if argv is None else argv)
    args, debug = _take_debug(args)
    for stream in (sys.stdout, sys.stderr):
        # A terminal that has no π gets a question mark, not a UnicodeEncodeError.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    sys.exit(_run(args, debug))


def _take_debug(args: list[str]) -> tuple[list[str], bool]:
    """Take ``--debug`` out of our arguments and leave it in those of the user's script.

    Done here and not by click: it must work before and after the command's name, and also when
    click itself is what fails.
    """
    words = [i for i, arg in enumerate(args) if not arg.startswith("-")][:2]
    ours = args.index("--") if "--" in args else len(args)
    for commands in _PASS_ON:
        if {args[i] for i in words[: len(commands)]} == commands:
            ours = min(ours, words[len(commands) - 1] + 2)
    kept = [arg for arg in args[:ours] if arg != "--debug"]
    return kept + args[ours:], len(kept) < ours


def _run(args: list[str], debug: bool) -> int:
    try:
        result: Any = cli.main(args=args, prog_name="miniray", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except click.ClickException as error:
        said = error.format_message().replace("\n\t", " ")  # click has a line for each choice
        _complain(f"error: {said}")
        if isinstance(error, click.UsageError) and error.ctx is not None:
            more = f"`{error.ctx.command_path} --help` says more."
            click.echo(f"{error.ctx.get_usage()}\n{more}", err=True)
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
        where = f"{error.function} failed in {error.actor} (pid {error.pid})"
        return f"{where}: {error.remote_traceback.rstrip().rpartition(chr(10))[2]}"
    return str(error) or type(error).__name__


def _complain(message: str) -> None:
    click.echo(paint(message, "red", sys.stderr), err=True)
