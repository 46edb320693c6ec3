"""What the checks of this folder share: a few hundred rows, and being a good neighbour."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

CONFIG: dict[str, Any] = {"max_prompt_length": 256, "filter_overlong_prompts": True}


def behave() -> None:
    """Stand back behind whatever else the machine is doing: a training may be running."""
    os.nice(10)
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@contextlib.contextmanager
def some_rows(data: Path | None, rows: int) -> Iterator[list[str]]:
    """Training files in ``data``; without it, a small set that is removed again."""
    if data is not None:
        found = sorted(map(str, data.glob("train-*.parquet")))
        if not found:
            raise click.ClickException(f"{data} has no train-*.parquet; make_data.py makes it")
        yield found
        return
    import make_data

    with tempfile.TemporaryDirectory(prefix="geoguessr-") as folder:
        files = make_data.write_set(
            folder, rows, rows_per_file=max(1, rows // 3), rows_per_group=32, processes=1
        )
        yield [str(path) for path in files["train"]]


def compare(parts: list[list[Any]], total: int) -> None:
    """Every row on exactly one rank, ranks within one row of each other. All ids are compared."""
    sizes = [len(part) for part in parts]
    assert sum(sizes) == total, f"{sum(sizes)} rows on all ranks together, not {total}: {sizes}"
    assert max(sizes) - min(sizes) <= 1, f"uneven: {sizes}"
    seen: dict[Any, int] = {}
    for rank, part in enumerate(parts):
        for number in part:
            other = seen.setdefault(number, rank)
            assert other == rank, f"row {number} is on ranks {other} and {rank}"
    assert len(seen) == total, f"{len(seen)} different rows, not {total}"


def on_an_engine(
    check: Callable[[list[str], int], list[str]], workers: int, description: str | None
) -> click.Command:
    """A command that runs ``check(files, workers)`` on an engine and shows what it found."""

    @click.command(help=description)
    @click.option("--backend", default="local", show_default=True, help="local, ray or inline.")
    @click.option("--workers", default=workers, show_default=True, type=click.IntRange(1))
    @click.option("--data", type=click.Path(exists=True, file_okay=False, path_type=Path))
    @click.option("--rows", default=300, show_default=True, help="Made if no --data is given.")
    def main(backend: str, workers: int, data: Path | None, rows: int) -> None:
        import miniray

        behave()
        with some_rows(data, rows) as files:
            miniray.init(num_workers=workers, backend=backend)
            try:
                for line in check(files, workers):
                    click.echo(f"ok   {line}")
            finally:
                miniray.shutdown()

    return main
