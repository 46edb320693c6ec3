"""A filter that runs once for the whole run, split over its ranks, and is remembered.

Ranks do not talk: the rows are cut into parts, and whoever holds a part's lock works on it. A rank
that is killed lets go of its lock, and another takes its part; finished parts stay. When all parts
are there, one rank joins them to the index that every later start reads in milliseconds.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from miniray.data import index
from miniray.data.index import Bits
from miniray.data.selection import Kept
from miniray.data.source import Source
from miniray.errors import DataError, RowError

_LEAST_ROWS, _MOST_PARTS = 1024, 1024
_POLL = 0.02
_PATIENCE = 10.0  # seconds after which a part that another rank works on is done here as well


@dataclass(frozen=True)
class Part:
    """Blocks of one file, filtered together."""

    file: int
    blocks: range
    first: int
    rows: int


class FilterRun:
    """The filter ``identity`` on all files of a source."""

    def __init__(
        self,
        source: Source,
        function: Callable[[Any], bool],
        columns: Sequence[str] | None,
        identity: str,
        *,
        rank: int = 0,
        threads: int = 1,
        progress: bool = True,
    ) -> None:
        self._source, self._function, self._columns = source, function, columns
        self._rank, self._threads, self._show = rank, threads, progress and rank == 0
        self._blocks = source.blocks
        self._name = f"filter-{identity}"
        self._bar: _Bar | None = None
        self._path = self._parts_folder = Path()  # once it is known that something must be written
        files = range(len(self._blocks.files))
        self._identities = [source.identity(file) for file in files]
        self._names = [name.partition("-")[0] for name in self._identities]
        self._rows = [0] * len(files)
        for file, rows in zip(self._blocks.file, self._blocks.rows, strict=True):
            self._rows[file] += rows

    def result(self) -> Kept:
        """The answer, from the index or by doing what nobody has done yet."""
        beside = self._source.folder(0) if self._names else None
        known: dict[int, Bits] = {}
        for folder in index.known_folders(beside):
            known.update(self._known(folder / f"{self._name}.idx"))
        if len(known) < len(self._names):
            folder = index.index_folder(beside)
            self._path = folder / f"{self._name}.idx"
            self._parts_folder = folder / f"{self._name}.parts"
            known = self._run(known)
        return Kept(self._blocks, [known[file] for file in range(len(self._names))])

    def _known(self, path: Path | None = None) -> dict[int, Bits]:
        """Files whose answers are in an index; those that have changed since are not."""
        entries = index.read(path or self._path)
        known = {}
        for file, (name, identity) in enumerate(zip(self._names, self._identities, strict=True)):
            entry = entries.get(name)
            if entry is not None and entry[:2] == (identity, self._rows[file]):
                known[file] = entry[2]
        return known

    # -- doing it --------------------------------------------------------------------------------

    def _run(self, known: dict[int, Bits]) -> dict[int, Bits]:
        todo = [part for part in self._cut() if part.file not in known]
        try:
            self._parts_folder.mkdir(exist_ok=True)
        except OSError as error:
            raise DataError(
                f"the filter's parts cannot be kept in {self._parts_folder}: {error.strerror}"
            ) from error
        bar = self._bar = _Bar(sum(part.rows for part in todo)) if self._show else None
        began, counted = time.monotonic(), 0
        done: dict[Part, Bits] = {}
        try:
            waited_since = time.monotonic()
            while len(done) < len(todo):
                finished = self._pass(todo, done, time.monotonic() - waited_since > _PATIENCE)
                if finished:
                    waited_since = time.monotonic()
                    counted += finished
                elif len(done) < len(todo):
                    time.sleep(_POLL)
                    if len(self._known()) == len(self._names):  # another rank has joined them all
                        return self._known()
        finally:
            if bar is not None:
                bar.close()
        found = {**known, **self._joined(todo, done)}
        self._save(found)
        if bar is not None:
            bar.summary(
                sum(self._rows),
                sum(int(np.unpackbits(bits).sum()) for bits in found.values()),
                counted,
                time.monotonic() - began,
                self._path,
            )
        return found

    def _cut(self) -> list[Part]:
        """Parts: the same for every rank, and not so many that they are a burden."""
        least = max(_LEAST_ROWS, sum(self._rows) // _MOST_PARTS)
        parts: list[Part] = []
        begin = 0
        for block in range(len(self._blocks)):
            rows = sum(self._blocks.rows[begin : block + 1])
            last = block + 1 == len(self._blocks)
            if rows >= least or last or self._blocks.file[block + 1] != self._blocks.file[block]:
                file, first = self._blocks.file[begin], self._blocks.first[begin]
                parts.append(Part(file, range(begin, block + 1), first, rows))
                begin = block + 1
        return parts

    def _pass(self, todo: list[Part], done: dict[Part, Bits], impatient: bool) -> int:
        """Do or find parts, beginning at a place of this rank's own; returns rows done here."""
        start = self._rank * 7919 % max(1, len(todo))
        open_parts = [part for part in todo[start:] + todo[:start] if part not in done]
        if self._threads == 1:
            return sum(self._try(part, done, impatient) for part in open_parts)
        with ThreadPoolExecutor(self._threads) as pool:
            return sum(pool.map(lambda part: self._try(part, done, impatient), open_parts))

    def _try(self, part: Part, done: dict[Part, Bits], impatient: bool) -> int:
        path = self._parts_folder / f"{self._identities[part.file]}-{part.blocks.start}.part"
        if self._find(part, path, done):
            return 0
        with index.claim(path.with_suffix(".lock")) as ours:
            if not ours and not impatient:
                return 0
            if self._find(part, path, done):  # done between the look and the lock
                return 0
            bits = self._filter(part)
            try:
                index.write(path, {"part": (self._identities[part.file], part.rows, bits)})
            except DataError as error:
                # Where the folder is gone, another rank has all parts and joined them.
                if not isinstance(error.__cause__, FileNotFoundError):
                    raise
            self._note(part, bits, done)
            return part.rows

    def _find(self, part: Part, path: Path, done: dict[Part, Bits]) -> bool:
        entry = index.read(path).get("part")
        if entry is None or entry[:2] != (self._identities[part.file], part.rows):
            return False
        self._note(part, entry[2], done)
        return True

    def _note(self, part: Part, bits: Bits, done: dict[Part, Bits]) -> None:
        done[part] = bits
        if self._bar is not None:
            self._bar.update(part.rows)

    def _filter(self, part: Part) -> Bits:
        kept: list[bool] = []
        for block in part.blocks:
            count = self._blocks.rows[block]
            # A slice at a time: a row group may be larger than memory.
            step = max(1, count * (16 << 20) // max(1, self._blocks.nbytes[block]))
            step = max(1, count) if step * 4 > count else step
            for start in range(0, count, step):
                stop = min(count, start + step)
                rows = self._source.read(block, start, stop, self._columns)
                inside = range(start - rows.start, stop - rows.start)
                first = self._blocks.first[block] + start
                kept += self._answers(rows.rows(inside), self._blocks.files[part.file], first)
        return np.packbits(np.array(kept, dtype=bool), bitorder="little")

    def _answers(self, rows: Sequence[Any], file: str, first: int) -> list[bool]:
        found: list[bool] = []
        for number, row in enumerate(rows, first):
            try:
                found.append(bool(self._function(row)))
            except Exception as error:  # the user's code may raise anything
                raise RowError(
                    f"{file}, row {number}: the filter raised {type(error).__name__}: {error}",
                    file,
                    number,
                ) from error
        return found

    def _joined(self, parts: Sequence[Part], done: dict[Part, Bits]) -> dict[int, Bits]:
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
        """Join the answers to the index, which may have those of other files, and clean up."""
        with index.claim(self._path.with_suffix(".lock"), wait=True):
            index.remove_unfinished(self._path)
            if len(self._known()) < len(self._names):
                entries = index.read(self._path)
                for file, bits in found.items():
                    entry = (self._identities[file], self._rows[file], bits)
                    entries[self._names[file]] = entry
                index.write(self._path, entries)
            with contextlib.suppress(OSError):  # another rank may be removing it too
                shutil.rmtree(self._parts_folder)


class _Bar:
    """Rows filtered so far, by all ranks; a line at the end where there is no terminal."""

    def __init__(self, total: int) -> None:
        self._bar: Any = None
        self._began = time.monotonic()
        if sys.stderr is not None and sys.stderr.isatty():
            from tqdm import tqdm

            # A lock of this process alone: a forked child that is killed must not keep it.
            kind: Any = type("Bar", (tqdm,), {"monitor_interval": 0})
            kind.set_lock(threading.RLock())
            self._bar = kind(total=total, desc="filter", unit=" rows", file=sys.stderr)

    def update(self, rows: int) -> None:
        if self._bar is not None:
            self._bar.update(rows)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def summary(self, rows: int, kept: int, here: int, seconds: float, path: Path) -> None:
        if sys.stderr is not None and (self._bar is not None or seconds > 1):
            rate = here / max(seconds, 1e-9)
            print(
                f"filter: {kept:,} of {rows:,} rows kept, {rate:,.0f} rows/s on rank 0;"
                f" remembered in {path}",
                file=sys.stderr,
                flush=True,
            )
