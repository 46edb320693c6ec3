"""Commands with commands of their own: one may be meant by none, and near names are offered."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

import click


def listed(ctx: click.Context, texts: Mapping[str, str]) -> None:
    """Print names with what they mean, as help does."""
    formatter = ctx.make_formatter()
    with formatter.indentation():
        formatter.write_dl(list(texts.items()))
    click.echo(formatter.getvalue(), nl=False)


class Group(click.Group):
    """``miniray runs`` alone, or with options, is ``miniray runs list`` where that is ``usual``."""

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
