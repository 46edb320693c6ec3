"""The prompts of a worker: from a list that all workers have, or from a separate loader.

A dataset or loader of ``miniray.data`` is sharded: each worker reads only its rows of the files.
Sources repeat their data epoch after epoch, and have a state from which a run can be resumed.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from miniray.data.plan.progress import merge_states
from miniray.data.plan.shard import split_evenly
from miniray.errors import DataError
from miniray.rl.config import PROMPTS_PER_STEP
from miniray.train.workers.data.loaders import is_shardable

Row = Mapping[str, Any]

#: Returns the sum of a number over the workers that finish each epoch of the data together.
Total = Callable[[int], int]


class ListSource:
    """Rows of a list, shuffled by seed and epoch. The rows of each step are divided by rank.

    The rows of a step follow from its number and don't depend on the number of workers. The last
    step of an epoch can be smaller, and empty for some ranks.
    """

    def __init__(self, rows: Sequence[Row], per_step: int, rank: int, world_size: int) -> None:
        if not rows:
            raise ValueError("data must contain at least one prompt, but it is an empty list")
        self._rows = rows
        self._per_step = min(per_step, len(rows))
        self._rank, self._world = rank, world_size

    def rows(self, step: int, seed: int, total: Total = int) -> list[Row]:
        """Return this worker's prompts of a step. Call it for the steps in order."""
        count = len(self._rows)
        epoch, part = divmod(step, math.ceil(count / self._per_step))
        order = np.random.default_rng([seed, epoch]).permutation(count)
        chosen = order[part * self._per_step : (part + 1) * self._per_step]
        low, high = split_evenly(len(chosen), self._rank, self._world)
        return _checked([self._rows[i] for i in chosen[low:high].tolist()], "data")

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass  # the position follows from the step


class LoaderSource:
    """A shard of ``miniray.data``, or a loader that ``make_loader(rank, world_size)`` returned.

    The loader yields the prompts of this worker for one step: a list of rows, or, if it has a
    ``batch_size``, a dict of columns. Alternatively, it yields single rows, and each step uses
    ``per_step`` of them. If ``all_per_step`` is set, the batches of all workers must add up to that
    number of rows.

    When the loader is exhausted, this source returns no rows until the loaders of all workers are
    exhausted, so that each row is used once per epoch. Then it iterates over the loader again, and
    calls ``set_epoch(epoch)`` before if the loader has this method. If the loader has no
    ``state_dict`` and ``load_state_dict``, or if this worker replaces a lost one, the position is
    restored by skipping the earlier steps. This is exact if the loader is deterministic.
    """

    def __init__(
        self, loader: Any, per_step: int, rank: int, all_per_step: int | None = None
    ) -> None:
        if not hasattr(loader, "__iter__"):
            raise TypeError(f"make_loader() must return an iterable, not {loader!r}")
        self._loader = loader
        self._per_step = per_step
        self._all_per_step = all_per_step
        self._name = f"the loader of worker {rank}"
        self._epoch = 0
        self._used = 0  # items used in this epoch
        self._ended = False  # whether the loader is exhausted in this epoch
        self._step = 0  # the next step
        self._yields_rows = False
        self._iterator: Iterator[Any] | None = None

    def rows(self, step: int, seed: int, total: Total = int) -> list[Row]:
        for _ in range(step - self._step):
            self._take(int)  # skip earlier steps, while other workers wait
        self._step = step + 1
        rows = self._take(total)
        if self._all_per_step is not None:
            self._check_step_size(self._all_per_step, len(rows) if step == 0 else 0, total)
            self._all_per_step = None
        return rows

    def _check_step_size(self, wanted: int, first_batch: int, total: Total) -> None:
        """Raise ``ValueError`` if the batches of a step don't add up to ``wanted`` rows.

        ``total`` is a collective, so all workers call it equally often.
        """
        declared = getattr(self._loader, "batch_size", None)
        size = declared if isinstance(declared, int) else first_batch
        size = self._per_step if self._yields_rows else size
        is_sum = total(1) > 1  # False if the worker trains independently, or is the only one
        expected, found = (wanted if is_sum else self._per_step), total(size)
        # The size is unknown if the run is resumed, perhaps at the shorter last batch of an epoch.
        is_unknown = total(int(size == 0)) > 0
        if found != expected and not is_unknown:
            raise ValueError(
                f"prompts_per_step={wanted}, but the batches of {'all' if is_sum else 'one'} "
                f"worker{'s' * is_sum} add up to {found} prompts per step, not {expected}. Change "
                "the batch_size of the loaders, or don't set prompts_per_step."
            )

    def _take(self, total: Total) -> list[Row]:
        rows = self._rows_left()
        if not total(bool(rows) or not self._ended):
            self._iterator, self._used, self._ended = None, 0, False
            self._epoch += 1
            rows = self._rows_left()
        return rows

    def _rows_left(self) -> list[Row]:
        """Return the next rows of this epoch, or an empty list at its end."""
        rows: list[Row] = []
        for item in self._items():
            if not _is_row(item, self._loader):
                return _checked(rows_of(item), self._name)
            self._yields_rows = True
            rows.append(item)
            if len(rows) == self._per_step:
                break
        return rows

    def _items(self) -> Iterator[Any]:
        if self._iterator is None and not self._ended:
            if hasattr(self._loader, "set_epoch"):
                self._loader.set_epoch(self._epoch)
            self._iterator = iter(self._loader)
        for item in self._iterator or ():
            self._used += 1
            yield item
        if not self._used:
            raise ValueError(f"{self._name} is empty: it yielded no prompts")
        self._iterator, self._ended = None, True

    def state_dict(self) -> dict[str, Any]:
        own = self._loader.state_dict() if hasattr(self._loader, "state_dict") else None
        place = {"step": self._step, "epoch": self._epoch, "used": self._used}
        return {**place, "ended": self._ended, "loader": own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._step, self._epoch = int(state["step"]), int(state["epoch"])
        self._iterator, self._used, self._ended = None, 0, False
        used, own = int(state["used"]), state["loader"]
        if own is None:
            for _ in zip(range(used), self._items(), strict=False):
                pass
        elif not _is_of_one(own):
            if hasattr(self._loader, "set_epoch"):
                self._loader.set_epoch(self._epoch)
            self._loader.load_state_dict(own)
            if not state["ended"]:
                self._iterator = iter(self._loader)
        self._used, self._ended = used, state["ended"]


Source = ListSource | LoaderSource


def _is_of_one(loader: Mapping[str, Any]) -> bool:
    """Return whether the state of a loader is valid for one worker only."""
    return bool(loader.get("alone"))


def place_of_all(places: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the positions of all workers into one, which any number of workers can restore.

    Loaders of other libraries get the state of the first worker. If the positions can't be merged,
    because the workers never wait for each other, ``apart`` is the reason.
    """
    place = dict(places[0])
    loaders: list[Any] = [place.get("loader") for place in places]
    if all(isinstance(own, Mapping) and "fingerprint" in own for own in loaders):
        place["to_all"] = any(map(_is_of_one, loaders))
        try:
            merged = merge_states(loaders)
            place |= {"loader": merged, "ended": False}
            place["to_all"] |= isinstance(merged["taken"], list)  # different numbers of rows
        except DataError as error:
            place["apart"] = str(error)
    return place


def make_source(data: Any, per_step: int | None, rank: int, world_size: int) -> Source:
    """Create the source of this worker from ``data``; see ``RLTrainer``.

    ``per_step`` is the number of prompts per step of all workers, or None for the default.
    """
    count = per_step or PROMPTS_PER_STEP
    low, high = split_evenly(count, rank, world_size)
    if is_shardable(data):
        shard = data.shard(rank, world_size)
        shard.prepare()
        all_per_step = per_step if has_batches(data) else None
        return LoaderSource(shard, max(1, high - low), rank, all_per_step)
    if callable(data):
        return LoaderSource(data(rank, world_size), max(1, high - low), rank, per_step)
    return ListSource(data, count, rank, world_size)


def has_batches(data: Any) -> bool:
    """Return whether the loaders of the workers determine the number of prompts per step."""
    return callable(data) or (is_shardable(data) and hasattr(data, "batch_size"))


def steps_per_pass(data: Sequence[Any], per_step: int | None) -> int:
    """Return the number of steps of one pass over a list of rows."""
    return math.ceil(len(data) / (per_step or PROMPTS_PER_STEP))


def held_out(data: Any, rank: int, world_size: int) -> Iterator[tuple[int, Row]]:
    """Yield the numbered evaluation rows of this worker. Each row belongs to one worker.

    For lists and datasets, the numbers don't depend on the number of workers.
    """
    if is_shardable(data) and not has_batches(data):
        shard = data.shard(rank, world_size)
        numbers = shard.number_positions(shard.find_positions(range(len(shard))))
        return zip(numbers, shard, strict=True)
    if not callable(data) and not is_shardable(data):
        low, high = split_evenly(len(data), rank, world_size)
        # Slicing a Hugging Face dataset returns a dict of columns, and torch datasets don't
        # support slices.
        return ((i, data[i]) for i in range(low, high))
    loader = data(rank, world_size) if callable(data) else data.shard(rank, world_size)
    rows = (row for item in loader for row in ([item] if _is_row(item, loader) else rows_of(item)))
    return enumerate(rows, rank << 32)


def _is_row(item: Any, loader: Any) -> bool:
    """Return whether a loader yields rows, not batches. ``batch_size`` is then None in torch."""
    return isinstance(item, Mapping) and getattr(loader, "batch_size", None) is None


def rows_of(batch: Any) -> list[Any]:
    """Return the rows of a batch, which is a list of rows or a dict of columns."""
    if not isinstance(batch, Mapping):
        return list(batch)
    lengths = {name: len(column) for name, column in batch.items()}
    nested = [name for name, column in batch.items() if isinstance(column, Mapping)]
    if nested or len(set(lengths.values())) > 1:
        why = f"{nested[0]!r} is a dict" if nested else f"they differ in length: {lengths}"
        raise ValueError(
            f"can't split the columns of a batch into rows, because {why}. To keep rows unchanged, "
            "set collate_fn=list."
        )
    count = next(iter(lengths.values()), 0)
    return [{name: column[i] for name, column in batch.items()} for i in range(count)]


def _checked(rows: list[Any], name: str) -> list[Row]:
    for row in rows:
        if not isinstance(row, Mapping):
            raise TypeError(
                f"{name} must yield rows (dicts) or lists of rows, not {type(row).__name__}: "
                f"{row!r:.100}"
            )
    return rows


def check_data(name: str, data: Any) -> None:
    """Raise an error if ``data`` can't be used, before anything is started."""
    if is_shardable(data):
        if data.is_sharded:
            raise ValueError(
                f"{name} is already sharded. Don't pass rank= and world_size= to the dataset, "
                "because each worker selects its own shard."
            )
    elif callable(data):
        called_with(name, data, "rank", "world_size")
    else:
        kinds = ", a dataset or loader of miniray.data, or a function make_loader(rank, world_size)"
        check_rows(name, data, kinds)


def check_rows(name: str, data: Any, otherwise: str = "") -> None:
    """Raise an error unless ``data`` is a nonempty list of rows, or can be used like one."""
    if isinstance(data, (str, bytes, Mapping)) or not (
        hasattr(data, "__len__") and hasattr(data, "__getitem__")
    ):
        raise TypeError(f"{name} must be a list of rows (dicts){otherwise}, not {data!r:.200}")
    if len(data) == 0:
        raise ValueError(f"{name} is empty")
    if not isinstance(data[0], Mapping):
        raise TypeError(f"the rows of {name} must be dicts, not {data[0]!r:.200}")


def called_with(name: str, function: Callable[..., Any], *arguments: str) -> None:
    """Raise ``TypeError`` if a function can't be called with these arguments."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # functions written in C may have no signature
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise TypeError(
            f"{name} must be callable as {name}({', '.join(arguments)}), but "
            f"{getattr(function, '__name__', function)}{signature} isn't: {error}"
        ) from None
