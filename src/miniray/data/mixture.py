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
import numpy.typing as npt

from miniray.checks import check_choice, suggest_options
from miniray.data.dataset import Dataset, SplitName, resolve_rank
from miniray.data.datasets import SourceDataset
from miniray.data.loader.columns import RowId
from miniray.data.locations import Int64s, Locations, cumulate
from miniray.data.plan.order import RANDOM_ACCESS_ROWS, WINDOW_BYTES, EpochOrder
from miniray.data.plan.permutation import Permutation, derive_key
from miniray.data.plan.shard import Even, resolve_seed
from miniray.data.rows import RowSet, SourceRows
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
        members = [_check_member(number, pair) for number, pair in enumerate(datasets)]
        resolved = resolve_seed(seed, resolve_rank(rank, world_size)[1], "mixing")
        super().__init__(
            MixedRows(
                members,
                [weight for _, weight in datasets],
                until,
                resolved,
                is_seed_fixed=seed is not None,
            ),
            rank=rank,
            world_size=world_size,
            even=even,
            split=split,
            memory_budget=memory_budget,
        )


class MixedRows(RowSet):
    """Rows of several sources in proportion to weights. See ``Mixture``."""

    is_shuffled = True  # rounds are arranged randomly

    def __init__(
        self,
        members: Sequence[SourceRows],
        weights: Sequence[float],
        until: str,
        seed: int,
        *,
        is_seed_fixed: bool,
    ) -> None:
        total = sum(weights)
        self._shares = [weight / total for weight in weights]
        self._until, self.seed, self.is_seed_fixed = until, seed, is_seed_fixed
        window_bytes = min(WINDOW_BYTES, _WINDOWS_BYTES // len(members))
        members = [member.with_default_window(window_bytes) for member in members]
        self._members = _derive_seeds(members, seed)

    @property
    def members(self) -> Sequence[SourceRows]:
        return self._members

    def with_seed(self, seed: int | None) -> MixedRows:
        return self._replace(seed=seed, _members=_derive_seeds(self._members, seed))

    def for_rank(self, rank: int, world_size: int) -> MixedRows:
        return self._replace(_members=[m.for_rank(rank, world_size) for m in self._members])

    # -- description -----------------------------------------------------------------------------

    @property
    def max_window_bytes(self) -> int:
        return sum(member.max_window_bytes for member in self._members)

    @property
    def fingerprint(self) -> str:
        digest = hashlib.blake2b(digest_size=8)
        for member, share in zip(self._members, self._shares, strict=True):
            digest.update(f"{member.fingerprint} {member.total_rows} {share!r};".encode())
        return digest.hexdigest()

    def digest_selection(self) -> str:
        text = " ".join(member.digest_selection() for member in self._members)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def describe_order(self) -> list[Any]:
        text = repr([member.describe_order() for member in self._members]).encode()
        return ["mixture", self._until, hashlib.blake2b(text, digest_size=8).hexdigest()]

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

    def create_order(self, epoch: int, memory_budget: int) -> MixtureOrder:
        return MixtureOrder(self, epoch, memory_budget // len(self._members))

    # -- rows ------------------------------------------------------------------------------------

    def _divide(
        self, ordinals: Int64s
    ) -> Iterator[tuple[int, SourceRows, npt.NDArray[Any], Int64s]]:
        """Yield member, indices into ``ordinals`` and ordinals among the rows of the member."""
        starts = cumulate([member.total_rows for member in self._members])
        found = np.searchsorted(starts[:-1], ordinals, side="right") - 1
        for number, member in enumerate(self._members):
            chosen = np.flatnonzero(found == number)
            if len(chosen):
                yield number, member, chosen, ordinals[chosen] - starts[number]

    def locate(self, ordinals: Int64s, source: int = 0) -> Locations:
        array = np.empty((len(ordinals), 3), dtype=np.int64)
        for number, member, chosen, inside in self._divide(ordinals):
            array[chosen] = member.locate(inside, number).array
        return Locations(array)

    def number_ordinals(self, ordinals: Int64s) -> Int64s:
        numbers = np.empty_like(ordinals)
        starts = cumulate([member.source_rows for member in self._members])
        for number, member, chosen, inside in self._divide(ordinals):
            numbers[chosen] = starts[number] + member.number_ordinals(inside)
        return numbers

    def name_ordinals(self, ordinals: Int64s) -> list[RowId]:
        ids: list[Any] = [None] * len(ordinals)
        for _, member, chosen, inside in self._divide(ordinals):
            for index, row_id in zip(chosen.tolist(), member.name_ordinals(inside), strict=True):
                ids[index] = row_id
        return ids


def _derive_seeds(members: Sequence[SourceRows], seed: int | None) -> list[SourceRows]:
    """Return the members with seeds that are derived from ``seed``, unless the user passed them."""
    return [
        member
        if member.is_seed_fixed or member.seed is None
        else member.with_seed(derive_key(seed, "source", number) >> 16)
        for number, member in enumerate(members)
    ]


class MixtureOrder(EpochOrder):
    """Order of a mixture. Members have ``memory_budget`` bytes each."""

    def __init__(self, mixture: MixedRows, epoch: int, memory_budget: int) -> None:
        super().__init__(mixture.total_rows)
        members = mixture.members
        self._mixture, self._epoch = mixture, epoch
        self._get_order = lru_cache(maxsize=2 * len(members))(
            lambda number, member_epoch: members[number].create_order(member_epoch, memory_budget)
        )
        self._counts = [member.total_rows for member in members]
        self._starts = cumulate(self._counts)
        self._has_blocks = [member.max_window_bytes > 0 for member in members]
        self._round_rows = mixture.round_rows
        self._last_round = max(1, self.n // self._round_rows) - 1
        #: Rows that each member has delivered in earlier epochs.
        self._delivered = [epoch * count for count in mixture.count_rows(self.n)]
        self._arrange = lru_cache(maxsize=8)(self._arrange_round)

    def _find_round(self, position: int) -> int:
        return min(position // self._round_rows, self._last_round)

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
                order = self._get_order(member, epoch)
                inside = turns[chosen] - epoch * count
                ordinals[chosen] = self._starts[member] + order.map_positions(inside)
        return ordinals

    def iter_ranges(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield ranges in which each member reads the same windows."""
        begin = start
        previous: list[tuple[int, int, int, int]] | None = None
        while start < stop:
            number = self._find_round(start)
            windows = self._find_windows(number)
            if start > begin and (windows != previous or start - begin >= RANDOM_ACCESS_ROWS):
                yield begin, start
                begin = start
            previous = windows
            start = min(stop, self._find_edges(number)[1])
        if start > begin:
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
            ends = [self._get_order(member, epoch).find_window_end(p) for epoch, p in (first, last)]
            windows.append((first[0], ends[0], last[0], ends[1]))
        return windows

    def sort_blocks(self, blocks: Int64s, source: int = 0, position: int = 0) -> Int64s:
        epoch = self._find_windows(self._find_round(position))[source][0]
        return self._get_order(source, epoch).sort_blocks(blocks)


def _check_member(number: int, pair: Any) -> SourceRows:
    """Return the rows of a ``(dataset, weight)`` after checking both."""
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
    return dataset.row_set.members[0]
