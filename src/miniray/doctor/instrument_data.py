"""DataLoaders: how long the rank waits for data, which samples it gets, how the loader is set up.

Which samples: the indices the sampler gave, through any ``torch.utils.data.Subset``. A dataset with
a numbering of its own may have a method ``miniray_sample_ids(indices)`` that gives the ids to
record, so that ranks which each open a part of the data are not taken for ranks that read the same.
Batches of a pass begun under ``no_grad`` are counted, but their samples are not recorded: that is
evaluation.
"""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from collections import deque
from collections.abc import Callable
from sys import _getframe as getframe
from time import monotonic_ns
from types import FrameType
from typing import Any

from miniray.doctor import model, recorder, sites
from miniray.doctor.instrument import broken, failed, works
from miniray.doctor.layout import MOMENT, Cell
from miniray.doctor.loader_facts import (
    Watched,
    are_numbers,
    batch_size_of,
    describe,
    digests_of,
    ids_of,
    sampler_of,
)
from miniray.doctor.recorder import Recorder

_MOST_LOADERS = 32
_MOST_SKIPS = 3
_NOTHING = itertools.repeat(None).__next__


class Pass:
    """One pass over a loader, kept on torch's iterator."""

    def __init__(self, watched: Watched, site: str) -> None:
        self.watched = watched
        self.site = site
        self.places: tuple[int, int] = (0, 0)  # of the phases "data" and "compute"
        #: Gives the indices of the batch that comes next, None where they are not known.
        self.next_index: Callable[[], Any] = _NOTHING
        self.batches = 0
        self.recording = False
        self.trains = False  # a backward was seen
        self.steady = False  # it trains, and what the sampler gives are the ids
        self.epoch = -1
        self.backwards = 0
        self.last_backwards = -1  # when the last batch was given
        self.skipped = 0
        self.ended = False

    def __del__(self) -> None:
        # The iterator is gone before its end: the loop was left by break, return or an exception.
        current = recorder._current
        if current is None or self.ended or not self.batches:
            return
        index = self.watched.info["index"]
        said = f"loader {index}: {self.batches} batches"
        current.event(model.LOADER, "left", said, site=self.site)
        current.set_phase("epoch end", self.site)


_watched: weakref.WeakKeyDictionary[Any, Watched] = weakref.WeakKeyDictionary()


def change_loader(module: Any) -> None:
    """``module`` is ``torch.utils.data.dataloader``."""
    loader_class, base = module.DataLoader, module._BaseDataLoaderIter
    in_process = module._SingleProcessDataLoaderIter
    in_process._next_index = base._next_index  # see ``_indices_of``
    loader_class.__iter__ = _make_iter(loader_class.__iter__, in_process)
    base.__next__ = _make_next(base.__next__)
    base._miniray_pass = None  # until there is one
    base._next_index = _make_next_index(base._next_index)


def change_sampler(module: Any) -> None:
    """``module`` is ``torch.utils.data.distributed``."""
    original = module.DistributedSampler.set_epoch

    @functools.wraps(original)
    def set_epoch(self: Any, epoch: int) -> None:
        original(self, epoch)
        if recorder._current is not None:
            self._miniray_set_epoch = getattr(self, "_miniray_set_epoch", 0) + 1

    module.DistributedSampler.set_epoch = set_epoch


def _make_iter(original: Any, in_process: Any) -> Any:
    @functools.wraps(original)
    def iterate(self: Any) -> Any:
        current = recorder._current
        if current is None or not works("loaders"):
            return original(self)
        site = sites.call_site(getframe(1))
        kept = getattr(self, "_iterator", None)
        if kept is not None and hasattr(kept, "_miniray_indices"):
            kept._miniray_indices.clear()  # persistent workers: what was prefetched is void
        current.set_phase("data", site)
        started = monotonic_ns()
        iterator = original(self)
        waited = monotonic_ns() - started
        try:
            one = iterator._miniray_pass = _begin_pass(current, self, site, started)
            if one.watched.has_ids:
                one.next_index = _indices_of(iterator, in_process)
        except Exception as error:  # a loader that somebody built in a way of their own
            failed("loaders", error)
        current.data_ns += waited
        return iterator

    return iterate


def _begin_pass(current: Recorder, loader: Any, site: str, began: int) -> Pass:
    watched = find_watched(
        current, loader, lambda index: Watched(loader, describe(loader, index, site))
    )
    sampler = sampler_of(loader)
    watched.info["set_epoch_calls"] = getattr(sampler, "_miniray_set_epoch", 0)
    return start_pass(current, watched, site, began)


def find_watched(current: Recorder, loader: Any, create: Callable[[int], Watched]) -> Watched:
    """Return what is known of a loader. ``create(index)`` is called for its first pass."""
    watched = _watched.get(loader)
    if watched is None:
        index = len(current.loaders)
        watched = _watched[loader] = create(index)
        if index < _MOST_LOADERS:
            current.loaders.append(watched.info)
            current.write_info()
    return watched


def start_pass(current: Recorder, watched: Watched, site: str, began: int) -> Pass:
    """Record that a pass over a loader starts at ``site``."""
    info = watched.info
    info["passes"] += 1
    current.event(model.LOADER, "begin", f"loader {info['index']}", site=site)
    current.mark_dirty()
    one = Pass(watched, site)
    one.places = current.place_of("data", site)[:2]
    one.recording = _grad_enabled()
    one.backwards = current.box.ints[Cell.BACKWARDS]
    if one.recording:
        one.epoch, watched.epochs = watched.epochs, watched.epochs + 1
        current.box.ints[Cell.BATCHES_IN_EPOCH] = 0
        if not current.explicit_steps:
            current.begin_pass(info["index"], one.epoch)
            current.begin_steps(began)
    return one


def _indices_of(iterator: Any, in_process: Any) -> Callable[[], Any]:
    """What gives the indices of each batch, one after the other.

    Without workers a copy of what the sampler gives: nothing of ours is called for it. With workers
    indices are taken ahead, from the moment the iterator is made.
    """
    if type(iterator) is in_process and iterator._sampler_iter is not None:
        iterator._sampler_iter, copy = itertools.tee(iterator._sampler_iter)
        return copy.__next__
    if not hasattr(iterator, "_miniray_indices"):
        iterator._miniray_indices = deque()
    taken: deque[Any] = iterator._miniray_indices
    return lambda: taken.popleft() if taken else None


def _make_next_index(original: Any) -> Any:
    @functools.wraps(original)
    def next_index(self: Any) -> Any:
        index = original(self)
        if recorder._current is not None:
            # Batches come in the same order.
            waiting = self.__dict__.get("_miniray_indices")
            if waiting is None:
                waiting = self._miniray_indices = deque()
            waiting.append(index)
        return index

    return next_index


def _make_next(original: Any) -> Any:
    @functools.wraps(original)
    def next_batch(self: Any) -> Any:
        current = recorder._current
        if current is None or (one := self._miniray_pass) is None:
            return original(self)
        ints = current.ints
        backwards = ints[9]  # Cell.BACKWARDS
        if backwards == one.last_backwards:
            note_skip(current, one, getframe(1))
        one.last_backwards = backwards
        during, after = one.places
        started = monotonic_ns()
        ints[2] = started & MOMENT | during  # Cell.PHASE
        try:
            batch = original(self)
        except StopIteration:
            current.set_phase("epoch end", one.site)
            end_pass(current, one)
            raise
        now = monotonic_ns()
        current.data_ns += now - started
        ints[2] = now & MOMENT | after
        if not broken or works("batches"):
            try:
                one.batches = batches = one.batches + 1
                ints[7] += 1  # Cell.BATCHES
                ids = one.next_index()
                first = batch[0] if batch.__class__ is list and batch else batch
                shape = getattr(first, "shape", None)
                if (
                    one.steady
                    and shape
                    and shape[0]
                    and ids.__class__ is list
                    and not current.explicit_steps
                ):
                    # What is below, written out: this runs cold, once a step, and every twenty
                    # instructions less are a microsecond.
                    ints[8] = batches  # Cell.BATCHES_IN_EPOCH
                    size = len(ids)
                    ints[6] = size  # Cell.BATCH_SIZE
                    ints[10] += size  # Cell.SAMPLES
                    current.pending_ids.append(ids)
                else:
                    _count_batch(current, one, batch, ids, shape[0] if shape else None)
            except Exception as error:  # a batch of a kind we do not know
                failed("batches", error)
        return batch

    return next_batch


def _count_batch(current: Recorder, one: Pass, batch: Any, ids: Any, length: int | None) -> None:
    watched = one.watched
    given = batch_size_of(batch) if length is None else length
    if ids is not None and (watched.renames or not are_numbers(ids)):
        ids = ids_of(watched, ids)
    size = len(ids) if ids is not None and given != 0 else given
    info = watched.info
    if given == 0:  # also if the sampler gave indices and the collate function dropped them all
        note_empty_batch(current, one)
    if one.batches == 1 and info["passes"] == 1 and works("first batches"):
        try:
            info["first_batch"] = digests_of(batch)
        except Exception as error:  # tensors of a kind that has no plain bytes
            failed("first batches", error)
        current.mark_dirty()
    count_samples(current, one, ids, size or 0)


def note_empty_batch(current: Recorder, one: Pass) -> None:
    """Record a batch without samples."""
    info = one.watched.info
    info["empty_batches"] += 1
    current.event(model.LOADER, "empty batch", f"loader {info['index']}", site=one.site)
    current.mark_dirty()


def count_samples(current: Recorder, one: Pass, ids: Any, size: int) -> None:
    """Record the samples of a batch of a pass that may train. ``ids`` is None if unknown."""
    if not one.recording:
        return
    batches, ints, watched = one.batches, current.ints, one.watched
    ints[8] = batches  # Cell.BATCHES_IN_EPOCH
    if not one.trains and ints[9] > one.backwards:
        one.trains = True
        if not watched.info["trained"]:
            _becomes_training(current, one)
    if not current.explicit_steps:
        if batches == 1 and watched.info["trained"]:
            current.set_epoch(one.epoch, one.site)
        current.add_samples(ids, size)
        one.steady = one.trains and not watched.renames and are_numbers(ids)


def _becomes_training(current: Recorder, one: Pass) -> None:
    """A backward happened during the pass: its epochs are the rank's epochs."""
    info = one.watched.info
    info["trained"] = True
    if not current.explicit_steps:
        current.set_epoch(one.epoch, one.site)
    current.mark_dirty()


def note_skip(current: Recorder, one: Pass, frame: FrameType) -> None:
    """The last batch had no backward: in DDP the other ranks may now wait for it.

    Why is seldom recorded, for no loss was given to backward. The loop's own variable tells.
    """
    one.skipped += 1
    if not one.recording or one.skipped > _MOST_SKIPS:  # a pass that does not train at all
        return
    said = f"loader {one.watched.info['index']}: batch {one.batches}"
    loss: Any = frame.f_locals.get("loss")
    device = getattr(getattr(loss, "device", None), "type", "")
    if isinstance(loss, float) or (device == "cpu" and getattr(loss, "ndim", 1) == 0):
        said += f", loss {loss if isinstance(loss, float) else loss.item()}"
    current.event(model.LOADER, "no backward", said, site=one.site)


def end_pass(current: Recorder, one: Pass) -> None:
    one.ended = True
    info = one.watched.info
    if one.recording and not info["trained"] and current.box.ints[9] > one.backwards:
        _becomes_training(current, one)
    info["finished"] += 1
    info["last_batches"] = one.batches
    if one.recording and not current.explicit_steps:
        current.end_pass()
    loader = f"loader {info['index']}"
    current.event(model.LOADER, "end", loader, site=one.site, number=one.batches)
    current.write_info()


def _grad_enabled() -> bool:
    torch = sys.modules.get("torch")
    return torch is None or bool(torch.is_grad_enabled())
