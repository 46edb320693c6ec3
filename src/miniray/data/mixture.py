"""Several datasets read as one, in given proportions.

The mixed order consists of rounds. In each round, every member gets its share of positions (counts
follow the weights to within one row over any number of rounds), in a random arrangement. The rows
of a member come in the order of the member, so a rank reads neighboring blocks of it. When a member
is used up, its next epoch begins.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from math import ceil, floor
from numbers import Real
from typing import Any, Literal

import numpy as np

from miniray.checks import check_choice, check_int, suggest_options
from miniray.data.dataset import Dataset, RowId, SplitName
from miniray.data.datasets import SourceDataset
from miniray.data.locations import Int64s, Locations, cumulate
from miniray.data.plan.order import RANDOM_ACCESS_ROWS, WINDOW_BYTES, EpochOrder
from miniray.data.plan.permutation import Permutation, derive_key
from miniray.data.plan.shard import Even, resolve_seed
from miniray.data.sources.base import Source
from miniray.errors import DataError

_ROUND_ROWS = 64
#: Bytes of the windows of all members, unless these have a ``window_bytes``.
_WINDOWS_BYTES = 96_000_000


@suggest_options()
class Mixture(Dataset):
    """Rows of ``datasets``, a list of ``(dataset, weight)``, in proportion to the weights.

    A mixture is deterministic, sharded over ranks and resumed like a single dataset. Its state
    describes all members. Pass unsharded datasets: ``rank`` and ``world_size`` belong to the
    mixture. Members without a seed get one that is derived from that of the mixture.

    Args:
        datasets: Members and their weights.
        seed: Seed of the mixture; see ``ParquetDataset``.
        rank: Rank of this process.
        world_size: Number of ranks.
        until: ``"first"`` ends the epoch before any member would repeat a row; the other members
            continue in the next epoch. ``"all"`` ends it when every row of every member has come at
            least once; smaller members repeat rows.
        even: ``"pad"`` or ``"drop"`` for the same number of rows on every rank.
        split: ``"contiguous"`` or ``"interleaved"``, which requires members with random access.
        memory_budget: Bytes that this rank may hold, for all members.
    """

    def __init__(
        self,
        datasets: Sequence[tuple[Dataset, float]],
        *,
        seed: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        until: Literal["first", "all"] = "first",
        even: Even = "exact",
        split: SplitName = "contiguous",
        memory_budget: int | str = "256MB",
    ) -> None:
        if not datasets:
            raise ValueError("datasets must have at least one (dataset, weight)")
        check_choice("until", until, ("first", "all"))
        members: list[SourceDataset] = []
        for number, pair in enumerate(datasets):
            members.append(_check_member(number, pair))
        if split == "interleaved" and any(member.max_window_bytes for member in members):
            raise ValueError(
                "split='interleaved' requires members with random access. Pass shuffle='global' to"
                " datasets of files, or leave out split=."
            )
        self._until = until
        total = sum(weight for _, weight in datasets)
        self._shares = [weight / total for _, weight in datasets]
        self._given = members
        is_seed_fixed = seed is not None
        ranks = 1 if world_size is None else check_int("world_size", world_size, 1)
        seed = resolve_seed(seed, ranks, "mixing")
        super().__init__(
            rank=rank,
            world_size=world_size,
            even=even,
            split=split,
            seed=seed,
            is_seed_fixed=is_seed_fixed,
            memory_budget=memory_budget,
        )
        self._check_budget()

    def _check_budget(self) -> None:
        """Raise ``ValueError`` if half the budget can't hold one window of every member."""
        needed = sum(member.max_window_bytes for member in self._create_members())
        if 2 * needed > self._budget:
            raise ValueError(
                f"memory_budget={self._budget} can't hold the windows of {len(self._given)} members"
                f" ({needed} bytes) in its half for blocks. Pass memory_budget={2 * needed} or"
                " more, or datasets with a smaller window_bytes=."
            )

    def _create_members(self) -> list[SourceDataset]:
        window_bytes = min(WINDOW_BYTES, _WINDOWS_BYTES // len(self._given))
        return [
            given.with_seed(derive_key(self._seed, "source", number) >> 16, window_bytes)
            for number, given in enumerate(self._given)
        ]

    def _reset(self) -> None:
        super()._reset()
        self._members_cache: list[SourceDataset] | None = None
        self._orders: Any = None

    _transient = (*Dataset._transient, "_members_cache", "_orders")

    def set_memory_budget(self, budget: int | str) -> None:
        super().set_memory_budget(budget)
        self._check_budget()

    # -- members ---------------------------------------------------------------------------------

    @property
    def _members(self) -> list[SourceDataset]:
        if self._members_cache is None:
            members = self._members_cache = self._create_members()
            self._orders = lru_cache(maxsize=2 * len(members))(
                lambda number, epoch: members[number]._create_order(epoch)
            )
        return self._members_cache

    def prepare(self) -> Mixture:
        for member in self._members:
            member.prepare()
        return self

    @property
    def sources(self) -> list[Source]:
        return [member.sources[0] for member in self._members]

    @property
    def column_names(self) -> list[str] | None:
        """Columns of the first member."""
        return self._given[0].column_names

    @property
    def is_shuffled(self) -> bool:
        """Always True: rounds are arranged randomly."""
        return True

    @property
    def kind(self) -> str:
        return "mixture"

    @property
    def fingerprint(self) -> str:
        digest = hashlib.blake2b(digest_size=8)
        for member, share in zip(self._members, self._shares, strict=True):
            digest.update(f"{member.fingerprint} {member.total_rows} {share!r};".encode())
        return digest.hexdigest()

    def _digest_selection(self) -> str:
        text = " ".join(member._digest_selection() for member in self._members)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def _describe_order(self) -> list[Any]:
        orders = [member._describe_order() for member in self._members]
        text = repr(orders).encode()
        return ["mixture", self._until, hashlib.blake2b(text, digest_size=8).hexdigest()]

    @property
    def distinct_rows(self) -> int:
        return sum(member.total_rows for member in self._members)

    @property
    def total_rows(self) -> int:
        rows = [member.total_rows for member in self._members]
        if not all(rows):
            raise DataError(f"Source {rows.index(0)} of the mixture has no rows.")
        passes = [count / share for count, share in zip(rows, self._shares, strict=True)]
        if self._until == "all":
            return ceil(max(passes))
        count = floor(min(passes))
        while count and any(have > n for have, n in zip(self.count_rows(count), rows, strict=True)):
            count -= 1  # rounding to whole rows gave a member one row too many
        return count

    # -- order -----------------------------------------------------------------------------------

    def count_rows(self, position: int) -> list[int]:
        """Return how many of the rows before ``position``, the end of a round, are of each member.

        Sums of shares are rounded instead of shares, so that the counts add up exactly.
        """
        ends = np.cumsum(self._shares)[:-1].tolist()
        edges = [0, *(round(position * end) for end in ends), position]
        return [after - before for before, after in pairwise(edges)]

    @property
    def round_rows(self) -> int:
        """Rows per round: enough for a few rows of the member with the smallest share."""
        return max(_ROUND_ROWS, ceil(4 / min(self._shares)))

    def _create_order(self, epoch: int) -> _MixtureOrder:
        return _MixtureOrder(self, self._members, self._orders, epoch)

    def _current_order(self) -> _MixtureOrder:
        order = super()._current_order()
        assert isinstance(order, _MixtureOrder)
        return order

    def find_ordinals(self, positions: Int64s) -> Int64s:
        return self._current_order().map_positions(np.asarray(positions, dtype=np.int64))

    def locate(self, positions: Int64s) -> Locations:
        return self.locate_ordinals(self.find_ordinals(positions))

    def locate_ordinals(self, ordinals: Int64s) -> Locations:
        array = np.empty((len(ordinals), 3), dtype=np.int64)
        for number, member, chosen, inside in self._divide(ordinals):
            array[chosen] = member.locate_ordinals(inside, number).array
        return Locations(array)

    def name_positions(self, positions: Int64s) -> list[RowId]:
        ordinals = self.find_ordinals(positions)
        ids: list[Any] = [None] * len(ordinals)
        for _, member, chosen, inside in self._divide(ordinals):
            for i, row_id in zip(chosen.tolist(), member.name_ordinals(inside), strict=True):
                ids[i] = row_id
        return ids

    def name_rows(self, locations: Locations) -> list[RowId]:
        return [
            self._members[location.source].name_rows(locations[i : i + 1])[0]
            for i, location in enumerate(locations)
        ]

    def number_rows(self, locations: Locations) -> list[int]:
        starts = cumulate([member.source_rows for member in self._members])
        return [
            int(starts[location.source])
            + self._members[location.source].number_rows(locations[i : i + 1])[0]
            for i, location in enumerate(locations)
        ]

    def number_positions(self, positions: Int64s) -> list[int]:
        starts = cumulate([member.source_rows for member in self._members])
        ordinals = self.find_ordinals(positions)
        numbers = np.empty_like(ordinals)
        for member_number, member, chosen, inside in self._divide(ordinals):
            numbers[chosen] = starts[member_number] + member.number_ordinals(inside)
        return numbers.tolist()  # type: ignore[no-any-return]

    @property
    def is_persistent(self) -> bool:
        return all(member.is_persistent for member in self._given)

    def _divide(self, ordinals: Int64s) -> Iterator[tuple[int, SourceDataset, Int64s, Int64s]]:
        """Yield member, indices into ``ordinals`` and ordinals among the rows of the member."""
        starts = cumulate([member.total_rows for member in self._members])
        members = np.searchsorted(starts[:-1], ordinals, side="right") - 1
        for number, member in enumerate(self._members):
            chosen = np.flatnonzero(members == number)
            if len(chosen):
                yield number, member, chosen, ordinals[chosen] - starts[number]

    def _sort_blocks(self, source: int, blocks: Int64s) -> Int64s:
        return self._current_order().sort_member_blocks(source, blocks)

    def __repr__(self) -> str:
        return f"<Mixture of {len(self._given)}: rank {self._rank} of {self._world_size}>"


class _MixtureOrder(EpochOrder):
    """Order of a mixture. Ordinals number the rows of the first member, the second, and so on."""

    def __init__(
        self, mixture: Mixture, members: Sequence[SourceDataset], orders: Any, epoch: int
    ) -> None:
        super().__init__(mixture.total_rows)
        self._mixture, self._orders, self._epoch = mixture, orders, epoch
        self._counts = [member.total_rows for member in members]
        self._starts = cumulate(self._counts)
        self._has_blocks = [member.max_window_bytes > 0 for member in members]
        self._round_rows = mixture.round_rows
        self._last_round = max(1, self.n // self._round_rows) - 1
        #: Rows that each member has delivered in earlier epochs.
        self._delivered = [epoch * count for count in mixture.count_rows(self.n)]
        #: Epoch of each member at the start of the current window.
        self._member_epochs = [0] * len(members)
        self._arrange = lru_cache(maxsize=8)(self._arrange_round)

    def _find_edges(self, number: int) -> tuple[int, int]:
        """Return the bounds of a round. The last one includes the remainder."""
        start = number * self._round_rows
        return start, self.n if number == self._last_round else start + self._round_rows

    def _arrange_round(self, number: int) -> tuple[Int64s, Int64s]:
        """Return the member of each position of a round, and its turn: the rows of it before."""
        start, end = self._find_edges(number)
        before, after = self._mixture.count_rows(start), self._mixture.count_rows(end)
        counts = [b - a for a, b in zip(before, after, strict=True)]
        key = derive_key(self._mixture.seed, "round", self._epoch, number)
        shuffled = Permutation(end - start, key).map_positions(np.arange(end - start))
        members = np.repeat(np.arange(len(counts)), counts)[shuffled]
        turns = np.empty_like(members)
        for member, first in enumerate(before):
            chosen = members == member
            turns[chosen] = first + self._delivered[member] + np.arange(counts[member])
        return members, turns

    def map_positions(self, positions: Int64s) -> Int64s:
        members, turns = np.empty_like(positions), np.empty_like(positions)
        rounds = np.minimum(positions // self._round_rows, self._last_round)
        for number in np.unique(rounds).tolist():
            chosen = rounds == number
            inside = positions[chosen] - number * self._round_rows
            found_members, found_turns = self._arrange(number)
            members[chosen], turns[chosen] = found_members[inside], found_turns[inside]
        ordinals = np.empty_like(positions)
        for member, count in enumerate(self._counts):
            of_member = members == member
            for epoch in np.unique(turns[of_member] // count).tolist():
                chosen = np.flatnonzero(of_member & (turns // count == epoch))
                order = self._orders(member, epoch)
                inside = turns[chosen] - epoch * count
                ordinals[chosen] = self._starts[member] + order.map_positions(inside)
        return ordinals

    def iter_ranges(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield ranges in which each member reads the same windows."""
        begin = start
        previous: list[tuple[int, int, int, int]] | None = None
        while start < stop:
            number = min(start // self._round_rows, self._last_round)
            windows = self._find_windows(number)
            if start > begin and (windows != previous or start - begin >= RANDOM_ACCESS_ROWS):
                self._member_epochs = [epoch for epoch, *_ in previous or ()]
                yield begin, start
                begin = start
            previous = windows
            start = min(stop, self._find_edges(number)[1])
        if start > begin:
            self._member_epochs = [epoch for epoch, *_ in previous or ()]
            yield begin, start

    def _find_windows(self, number: int) -> list[tuple[int, int, int, int]]:
        """Return first and last epoch and window of each member in a round."""
        start, end = self._find_edges(number)
        before, after = self._mixture.count_rows(start), self._mixture.count_rows(end)
        windows = []
        for member, count in enumerate(self._counts):
            if not self._has_blocks[member] or before[member] == after[member]:
                windows.append((0, 0, 0, 0))
                continue
            first = divmod(before[member] + self._delivered[member], count)
            last = divmod(after[member] - 1 + self._delivered[member], count)
            ends = [self._orders(member, epoch).find_window_end(p) for epoch, p in (first, last)]
            windows.append((first[0], ends[0], last[0], ends[1]))
        return windows

    def sort_member_blocks(self, member: int, blocks: Int64s) -> Int64s:
        """Return blocks of a member in reading order."""
        sorted_blocks: Int64s = self._orders(member, self._member_epochs[member]).sort_blocks(
            blocks
        )
        return sorted_blocks


def _check_member(number: int, pair: Any) -> SourceDataset:
    """Return the dataset of a ``(dataset, weight)`` after checking both."""
    if not isinstance(pair, Sequence) or len(pair) != 2:
        raise TypeError(f"Source {number} of the mixture must be (dataset, weight), not {pair!r}")
    dataset, weight = pair
    if not isinstance(dataset, SourceDataset):
        raise TypeError(f"Source {number} of the mixture must be a dataset, not {dataset!r}")
    if dataset.world_size != 1:
        raise ValueError(
            f"Source {number} of the mixture is already sharded (world_size {dataset.world_size})."
            " Pass rank= and world_size= to the mixture only."
        )
    if not isinstance(weight, (Real, float)) or not 0 < float(weight) < float("inf"):
        raise ValueError(f"weight of source {number} must be above 0, not {weight!r}")
    return dataset
