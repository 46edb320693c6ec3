"""Evaluate a filter once per run, divided among its ranks, and keep the answers.

Ranks don't communicate: the rows are cut into work items, and the rank that holds the lock of an
item evaluates it. If a rank is killed, the kernel releases its lock and a different rank takes the
item, as it takes those of a rank that hangs. Finished items are kept. When all are finished, one
rank joins them to the index, which every later start reads in milliseconds.
"""

from __future__ import annotations

import contextlib
import sys
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
        self._source = source
        self._filter = RowFilter(source, function, columns)
        self._rank, self._world_size, self._threads = rank, world_size, threads
        self._blocks = source.list_blocks()
        self._name = name
        self._bar: FilterBar | None = None
        self._beats: dict[
            Path, tuple[int, float]
        ] = {}  # of other ranks: the last one, and when it was first seen
        self._path = self._parts_folder = Path()  # set if something must be written
        self._looked: tuple[tuple[int, int] | None, bool] = (
            None,
            False,
        )  # at the index: its stamp, whether complete
        files = range(len(source.files))
        self._identities = [source.identify_file(file) for file in files]
        self._names = [identity.partition("-")[0] for identity in self._identities]
        self._rows = [0] * len(files)
        for file, rows in zip(self._blocks.file.tolist(), self._blocks.rows.tolist(), strict=True):
            self._rows[file] += rows

    def compute_mask(self) -> Bits:
        """Return one bit per row of the source, from the index or by evaluating what is missing."""
        known: dict[int, Bits] = {}
        if self._name is not None:
            beside = self._source.find_folder(0) if self._names else None
            for folder in store.list_folders(beside):
                known.update(self._read_known(folder / f"{self._name}.idx"))
            if len(known) < len(self._names):
                folder = store.choose_folder(beside)
                self._path = folder / f"{self._name}.idx"
                self._parts_folder = folder / f"{self._name}.parts"
        if len(known) < len(self._names):
            with preparing():
                known = self._run(known)
        return join_bits([known[file] for file in range(len(self._names))], self._rows)

    def _read_known(self, path: Path | None = None) -> dict[int, Bits]:
        """Return the answers of an index, without those of files that have changed."""
        entries = store.read(path or self._path)
        known = {}
        for file, (name, identity) in enumerate(zip(self._names, self._identities, strict=True)):
            entry = entries.get(name)
            if entry is not None and entry[:2] == (identity, self._rows[file]):
                known[file] = entry[2]
        return known

    # -- evaluation ------------------------------------------------------------------------------

    def _run(self, known: dict[int, Bits]) -> dict[int, Bits]:
        workers = self._world_size * self._threads
        todo = [part for part in cut_work(self._blocks, workers) if part.file not in known]
        bar = FilterBar(sum(part.rows for part in todo)) if self._rank == 0 else None
        self._bar = bar
        done: dict[WorkItem, Bits] = {}
        counted = 0
        try:
            while len(done) < len(todo):
                if self._name is not None:
                    self._make_parts_folder()
                    if self._is_joined():
                        self._remove_parts()  # this rank could have created the directory again
                        return self._read_known()
                finished = self._evaluate_items(todo, done)
                counted += finished
                if not finished and len(done) < len(todo):
                    time.sleep(_POLL)
        finally:
            if bar is not None:
                bar.close()
        found = {**known, **self._join_items(todo, done)}
        if self._name is not None:
            self._save(found)
        if bar is not None:
            kept = sum(int(np.unpackbits(bits).sum()) for bits in found.values())
            bar.summary(sum(self._rows), kept, counted, None if self._name is None else self._path)
        return found

    def _make_parts_folder(self) -> None:
        """Create the directory of items, which a run over other files removes if it is empty."""
        try:
            self._parts_folder.mkdir(exist_ok=True)
        except OSError as error:
            raise DataError(
                f"the filter's parts cannot be kept in {self._parts_folder}: {error.strerror}"
            ) from error

    def _is_joined(self) -> bool:
        """Return whether a different rank has joined and removed all items."""
        try:
            found = self._path.stat()
        except OSError:
            return False
        stamp = found.st_ino, found.st_mtime_ns
        if self._looked[0] != stamp:
            self._looked = stamp, len(self._read_known()) == len(self._names)
        return self._looked[1]

    def _evaluate_items(self, todo: list[WorkItem], done: dict[WorkItem, Bits]) -> int:
        """Evaluate or look up work items, and return the number of evaluated rows.

        Each rank starts at a different item, so ranks share the work.
        """
        start = self._rank * len(todo) // self._world_size
        open_parts = [part for part in todo[start:] + todo[:start] if part not in done]
        if self._threads == 1:
            return sum(self._evaluate_item(part, done) for part in open_parts)
        with ThreadPoolExecutor(self._threads) as pool:
            try:
                return sum(pool.map(lambda part: self._evaluate_item(part, done), open_parts))
            except BaseException:  # a row that fails, or Ctrl-C: stop the other threads
                self._filter.stopped = True
                raise

    def _evaluate_item(self, part: WorkItem, done: dict[WorkItem, Bits]) -> int:
        if self._name is None:
            self._add_answer(part, self._filter.evaluate(part, None), done)
            return part.rows
        block, start, _ = part.pieces[0]
        path = self._parts_folder / f"{self._identities[part.file]}-{block}-{start}.part"
        if self._find(part, path, done):
            return 0
        lock = path.with_suffix(".lock")
        with store.claim(lock) as ours:
            if not ours and not self._is_stuck(lock):
                return 0
            # Finished before the lock was taken, or even joined and removed.
            if self._find(part, path, done) or self._is_joined():
                return 0
            bits = self._filter.evaluate(part, lock)
            try:
                entry = self._identities[part.file], part.rows, bits
                store.write(path, {"part": entry}, durable=False)
            except DataError as error:
                # If the directory is gone, a different rank has joined all items.
                if not isinstance(error.__cause__, FileNotFoundError):
                    raise
            self._add_answer(part, bits, done)
            return part.rows

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

    def _find(self, part: WorkItem, path: Path, done: dict[WorkItem, Bits]) -> bool:
        entry = store.read(path).get("part")
        if entry is None or entry[:2] != (self._identities[part.file], part.rows):
            return False
        self._add_answer(part, entry[2], done)
        return True

    def _add_answer(self, part: WorkItem, bits: Bits, done: dict[WorkItem, Bits]) -> None:
        done[part] = bits
        report_preparation()
        if self._bar is not None:
            self._bar.update(part.rows)

    def _join_items(self, parts: Sequence[WorkItem], done: dict[WorkItem, Bits]) -> dict[int, Bits]:
        by_file: dict[int, list[np.ndarray[Any, Any]]] = {}
        for part in parts:
            unpacked = np.unpackbits(done[part], count=part.rows, bitorder="little")
            by_file.setdefault(part.file, []).append(unpacked)
        found = {
            file: np.packbits(np.concatenate(bits), bitorder="little")
            for file, bits in by_file.items()
        }
        empty = np.empty(0, dtype=np.uint8)
        return {
            **{file: empty for file in range(len(self._names)) if not self._rows[file]},
            **found,
        }

    def _save(self, found: dict[int, Bits]) -> None:
        """Add the answers to the index, which can have those of other files, and clean up."""
        with store.claim(self._path.with_suffix(".lock"), wait=True):
            if len(self._read_known()) < len(self._names):
                entries = store.read(self._path)
                for file, bits in found.items():
                    entry = (self._identities[file], self._rows[file], bits)
                    entries[self._names[file]] = entry
                store.write(self._path, entries)
        self._remove_parts()

    def _remove_parts(self) -> None:
        """Remove the items of these files. A different run can use those of other files."""
        with contextlib.suppress(OSError):  # a different rank can remove them at the same time
            for path in self._parts_folder.iterdir():
                if path.name.lstrip(".").partition("-")[0] in self._names:
                    path.unlink(missing_ok=True)
            self._parts_folder.rmdir()


class FilterBar:
    """Shows the rows filtered so far by all ranks. Quiet if the filter takes less than a second."""

    def __init__(self, total: int) -> None:
        self._bar: Any = None
        self._began = time.monotonic()
        if sys.stderr is not None and sys.stderr.isatty():
            from tqdm import tqdm

            # Its own lock, because a forked child that is killed could keep a shared one.
            kind: Any = type("Bar", (tqdm,), {"monitor_interval": 0})
            kind.set_lock(threading.RLock())
            self._bar = kind(total=total, desc="filter", unit=" rows", file=sys.stderr)

    def update(self, rows: int) -> None:
        if self._bar is not None:
            self._bar.update(rows)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def summary(self, rows: int, kept: int, here: int, path: Path | None) -> None:
        """Print the result. This rank has evaluated ``here`` rows; ``path`` is the index."""
        seconds = time.monotonic() - self._began
        if sys.stderr is not None and (self._bar is not None or seconds > 1):
            where = "" if path is None else f"; remembered in {path}"
            print(
                f"filter: {kept:,} of {rows:,} rows kept, {here / max(seconds, 1e-9):,.0f} rows/s"
                f" on rank 0{where}",
                file=sys.stderr,
                flush=True,
            )
