"""Several datasets read as one, in given proportions.

The mixed order is cut into rounds. In each round every source has its share of places (counts
follow the weights to within one row over any number of rounds), in a keyed random arrangement.
From each source rows are taken in its own order, so a rank reads neighbouring blocks of it; where
a source is used up its next epoch begins.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from math import ceil, floor
from numbers import Real
from typing import Any, Literal

import numpy as np

from miniray.checks import check_choice, suggest_options
from miniray.data.dataset import Dataset
from miniray.data.loader.blocks import Places
from miniray.data.plan.order import Order, starts_of
from miniray.data.plan.permutation import Permutation, Positions, derive_key
from miniray.data.plan.shard import Even, check_even, resolve_seed
from miniray.data.sources.base import Source, parse_bytes
from miniray.errors import DataError

_ROUND = 64


@suggest_options()
class Mixture(Dataset):
    """Rows of ``datasets``, a list of ``(dataset, weight)``, in proportion to the weights.

    Deterministic, sharded over ranks and resumable like a single dataset; a state of it describes
    all sources. Datasets are given unsharded: ``rank`` and ``world_size`` belong here. Those made
    without a seed of their own get one from the mixture's.

    An epoch ends, with ``until="first"``, before any source would repeat a row: rows of the others
    that were not reached come in the next epoch. With ``until="all"`` every row of every source has
    come at least once, and smaller sources repeat.
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
        memory_budget: int | str = "256MB",
    ) -> None:
        self._set_rank(rank, world_size)
        check_even(even)
        if not datasets:
            raise ValueError("a mixture needs at least one (dataset, weight)")
        check_choice("until", until, ("first", "all"))
        for number, pair in enumerate(datasets):
            if not isinstance(pair, Sequence) or len(pair) != 2:
                raise TypeError(f"source {number} of the mixture is no (dataset, weight): {pair!r}")
            dataset, weight = pair
            if not isinstance(dataset, Dataset) or isinstance(dataset, Mixture):
                raise TypeError(f"source {number} of the mixture is no dataset: {dataset!r}")
            if dataset.world_size != 1:
                raise ValueError(
                    f"source {number} of the mixture is sharded already (world_size"
                    f" {dataset.world_size}); give rank and world_size to the mixture only"
                )
            if not isinstance(weight, (Real, float)) or not 0 < weight < float("inf"):
                raise ValueError(f"weight of source {number} must be above 0, not {weight!r}")
        self._even = even
        self._until = until
        self._seed = resolve_seed(seed, self._world_size, "mixing")
        self._seed_given = seed is not None
        self._shuffle = None
        self._max_samples = -1
        self._group_by = None
        self._budget = parse_bytes(memory_budget)
        self._window = 0
        total = sum(weight for _, weight in datasets)
        self._shares = [weight / total for _, weight in datasets]
        self._given = [dataset for dataset, _ in datasets]
        self._chunk_left = None
        self._begin(0)
        self._forget()

    def _forget(self) -> None:
        super()._forget()
        self._members: list[Dataset] | None = None
        self._orders: Callable[[int, int], Order] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_members": None, "_orders": None}

    # -- the sources -----------------------------------------------------------------------------

    def prepare(self) -> Mixture:
        if self._members is None:
            budget = self._budget // len(self._given)
            members = []
            for number, given in enumerate(self._given):
                member = given._twin()
                if not given._seed_given and given.seed is not None:
                    member._seed = derive_key(self._seed, "source", number) >> 16
                    member._selection = None
                member.set_memory_budget(budget)
                members.append(member.prepare())
            self._members = members
            self._orders = lru_cache(maxsize=2 * len(members))(
                lambda number, epoch: members[number].order_of(epoch, 1)
            )
        return self

    @property
    def _sources(self) -> list[Dataset]:
        self.prepare()
        assert self._members is not None
        return self._members

    @property
    def sources(self) -> list[Source]:
        """Those of all members, in the order they were given."""
        return [member.sources[0] for member in self._sources]

    def set_memory_budget(self, budget: int | str) -> None:
        self._budget = parse_bytes(budget)
        self._forget()

    @property
    def column_names(self) -> list[str] | None:
        """Those of the first member."""
        return self._given[0].column_names

    @property
    def is_shuffled(self) -> bool:
        """Always True: rounds are arranged randomly."""
        return True

    @property
    def kind(self) -> str:
        """Always ``"mixture"``."""
        return "mixture"

    @property
    def fingerprint(self) -> str:
        digest = hashlib.blake2b(digest_size=8)
        for member, share in zip(self._sources, self._shares, strict=True):
            digest.update(f"{member.fingerprint} {member.total_rows} {share!r};".encode())
        return digest.hexdigest()

    def _count(self) -> int:
        rows = [member.total_rows for member in self._sources]
        if not all(rows):
            raise DataError(f"source {rows.index(0)} of the mixture has no rows")
        passes = [count / share for count, share in zip(rows, self._shares, strict=True)]
        if self._until == "all":
            return ceil(max(passes))
        count = floor(min(passes))
        while count and any(have > n for have, n in zip(self._among(count), rows, strict=True)):
            count -= 1  # rounding to whole rows has given a source one too many
        return count

    # -- the order -------------------------------------------------------------------------------

    def _among(self, position: int) -> list[int]:
        """How many of the rows before ``position``, the end of a round, are of each source.

        Sums of shares are rounded and not the shares, so that the counts add up exactly.
        """
        ends = np.cumsum(self._shares)[:-1].tolist()
        edges = [0, *(round(position * end) for end in ends), position]
        return [after - before for before, after in pairwise(edges)]

    @property
    def _round(self) -> int:
        # Long enough for the least share to have a few places in each.
        return max(_ROUND, ceil(4 / min(self._shares)))

    def _round_edges(self, number: int) -> tuple[int, int]:
        """Where a round begins and ends; the last one takes what is left over as well."""
        last = max(1, self._n() // self._round) - 1
        start = number * self._round
        return start, self._n() if number == last else start + self._round

    def _arrangement(self, number: int) -> tuple[Positions, Positions]:
        """For each place of a round its source, and how many rows of that come before."""
        start, end = self._round_edges(number)
        before, after = self._among(start), self._among(end)
        counts = [b - a for a, b in zip(before, after, strict=True)]
        key = derive_key(self._seed, "round", self._epoch, number)
        shuffled = Permutation(end - start, key)(np.arange(end - start))
        sources = np.repeat(np.arange(len(counts)), counts)[shuffled]
        turns = np.empty_like(sources)
        for which, first in enumerate(before):
            of_it = sources == which
            turns[of_it] = first + np.arange(counts[which])
        return sources, turns

    def _turns(self, asked: Sequence[int]) -> tuple[Positions, Positions]:
        """For each position its source, and the number of the row in its endless order."""
        positions = np.array(asked, dtype=np.int64)
        source, turn = np.empty_like(positions), np.empty_like(positions)
        last = max(1, self._n() // self._round) - 1
        rounds = np.minimum(positions // self._round, last)
        for number in set(rounds.tolist()):
            chosen = rounds == number
            inside = positions[chosen] - number * self._round
            sources, turns = self._arrangement(number)
            source[chosen], turn[chosen] = sources[inside], turns[inside]
        return source, turn + self._epoch * np.array(self._among(self._n()))[source]

    def _by_order(
        self, source: Positions, turn: Positions
    ) -> Iterator[tuple[int, Dataset, Order, list[int], Positions]]:
        """(source, its dataset, the order of its epoch, positions there, which rows these are)."""
        assert self._orders is not None
        for which, member in enumerate(self._sources):
            count = member.total_rows
            of_it = source == which
            for epoch in sorted(set((turn[of_it] // count).tolist())):
                chosen = np.flatnonzero(of_it & (turn // count == epoch))
                inside = (turn[chosen] - epoch * count).tolist()
                yield which, member, self._orders(which, epoch), inside, chosen

    def places_of(self, positions: Sequence[int]) -> Places:
        self.prepare()
        source, turn = self._turns(positions)
        block, row = np.empty_like(source), np.empty_like(source)
        for _, member, order, inside, chosen in self._by_order(source, turn):
            places = member.places_in(order, inside)
            block[chosen], row[chosen] = places.block, places.row
        return Places(source.tolist(), block.tolist(), row.tolist())

    def ordinals(self, positions: Sequence[int]) -> list[int]:
        self.prepare()
        found = np.empty(len(positions), dtype=np.int64)
        starts = self._member_starts()
        for which, member, order, inside, chosen in self._by_order(*self._turns(positions)):
            found[chosen] = member.ordinals_in(order, inside)
            found[chosen] += starts[which]
        return found.tolist()  # type: ignore[no-any-return]

    def places_of_ordinals(self, ordinals: Sequence[int]) -> Places:
        asked, starts = np.array(ordinals, dtype=np.int64), self._member_starts()
        source = np.searchsorted(starts, asked, side="right") - 1
        block, row = np.empty_like(asked), np.empty_like(asked)
        for which, member in enumerate(self._sources):
            chosen = source == which
            places = member.places_of_ordinals((asked[chosen] - starts[which]).tolist())
            block[chosen], row[chosen] = places.block, places.row
        return Places(source.tolist(), block.tolist(), row.tolist())

    def _member_starts(self) -> list[int]:
        return starts_of([member.total_rows for member in self._sources])

    @property
    def distinct_rows(self) -> int:
        return sum(member.total_rows for member in self._sources)

    def _plan(self) -> dict[str, Any]:
        return {**super()._plan(), "until": self._until, "sources": len(self._given)}

    def __repr__(self) -> str:
        return f"<Mixture of {len(self._given)}: rank {self._rank} of {self._world_size}>"
