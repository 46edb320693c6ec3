"""Write a GeoGuessr set of any size as parquet, the same bytes for the same seed.

    python recipes/geoguessr/make_data.py out/ --rows 20000 --test-rows 1000 --seed 0

Rows are drawn one by one from (seed, split, row number), so neither the number of processes nor
the size of the files changes a row. Memory stays at a few row groups for each process, whatever the
size of the set. A file appears under its name when it is whole; a run that is interrupted leaves
only whole files and can be started again with --overwrite.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import scenes
from tqdm import tqdm

from miniray.limits import cpu_count

QUESTION = (
    "<image>\nWhere was this photo taken? Think about vegetation, light, buildings and landscape, "
    "then give latitude and longitude in degrees as \\boxed{lat, lon}."
)
SPLITS = {"train": 0, "test": 1}

SCHEMA = pa.schema(
    [
        ("data_source", pa.string()),
        ("prompt", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("images", pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))),
        ("ability", pa.string()),
        (
            "reward_model",
            pa.struct(
                [
                    ("style", pa.string()),
                    ("ground_truth", pa.struct([("lat", pa.float64()), ("lon", pa.float64())])),
                ]
            ),
        ),
        (
            "extra_info",
            pa.struct(
                [
                    ("split", pa.string()),
                    ("index", pa.int64()),
                    ("month", pa.int32()),
                    ("landmark", pa.string()),
                ]
            ),
        ),
    ]
)


def make_row(seed: int, split: str, index: int) -> dict[str, Any]:
    """Row ``index`` of ``split``: a function of its arguments and nothing else."""
    key = np.random.SeedSequence([seed, SPLITS[split], index])
    rng = np.random.Generator(np.random.PCG64(key))
    place = scenes.sample_place(rng)
    picture = scenes.encode(scenes.render(place, rng))
    return {
        "data_source": "geoguessr",
        "prompt": [{"role": "user", "content": QUESTION}],
        "images": [{"bytes": picture, "path": f"{split}-{index:09d}.jpg"}],
        "ability": "geolocation",
        "reward_model": {
            "style": "rule",
            "ground_truth": {"lat": place.lat, "lon": place.lon},
        },
        "extra_info": {
            "split": split,
            "index": index,
            "month": place.month,
            "landmark": place.landmark,
        },
    }


def make_rows(seed: int, split: str, start: int, stop: int) -> pa.RecordBatch:
    """Rows ``start`` to ``stop`` as one batch: what a process is asked for at a time."""
    rows = [make_row(seed, split, index) for index in range(start, stop)]
    return pa.RecordBatch.from_pylist(rows, schema=SCHEMA)


def write_set(
    out: str | os.PathLike[str],
    rows: int,
    test_rows: int = 0,
    *,
    seed: int = 0,
    rows_per_file: int = 2500,
    rows_per_group: int = 256,
    processes: int | None = None,
    overwrite: bool = False,
    progress: bool = False,
) -> dict[str, list[Path]]:
    """Write both splits into ``out`` and return the files of each, in order.

    Raises ``FileExistsError`` if ``out`` already has a set in it and ``overwrite`` is not set,
    before anything is written.
    """
    if min(rows, test_rows) < 0 or seed < 0 or rows_per_file < 1 or rows_per_group < 1:
        raise ValueError("rows and seed must be 0 or more, rows_per_file and _group 1 or more")
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    old = [path for split in SPLITS for path in folder.glob(f"{split}-*.parquet*")]
    if old and not overwrite:
        raise FileExistsError(f"{folder} already has {old[0].name}; --overwrite replaces the set")
    for path in old:
        path.unlink()

    workers = processes or cpu_count()
    with (
        _pool(workers) if workers > 1 else contextlib.nullcontext() as pool,
        tqdm(total=rows + test_rows, unit=" images", disable=not progress) as bar,
    ):
        written = {}
        for split, count in (("train", rows), ("test", test_rows)):
            files = _split_spans(count, rows_per_file, rows_per_group)
            spans = itertools.chain.from_iterable(files)
            batches = _in_order(pool, 2 * workers, seed, split, spans)
            written[split] = [
                _write_file(
                    folder / f"{split}-{number:05d}-of-{len(files):05d}.parquet",
                    itertools.islice(batches, len(groups)),
                    bar,
                )
                for number, groups in enumerate(files)
            ]
        return written


def _split_spans(rows: int, per_file: int, per_group: int) -> list[list[tuple[int, int]]]:
    """For each file the row groups in it, as (start, stop) of the whole split."""
    return [
        [
            (start, min(start + per_group, first + per_file, rows))
            for start in range(first, min(first + per_file, rows), per_group)
        ]
        for first in range(0, rows, per_file)
    ]


def _write_file(path: Path, batches: Iterable[pa.RecordBatch], bar: tqdm) -> Path:
    unfinished = path.with_suffix(".parquet.tmp")
    # Images are compressed already; doing it again costs time and saves nothing.
    with pq.ParquetWriter(unfinished, SCHEMA, compression="none", use_dictionary=False) as file:
        for batch in batches:
            file.write_batch(batch, row_group_size=batch.num_rows)
            bar.update(batch.num_rows)
    unfinished.replace(path)
    return path


def _in_order(
    pool: ProcessPoolExecutor | None,
    limit: int,
    seed: int,
    split: str,
    spans: Iterable[tuple[int, int]],
) -> Iterator[pa.RecordBatch]:
    """Batches in the order of ``spans``, with at most ``limit`` under way in the pool."""
    if pool is None:
        for span in spans:
            yield make_rows(seed, split, *span)
        return
    under_way: deque[Future[pa.RecordBatch]] = deque()
    for span in spans:
        if len(under_way) == limit:
            yield under_way.popleft().result()
        under_way.append(pool.submit(make_rows, seed, split, *span))
    while under_way:
        yield under_way.popleft().result()


def _pool(processes: int) -> ProcessPoolExecutor:
    # Fresh interpreters: pyarrow has threads in this one, and a fork would copy their locks.
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(processes, mp_context=context, initializer=_end_with_parent)


def _end_with_parent() -> None:
    """A process of the pool would wait for work for ever if its parent were killed."""

    def watch() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@click.command(help="Write a GeoGuessr set of ROWS training and TEST-ROWS test rows into OUT.")
@click.argument("out", type=click.Path(file_okay=False, path_type=Path))
@click.option("--rows", default=20_000, show_default=True, type=click.IntRange(0))
@click.option("--test-rows", default=1_000, show_default=True, type=click.IntRange(0))
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0))
@click.option("--rows-per-file", default=2_500, show_default=True, type=click.IntRange(1))
@click.option("--rows-per-group", default=256, show_default=True, type=click.IntRange(1))
@click.option("--processes", default=None, type=click.IntRange(1), help="All cores by default.")
@click.option("--overwrite", is_flag=True, help="Replace a set that is already there.")
@click.option("--quiet", is_flag=True, help="No progress bar.")
def main(out: Path, quiet: bool, **options: Any) -> None:
    free = shutil.disk_usage(out.parent if out.parent.exists() else Path()).free
    needed = (options["rows"] + options["test_rows"]) * 32_000
    if needed > free:
        raise click.ClickException(f"about {needed / 1e9:.1f} GB needed, {free / 1e9:.1f} GB free")
    start = time.monotonic()
    try:
        files = write_set(out, **options, progress=not quiet)
    except FileExistsError as error:
        raise click.ClickException(str(error)) from None
    taken = time.monotonic() - start
    total = options["rows"] + options["test_rows"]
    size = sum(path.stat().st_size for paths in files.values() for path in paths)
    counts = ", ".join(f"{len(paths)} {split} files" for split, paths in files.items())
    click.echo(f"{out}: {counts}, {size / 1e6:,.0f} MB, {60 * total / taken:,.0f} images/minute")


if __name__ == "__main__":
    main()
