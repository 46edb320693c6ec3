"""Evaluate a filter once per run, divided among its ranks, and keep the answers.

Ranks don't communicate: the rows are cut into work items, and the rank that holds the lock of an
item evaluates it. If a rank is killed, the kernel releases its lock and a different rank takes the
item, as it takes those of a rank that hangs. Finished items are kept. When all are finished, one
rank joins them to the index, which every later start reads in milliseconds.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from miniray.data.filter import store
from miniray.data.filter.store import Bits
from miniray.data.filter.work import RowFilter, WorkItem, cut_work
from miniray.data.observers import preparing, report_preparation
from miniray.data.plan.selection import join_bits
from miniray.data.sources.base import Source
from miniray.data.sources.footers import stamp_file
from miniray.errors import DataError

_POLL = 0.02
_PATIENCE = 10.0  # seconds without a heartbeat before a different rank evaluates the item


class FilterRun:
    """Evaluates a filter on all files of a source.

    ``name`` identifies its answers. Without a name, they are neither kept nor shared, and every
    rank evaluates all rows.
    """

    def __init__(
        self,
        source: Source,
        function: Callable[[Any], bool],
        columns: Sequence[str] | None,
        name: str | None,
        *,
        rank: int = 0,
        world_size: int = 1,
        threads: int = 1,
    ) -> None:
        self._source, self._blocks = source, source.list_blocks()
        self._filter = RowFilter(source, function, columns)
        self._name = name
        self._rank, self._world_size, self._threads = rank, world_size, threads
        self._bar: Any = None
        #: Last heartbeat of each lock of a different rank, and when it was first seen.
        self._beats: dict[Path, tuple[int, float]] = {}
        self._index = self._parts = Path()
        self._index_stamp: Any = None
        self._is_index_complete = False
        files = range(len(source.files))
        self._identities = [source.identify_file(file) for file in files]
        self._names = [identity.partition("-")[0] for identity in self._identities]
        counts = np.bincount(self._blocks.file, self._blocks.rows, len(files))
        self._rows: list[int] = counts.astype(int).tolist()

    def compute_mask(self) -> Bits:
        """Return one bit per row of the source, from the index or by evaluating what is missing."""
        known: dict[int, Bits] = {}
        if self._name is None:
            with tempfile.TemporaryDirectory(prefix="miniray-filter-") as folder:
                self._run(Path(folder), known)
        else:
            beside = self._source.find_folder(0)
            for kept in store.list_folders(beside):
                known.update(self._read_known(kept / f"{self._name}.idx"))
            if len(known) < len(self._names):
                self._run(store.choose_folder(beside), known)
        return join_bits([known[file] for file in range(len(self._names))], self._rows)

    def _read_known(self, path: Path) -> dict[int, Bits]:
        """Return the answers of an index, without those of files that have changed."""
        entries = store.read(path)
        known = {}
        for file, (name, identity) in enumerate(zip(self._names, self._identities, strict=True)):
            entry = entries.get(name)
            if entry is not None and entry[:2] == (identity, self._rows[file]):
                known[file] = entry[2]
        return known

    # -- evaluation ------------------------------------------------------------------------------

    def _run(self, folder: Path, known: dict[int, Bits]) -> None:
        """Add the answers that are missing in ``known``, and keep them in ``folder``."""
        self._index, self._parts = folder / f"{self._name}.idx", folder / f"{self._name}.parts"
        workers = self._world_size * self._threads
        items = [item for item in cut_work(self._blocks, workers) if item.file not in known]
        begin, evaluated = time.monotonic(), 0
        self._bar = _create_bar(sum(item.rows for item in items)) if self._rank == 0 else None
        done: dict[WorkItem, Bits] = {}
        with preparing(), self._bar or contextlib.nullcontext():
            while len(done) < len(items):
                self._make_parts_folder()
                if self._is_joined():
                    self._remove_parts()  # this rank could have created the directory again
                    known.update(self._read_known(self._index))
                    return
                finished = self._evaluate_items(items, done)
                evaluated += finished
                if not finished and len(done) < len(items):
                    time.sleep(_POLL)
        by_file: dict[int, list[WorkItem]] = {
            file: [] for file in range(len(self._names)) if file not in known
        }
        for item in items:
            by_file[item.file].append(item)
        for file, parts in by_file.items():
            known[file] = join_bits([done[item] for item in parts], [item.rows for item in parts])
        self._save(known)
        seconds = time.monotonic() - begin
        if self._rank == 0 and sys.stderr is not None and (self._bar is not None or seconds > 1):
            kept = sum(int(np.unpackbits(bits).sum()) for bits in known.values())
            place = "" if self._name is None else f"; remembered in {self._index}"
            print(
                f"filter: {kept:,} of {sum(self._rows):,} rows kept,"
                f" {evaluated / max(seconds, 1e-9):,.0f} rows/s on rank 0{place}",
                file=sys.stderr,
                flush=True,
            )

    def _make_parts_folder(self) -> None:
        """Create the directory of items, which a run over other files removes if it is empty."""
        while not self._parts.is_dir():
            try:
                self._parts.mkdir()
            except OSError as error:
                # A different rank can create or remove the directory at the same time.
                if isinstance(error, FileExistsError) and not self._parts.is_file():
                    continue
                raise DataError(
                    f"The filter's answers can't be kept in {self._parts}: {error.strerror}."
                ) from error

    def _is_joined(self) -> bool:
        """Return whether a different rank has joined and removed all items."""
        stamp = stamp_file(str(self._index))
        if stamp != self._index_stamp:
            self._index_stamp = stamp
            self._is_index_complete = len(self._read_known(self._index)) == len(self._names)
        return self._is_index_complete

    def _evaluate_items(self, items: list[WorkItem], done: dict[WorkItem, Bits]) -> int:
        """Evaluate or look up work items, and return the number of evaluated rows.

        Each rank starts at a different item, so ranks share the work.
        """
        start = self._rank * len(items) // self._world_size
        missing = [item for item in items[start:] + items[:start] if item not in done]
        if self._threads == 1:
            return sum(self._evaluate_item(item, done) for item in missing)
        with ThreadPoolExecutor(self._threads) as pool:
            try:
                return sum(pool.map(lambda item: self._evaluate_item(item, done), missing))
            except BaseException:  # a row that fails, or Ctrl-C: stop the other threads
                self._filter.stopped = True
                raise

    def _evaluate_item(self, item: WorkItem, done: dict[WorkItem, Bits]) -> int:
        block, start, _ = item.pieces[0]
        path = self._parts / f"{self._identities[item.file]}-{block}-{start}.part"
        if self._find(item, path, done):
            return 0
        lock = path.with_suffix(".lock")
        with store.claim(lock) as is_held:
            if not is_held and not self._is_stuck(lock):
                return 0
            # Finished before the lock was taken, or even joined and removed.
            if self._find(item, path, done) or self._is_joined():
                return 0
            bits = self._filter.evaluate(item, lock)
            try:
                entry = self._identities[item.file], item.rows, bits
                store.write(path, {"part": entry}, durable=False)
            except DataError as error:
                # If the directory is gone, a different rank has joined all items.
                if not isinstance(error.__cause__, FileNotFoundError):
                    raise
            self._add_answer(item, bits, done)
            return item.rows

    def _is_stuck(self, lock: Path) -> bool:
        """Return whether the holder of a lock has had no heartbeat for a while."""
        try:
            beat = lock.stat().st_mtime_ns
        except OSError:  # removed with all others: the answer exists
            return False
        seen = self._beats.get(lock)
        if seen is None or seen[0] != beat:
            seen = self._beats[lock] = beat, time.monotonic()
            report_preparation()
        return time.monotonic() - seen[1] > _PATIENCE

    def _find(self, item: WorkItem, path: Path, done: dict[WorkItem, Bits]) -> bool:
        entry = store.read(path).get("part")
        if entry is None or entry[:2] != (self._identities[item.file], item.rows):
            return False
        self._add_answer(item, entry[2], done)
        return True

    def _add_answer(self, item: WorkItem, bits: Bits, done: dict[WorkItem, Bits]) -> None:
        done[item] = bits
        report_preparation()
        if self._bar is not None:
            self._bar.update(item.rows)

    def _save(self, known: dict[int, Bits]) -> None:
        """Add the answers to the index, which can have those of other files, and clean up."""
        with store.claim(self._index.with_suffix(".lock"), wait=True):
            if len(self._read_known(self._index)) < len(self._names):
                entries = store.read(self._index)
                for file, bits in known.items():
                    entries[self._names[file]] = self._identities[file], self._rows[file], bits
                store.write(self._index, entries)
        self._remove_parts()

    def _remove_parts(self) -> None:
        """Remove the items of these files. A different run can use those of other files."""
        with contextlib.suppress(OSError):  # a different rank can remove them at the same time
            for path in self._parts.iterdir():
                if path.name.lstrip(".").partition("-")[0] in self._names:
                    path.unlink(missing_ok=True)
            self._parts.rmdir()


def _create_bar(total: int) -> Any:
    """Create a progress bar of rows that ranks have filtered, or None without a terminal."""
    if sys.stderr is None or not sys.stderr.isatty():
        return None
    from tqdm import tqdm

    # Its own lock, because a forked child that is killed could keep a shared one.
    kind: Any = type("Bar", (tqdm,), {"monitor_interval": 0})
    kind.set_lock(threading.RLock())
    return kind(total=total, desc="filter", unit=" rows", file=sys.stderr)
