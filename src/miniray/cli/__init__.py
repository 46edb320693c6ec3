"""The command line, with one command per file.

``main`` is the console script. If a command fails, ``main`` prints a one-line error message. With
``--debug``, it prints the traceback instead. The exit code is 0 for success, 1 for a failure, 2 for
incorrect usage and 130 for an interrupt. The module of a command is imported only when the command
runs. The ``completion`` command is defined in this file.
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

#: Help texts of the commands, by heading and by command. Each command is a function in the module
#: of the same name. The texts are defined here so that `miniray --help` doesn't import the modules.
GROUPS = {
    "Get started": {
        "demo": "Run a demo of actors, trainers, a pipeline or RL.",
        "status": "Show installed versions, hardware and available engines.",
    },
    "Launch": {
        "run": "Launch a script on several ranks and diagnose hangs.",
    },
    "Inspect runs": {
        "runs": "List, compare and delete runs.",
        "report": "Write an HTML report of a run.",
        "top": "Show a live view of the ranks of a run.",
        "dashboard": "Show a live view of runs in the browser.",
        "doctor": "Diagnose a run, its data or its speedup.",
    },
    "Other": {
        "data": "Inspect and repack data files, and manage the row cache.",
        "bench": "Run a benchmark from a checkout.",
        "completion": "Print a shell completion script.",
    },
}
COMMANDS = [name for group in GROUPS.values() for name in group]

#: Commands that pass their remaining arguments to a different program.
_FORWARDING_COMMANDS = ({"run"}, {"bench"}, {"doctor", "data"})

EPILOG = """\b
Examples:
  miniray demo                    run a short demo (about ten seconds)
  miniray run --nproc 4 train.py  replace torchrun
  miniray doctor latest           diagnose the newest run
  miniray report latest           write a report of the newest run
"""
_COMPLETION_EPILOG = """\b
Examples:
  miniray completion bash >> ~/.bashrc
  miniray completion zsh >> ~/.zshrc
  miniray completion fish > ~/.config/fish/completions/miniray.fish
"""


def print_definitions(ctx: click.Context, texts: Mapping[str, str]) -> None:
    """Print names and their descriptions in the same format as a help page."""
    formatter = ctx.make_formatter()
    with formatter.indentation():
        formatter.write_dl(list(texts.items()))
    click.echo(formatter.getvalue(), nl=False)


class Group(click.Group):
    """A command group that has a default subcommand and suggests corrections for misspelled names.

    For example, if the default subcommand of ``runs`` is ``list``, then ``miniray runs --json`` is
    equivalent to ``miniray runs list --json``.
    """

    default_command: str | None = None
    #: True if the help of the group also lists the options of the default subcommand.
    shows_default_options = True
    #: Options of the group itself. All other options belong to the default subcommand.
    group_options: tuple[str, ...] = ("-h", "--help")

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        is_completion = ctx.resilient_parsing and not args  # The shell requests the subcommands.
        if self.default_command and not is_completion and self.uses_default(ctx, args):
            args = [self.default_command, *args]
        return super().parse_args(ctx, args)

    def uses_default(self, ctx: click.Context, args: list[str]) -> bool:
        return not args or (args[0][:1] == "-" and args[0] not in self.group_options)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the options of the group and of the default subcommand.

        The options of the default subcommand are listed as well, because users may omit its name.
        """
        params = self.get_params(ctx)
        default = None
        if self.shows_default_options:
            default = self.get_command(ctx, self.default_command or "")
        if default is not None:
            params = [p for p in default.params if isinstance(p, click.Option)] + params
        with formatter.section("Options"):
            formatter.write_dl([record for p in params if (record := p.get_help_record(ctx))])
        self.format_commands(ctx, formatter)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        known = self.list_commands(ctx)
        if args and args[0] not in known and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], known, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"Commands: {', '.join(known)}."
            raise click.UsageError(f"No such command {args[0]!r}. {hint}", ctx)
        return super().resolve_command(ctx, args)


class LazyGroup(Group):
    """A group that imports the module of a command only when the command or its help is needed."""

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
    "--debug",
    is_flag=True,
    expose_value=False,
    help="Show tracebacks. Can also be placed after the command.",
)
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Run distributed training on this machine or on a Ray cluster."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@cli.command(epilog=_COMPLETION_EPILOG)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script for SHELL.

    The script completes commands, options and the names of runs in the runs/ directory. It takes
    effect when you open a new shell.
    """
    from click.shell_completion import get_completion_class

    completion_class = get_completion_class(shell)
    assert completion_class is not None
    script = completion_class(cli, {}, "miniray", "_MINIRAY_COMPLETE")
    # Don't call ``source()``, because it checks the version of bash on this machine, and the script
    # may be for a different machine.
    click.echo(script.source_template % script.source_vars())


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    args = list(sys.argv[1:] if argv is None else argv)
    args, debug = _extract_debug(args)
    for stream in (sys.stdout, sys.stderr):
        # If a character such as π can't be encoded, print a question mark instead of raising.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    sys.exit(_run(args, debug))


def _extract_debug(args: list[str]) -> tuple[list[str], bool]:
    """Remove ``--debug`` from the arguments of miniray, but not from those of the user's script.

    A click option isn't sufficient, because the flag must work both before and after the command
    name, and even when click itself raises an error.
    """
    words = [i for i, arg in enumerate(args) if not arg.startswith("-")][:2]
    end = args.index("--") if "--" in args else len(args)
    for commands in _FORWARDING_COMMANDS:
        if {args[i] for i in words[: len(commands)]} == commands:
            end = min(end, words[len(commands) - 1] + 2)
    kept = [arg for arg in args[:end] if arg != "--debug"]
    return kept + args[end:], len(kept) < end


def _run(args: list[str], debug: bool) -> int:
    try:
        result: Any = cli.main(args=args, prog_name="miniray", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except click.ClickException as error:
        message = error.format_message().replace("\n\t", " ")  # click prints one choice per line.
        _print_error(f"error: {message}")
        if isinstance(error, click.UsageError) and error.ctx is not None:
            hint = f"Run `{error.ctx.command_path} --help` for details."
            click.echo(f"{error.ctx.get_usage()}\n{hint}", err=True)
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        if debug:
            raise
        _print_error("interrupted")
        return 130
    except BrokenPipeError:
        # The program that reads the output, such as head, has exited. Redirect the output, so that
        # the interpreter doesn't fail when it flushes the stream at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if debug:
            raise
        _print_error(f"error: {_summarize(error)}")
        click.echo("(use --debug to show the traceback)", err=True)
        return 1


def _summarize(error: Exception) -> str:
    """Return the error message without the remote traceback that a ``TaskError`` contains."""
    if isinstance(error, TaskError):
        where = f"{error.function} failed in {error.actor} (pid {error.pid})"
        return f"{where}: {error.remote_traceback.rstrip().rpartition(chr(10))[2]}"
    return str(error) or type(error).__name__


def _print_error(message: str) -> None:
    click.echo(paint(message, "red", sys.stderr), err=True)
