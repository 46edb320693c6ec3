"""``miniray completion``: the script that teaches a shell our commands, options and runs."""

from __future__ import annotations

import click

EPILOG = """\b
Examples:
  miniray completion bash >> ~/.bashrc
  miniray completion zsh >> ~/.zshrc
  miniray completion fish > ~/.config/fish/completions/miniray.fish
"""


@click.command(epilog=EPILOG)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print SHELL's completion script.

    Commands, options and the names of runs under runs/ complete after that, in a new shell.
    """
    from click.shell_completion import get_completion_class

    from miniray.cli import cli

    found = get_completion_class(shell)
    assert found is not None
    script = found(cli, {}, "miniray", "_MINIRAY_COMPLETE")
    # Not ``source()``: bash's asks a bash of this machine for its version, and the script may be
    # meant for another one.
    click.echo(script.source_template % script.source_vars())
