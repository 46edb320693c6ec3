"""Record what loaders of ``miniray.data`` deliver.

``miniray.data`` isn't imported here: ``register`` is called with its module ``observers`` when that
is imported.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from sys import _getframe as getframe
from time import monotonic_ns
from types import FrameType
from typing import Any

from miniray.doctor import instrument_data, recorder, sites
from miniray.doctor.instrument import failed, works
from miniray.doctor.layout import MOMENT, PREPARING
from miniray.doctor.loader_facts import WatchedRows


def register(module: Any) -> None:
    """Observe all loaders. ``module`` is ``miniray.data.observers``."""
    module.observers.append(RecordingObserver(module.describe))
    module.preparation_hooks.append(PreparationRecorder().record)
    module.cache_hooks.append(note_row_cache)


def note_row_cache(path: str, nbytes: int) -> None:
    """Note a file of the row cache that this rank uses."""
    current = recorder.current()
    if current is not None:
        files = {**dict(current.info["notes"].get("row_caches", ())), path: nbytes}
        current.note_later(row_caches=list(files.items()))


class PreparationRecorder:
    """Records the phase ``PREPARING``, whose time is that of the last progress."""

    def __init__(self) -> None:
        self._before: int | None = None

    def record(self, is_active: bool) -> None:
        """Enter the phase, or return to the one before."""
        current = recorder.current()
        if current is None or not works("loaders"):
            return
        if is_active:
            if self._before is None:
                self._before = current.ints[2] & ~MOMENT  # Cell.PHASE
            current.set_phase(PREPARING, sites.call_site(getframe(1)))
        elif self._before is not None:
            current.ints[2] = monotonic_ns() & MOMENT | self._before
            self._before = None


class RecordingObserver:
    """Implements ``miniray.data.observers.LoaderObserver`` for this process's recorder."""

    def __init__(self, describe: Any) -> None:
        self._describe = describe
        #: Passes that haven't ended, by loader.
        self._passes: weakref.WeakKeyDictionary[Any, instrument_data.Pass] = (
            weakref.WeakKeyDictionary()
        )

    def on_pass_start(self, loader: Any, epoch: int) -> None:
        current = recorder.current()
        if current is None or not works("loaders"):
            return
        try:
            self._passes.pop(loader, None)  # Records that the loop left the pass.
            site = sites.call_site(getframe(1))
            described = self._describe(loader)
            watched = instrument_data.find_watched(
                current, loader, lambda index: WatchedRows(described, index, site)
            )
            watched.info["batches"] = described["batches"]
            current.set_phase("data", site)
            self._passes[loader] = instrument_data.start_pass(
                current, watched, site, monotonic_ns()
            )
        except Exception as error:  # Observing must not break the loop.
            failed("loaders", error)

    def on_batch(self, loader: Any, row_ids: Sequence[int], num_rows: int) -> None:
        current, one = recorder.current(), self._passes.get(loader)
        if current is None or one is None or not works("batches"):
            return
        try:
            backwards = current.ints[9]  # Cell.BACKWARDS
            if num_rows and backwards == one.last_backwards:
                instrument_data.note_skip(current, one, _find_users_frame(getframe(1)))
            one.last_backwards = backwards
            current.ints[2] = monotonic_ns() & MOMENT | one.places[1]  # Cell.PHASE
            if not num_rows:
                instrument_data.note_empty_batch(current, one)
                return
            one.batches += 1
            current.ints[7] += 1  # Cell.BATCHES
            instrument_data.count_samples(current, one, row_ids, num_rows)
        except Exception as error:  # Observing must not break the loop.
            failed("batches", error)

    def on_pass_end(self, loader: Any) -> None:
        current, one = recorder.current(), self._passes.pop(loader, None)
        if current is not None and one is not None:
            current.set_phase("epoch end", one.site)
            instrument_data.end_pass(current, one)


def _find_users_frame(frame: FrameType) -> FrameType:
    """Return the innermost frame outside of miniray, or the outermost frame."""
    while not sites.is_users(frame.f_code.co_filename) and frame.f_back is not None:
        frame = frame.f_back
    return frame
