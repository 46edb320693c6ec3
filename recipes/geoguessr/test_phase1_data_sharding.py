"""Phase 1: every row on exactly one worker, whatever the numbers.

    python recipes/geoguessr/test_phase1_data_sharding.py [--data DIR] [--rows 301]

Also by pytest. Runs beside a training: low priority, one process, a few hundred rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checks
import click
from byte_tokenizer import ByteTokenizer
from geoguessr_dataset_distributed import GeoguessrRLHFDatasetDistributed

from miniray.data import shard_indices
from miniray.errors import DataError


def shards(files: list[str], world_size: int, max_samples: int = -1, **config: Any) -> list[Any]:
    return [
        GeoguessrRLHFDatasetDistributed(
            files,
            ByteTokenizer(),
            {**checks.CONFIG, **config},
            max_samples=max_samples,
            rank=rank,
            world_size=world_size,
        )
        for rank in range(world_size)
    ]


def check_example() -> str:
    """2099 rows on 2 workers, as the plan has them."""
    first, second = shard_indices(2099, 0, 2), shard_indices(2099, 1, 2)
    assert (first[0], len(first)) == (0, 1050)
    assert (second[0], len(second)) == (1050, 1049)
    return "2099 on 2: [0:1050] and [1050:2099]"


def check_shards(files: list[str], total: int) -> str:
    """Sizes even, all ids disjoint, nothing lost; also with more workers than rows."""
    worlds = (1, 2, 3, 8, total + 5)
    for world_size in worlds:
        parts = shards(files, world_size)
        checks.compare([list(part.row_ids) for part in parts], total)
    return f"{total} rows on {', '.join(map(str, worlds))} workers: all ids disjoint"


def check_max_samples(files: list[str], total: int) -> str:
    """The union over all workers is exactly ``max_samples`` rows, with and without a seed."""
    wanted = total // 3
    for config in ({}, {"shuffle": True, "seed": 1}, {"shuffle": True, "seed": 2}):
        parts = shards(files, 4, wanted, **config)
        checks.compare([list(part.row_ids) for part in parts], wanted)
    return f"max_samples={wanted} on 4 workers: {wanted} different rows, not one more"


def check_rows(files: list[str], total: int) -> str:
    """What is delivered is what the ids say: read every row and compare its own number."""
    seen = [[part[i]["index"] for i in range(len(part))] for part in shards(files, 2)]
    checks.compare(seen, total)
    return f"{total} rows read, numbers as in the files"


def check_filter(files: list[str], total: int) -> str:
    """Filter prompts once: a second start reads the answers. Dropping all rows is an error."""
    start = time.monotonic()
    assert sum(len(part) for part in shards(files, 2)) == total
    taken = time.monotonic() - start
    for part in shards(files, 2, max_prompt_length=20):
        message = ""
        try:
            part.prepare()
        except DataError as error:
            message = str(error)
        assert f"all {total} rows" in message
    return f"filter answered from its index in {1000 * taken:.0f} ms"


CHECKS: tuple[Callable[[list[str], int], str], ...] = (
    lambda files, total: check_example(),
    check_shards,
    check_max_samples,
    check_rows,
    check_filter,
)


def test_phase1(files: list[str]) -> None:
    total = sum(len(part) for part in shards(files, 1))
    for check in CHECKS:
        check(files, total)


@click.command(help=__doc__)
@click.option("--data", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--rows", default=301, show_default=True, help="Made if no --data is given.")
def main(data: Path | None, rows: int) -> None:
    checks.behave()
    with checks.some_rows(data, rows) as files:
        total = sum(len(part) for part in shards(files, 1))
        for check in CHECKS:
            click.echo(f"ok   {check(files, total)}")


if __name__ == "__main__":
    main()
