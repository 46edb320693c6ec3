"""grain over ArrayRecord: rows converted to records, MapDataset shuffled and sliced by rank."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

from data_peers.common import Batch, Run, rows_of


def prepare(run: Run) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    out = run.scratch / "grain"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    for part, path in enumerate(run.files):
        # A group of one record is what random access needs.
        writer = ArrayRecordWriter(str(out / f"{part:05d}.arrayrecord"), "group_size:1")
        for number, image in rows_of([path]):
            writer.write(number.to_bytes(8, "little") + image)
        writer.close()


class Loader:
    def __init__(self, run: Run) -> None:
        import grain

        files = sorted(map(str, (run.scratch / "grain").glob("*.arrayrecord")))
        source = grain.sources.ArrayRecordDataSource(files)
        rows = grain.MapDataset.source(source).shuffle(seed=run.seed)
        rows = rows[run.rank :: run.world_size]

        def row(record: bytes) -> tuple[int, Any]:
            return int.from_bytes(record[:8], "little"), run.images([record[8:]])[0]

        def batch(rows: Any) -> Batch:
            return [number for number, _ in rows], [image for _, image in rows]

        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2 * run.batch_size)
        batches = rows.map(row).to_iter_dataset(options).batch(run.batch_size, batch_fn=batch)
        self._batches = iter(batches)
        if run.resumed_ranks:
            self._batches.set_state(run.state)

    def __iter__(self) -> Iterator[Batch]:
        return self._batches

    def state(self) -> Any:
        return self._batches.get_state()
