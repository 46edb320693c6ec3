"""``miniray demo``: something to look at within seconds of installing."""

from __future__ import annotations

from pathlib import Path

import click

EPILOG = """\b
Examples:
  miniray demo
  miniray demo --actors 8 --batches 50 --seed 7
  miniray demo --backend inline --batches 10
"""


@click.command(epilog=EPILOG)
@click.option("--actors", type=click.IntRange(1, 256), default=4, show_default=True)
@click.option(
    "--batches",
    type=click.IntRange(1),
    default=400,
    show_default=True,
    help="Batches an actor draws.",
)
@click.option(
    "--batch-size",
    type=click.IntRange(1),
    default=1_000_000,
    show_default=True,
    help="Points in a batch.",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option(
    "--backend",
    type=click.Choice(["local", "inline", "ray"]),
    help="Where the actors run.  [default: local; MINIRAY_BACKEND overrides]",
)
@click.option("--name", help="Name of the run.  [default: monte-carlo-DATE-TIME]")
@click.option(
    "--runs-dir",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("runs"),
    show_default=True,
    help="Folder the run's own folder goes into.",
)
def demo(
    actors: int,
    batches: int,
    batch_size: int,
    seed: int,
    backend: str | None,
    name: str | None,
    runs_dir: Path,
) -> None:
    """Estimate π with parallel actors.

    Each actor throws darts at a square and reports its hits to one more actor that keeps the score.
    Ends with a table and a report in RUNS_DIR/NAME/report.html.
    """
    from rich.console import Console

    from miniray.demos import monte_carlo
    from miniray.train.rundir import RunDirectory

    config = monte_carlo.Config(actors, batches, batch_size, seed)
    folder = RunDirectory.open(None, name, "monte-carlo", root=runs_dir).path
    try:
        result = monte_carlo.run(config, backend=backend)
    except BaseException:
        folder.rmdir()  # still empty: nothing came of this run
        raise
    report = monte_carlo.write_report(folder, result)
    console = Console(highlight=False)
    console.print(f"\n{monte_carlo.headline(result)}\n", style="bold")
    console.print(monte_carlo.table(result))
    click.echo(f"\nreport: {report}")
