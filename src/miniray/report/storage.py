"""The memory and the disk space that a run uses besides the memory of its ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from miniray.doctor.findings import size
from miniray.doctor.model import RunRecord
from miniray.report.series import to_float
from miniray.runs import files


class StorageUse(NamedTuple):
    """Memory or disk space that one part of a run uses."""

    part: str  #: such as "checkpoints"
    place: str  #: "shared memory" or "disk"
    nbytes: int
    details: str = ""


def measure_storage(run: RunRecord, events: Sequence[Mapping[str, Any]]) -> list[StorageUse]:
    """Return the use of snapshots, the object store, checkpoints and the row cache.

    Parts that aren't in use are omitted. If the run has ended, its memory has been freed, and the
    values are the last ones before its end.
    """
    found = [*_measure_snapshots(events), *_measure_object_store(run)]
    found += [*_measure_checkpoints(run.path / "checkpoints"), *_measure_row_caches(run)]
    return found


def read_events(run_dir: Path) -> Sequence[Mapping[str, Any]]:
    """Return the events of a run, or [] if they can't be read."""
    try:
        return files.read_records(run_dir / "events.jsonl")[0]
    except OSError:
        return []


def format_storage(found: Sequence[StorageUse]) -> str:
    """Format the use of all parts on one line."""
    return " · ".join(
        f"{use.part} {size(use.nbytes)} {'on' if use.place == 'disk' else 'in'} {use.place}"
        + (f" ({use.details})" if use.details else "")
        for use in found
    )


def _measure_snapshots(events: Sequence[Mapping[str, Any]]) -> Iterator[StorageUse]:
    sizes: dict[str, int] = {}
    for event in events:
        nbytes = int(to_float(event.get("bytes")) or 0)
        if event.get("event") == "snapshots_started":
            sizes["snapshots"] = nbytes
        elif event.get("event") == "snapshots_disabled":
            sizes.pop("snapshots", None)
        elif event.get("event") == "checkpoint_memory_reserved":
            sizes["copies for checkpoints"] = nbytes
    for part, nbytes in sizes.items():
        yield StorageUse(part, "shared memory", nbytes)


def _measure_object_store(run: RunRecord) -> Iterator[StorageUse]:
    # Each rank measures the store of its machine. The values differ only in time.
    by_host: dict[str, tuple[int, int, int, int]] = {}
    for rank in sorted(run, key=lambda rank: rank.heartbeat):
        if rank.notes.get("object_store") is not None:
            by_host[rank.host] = rank.notes["object_store"]
    if not by_host:
        return
    memory, peak, limit, disk = (sum(values) for values in zip(*by_host.values(), strict=True))
    if peak:
        details = f"peak {size(peak)}, limit {size(limit)}"
        yield StorageUse("object store", "shared memory", memory, details)
    if disk:
        yield StorageUse("object store", "disk", disk)


def _measure_checkpoints(directory: Path) -> Iterator[StorageUse]:
    try:
        count = sum(entry.is_dir() and entry.name[0] != "." for entry in os.scandir(directory))
    except OSError:
        return
    nbytes = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                nbytes += os.lstat(os.path.join(folder, name)).st_size
            except OSError:  # deleted in the meantime
                continue
    if nbytes:
        yield StorageUse("checkpoints", "disk", nbytes, f"{count} saved")


def _measure_row_caches(run: RunRecord) -> Iterator[StorageUse]:
    known = {
        (rank.host, path): nbytes
        for rank in run
        for path, nbytes in rank.notes.get("row_caches", ())
    }
    if known:
        folders = dict.fromkeys(str(Path(path).parent) for _, path in known)
        yield StorageUse("row cache", "disk", sum(known.values()), ", ".join(folders))
