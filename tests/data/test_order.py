"""Orders are bijections, windows hold few bytes, and nothing depends on budget or world size."""

import itertools
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miniray.data.locations import Blocks
from miniray.data.plan.groups import GroupedOrder
from miniray.data.plan.order import GlobalOrder, SequentialOrder, WindowOrder
from miniray.data.plan.selection import Selection, join_bits
from miniray.data.plan.shard import split_evenly

#: (rows, bytes per row, whether the block is of the same row group as the one before).
block_lists = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 500), st.booleans()), min_size=1, max_size=30
)


def make_blocks(described):
    rows = [rows for rows, _, _ in described]
    runs = np.cumsum([not same for _, _, same in described])
    nbytes = [rows * each for rows, each, _ in described]
    return Blocks([0] * len(rows), runs, [0] * len(rows), rows, nbytes)


def ordinals_of(order):
    return order.map_positions(np.arange(order.n)).tolist()


@given(st.integers(0, 500), st.integers(1, 40))
def test_parts_are_disjoint_complete_and_even(n, world):
    rows, sizes = [], []
    for rank in range(world):
        low, high = split_evenly(n, rank, world)
        rows += range(low, high)
        sizes.append(high - low)
    assert rows == list(range(n))
    assert max(sizes) - min(sizes) <= 1


@settings(max_examples=150, deadline=None)
@given(block_lists, st.integers(), st.integers(0, 3), st.integers(1, 20_000), st.integers(0, 200))
def test_orders_have_every_row_once(described, seed, epoch, window_bytes, most):
    blocks = make_blocks(described)
    selection = Selection(blocks).draw(most, seed)
    n = min(most, blocks.total_rows)
    assert selection.count == n
    for order in [
        SequentialOrder(blocks, selection, window_bytes),
        WindowOrder(blocks, selection, seed, epoch, window_bytes),
        GlobalOrder(n, seed, epoch),
    ]:
        assert sorted(ordinals_of(order)) == list(range(n))
        ranges = list(order.iter_ranges(0, n))
        assert [p for low, high in ranges for p in range(low, high)] == list(range(n))
    assert ordinals_of(SequentialOrder(blocks, selection, window_bytes)) == list(range(n))
    locations = selection.locate(np.arange(n))
    places = [(location.block, location.row) for location in locations]
    assert places == sorted(set(places))
    assert all(row < blocks[block].rows for block, row in places)


@settings(max_examples=150, deadline=None)
@given(block_lists, st.integers(1, 20_000))
def test_windows_hold_few_bytes_and_blocks_are_read_once(described, window_bytes):
    blocks = make_blocks(described)
    selection = Selection(blocks)
    order = WindowOrder(blocks, selection, 1, 0, window_bytes)
    seen = []
    for low, high in order.iter_ranges(0, order.n):
        ordinals = order.map_positions(np.arange(low, high))
        found = np.unique(selection.locate(ordinals).array[:, 1])
        if len(found) > 1:
            assert blocks.nbytes[found].sum() <= window_bytes
        seen += order.sort_blocks(found).tolist()
    assert sorted(seen) == [b for b in range(len(blocks)) if blocks.rows[b]]
    # The blocks of a row group are read in order, one after the other.
    for _, run in itertools.groupby(seen, lambda block: int(blocks.run[block])):
        run = list(run)
        assert run == sorted(run)
    runs = [run for run, _ in itertools.groupby(seen, lambda block: int(blocks.run[block]))]
    assert len(runs) == len(set(runs))


@settings(max_examples=150, deadline=None)
@given(
    block_lists,
    st.integers(1, 9),
    st.integers(1, 20_000),
    st.sampled_from([None, "window", "global"]),
    st.data(),
)
def test_groups_stay_whole(described, largest, window_bytes, shuffle, data):
    blocks = make_blocks(described)
    n = blocks.total_rows
    starts = [0] if n else []
    while starts and starts[-1] + largest < n:
        starts.append(starts[-1] + data.draw(st.integers(1, largest)))
    selection = Selection(blocks)
    order = GroupedOrder(blocks, selection, starts, shuffle, 3, 1, window_bytes)
    rows = ordinals_of(order)
    assert sorted(rows) == list(range(n))
    begins = set(starts)
    assert all(b == a + 1 or b in begins for a, b in itertools.pairwise(rows))
    for position in range(n):
        start = order.find_group_start(position)
        assert start == n or rows[start] in begins
        assert start >= position
        assert not begins & set(rows[position:start])


# -- selections ----------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 40), max_size=12), st.integers(0, 400), st.integers(), st.data())
def test_selection_of_a_filter_then_a_subset(rows, most, seed, data):
    n = sum(rows)
    kept = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)), dtype=bool)
    zeros = [0] * len(rows)
    blocks = Blocks(zeros, zeros, zeros, rows, zeros)
    cut = data.draw(st.integers(0, n))
    parts = [np.packbits(part, bitorder="little") for part in (kept[:cut], kept[cut:])]
    whole = Selection(blocks, join_bits(parts, [cut, n - cut]))
    numbers = np.flatnonzero(kept).tolist()
    assert whole.number_rows(np.arange(whole.count)).tolist() == numbers
    first = whole.take_first(most)
    assert first.number_rows(np.arange(first.count)).tolist() == numbers[:most]
    drawn = whole.draw(most, seed)
    subset = drawn.number_rows(np.arange(drawn.count)).tolist()
    assert len(subset) == min(most, len(numbers))
    assert set(subset) <= set(numbers)
    assert subset == sorted(subset)
    # The same rows if the data is cut into different blocks.
    other = drawn.for_blocks(Blocks([0], [0], [0], [n], [0]))
    assert other.number_rows(np.arange(other.count)).tolist() == subset
    assert other.digest == drawn.digest


def test_selection_digest_distinguishes_rows():
    blocks = Blocks([0], [0], [0], [100], [0])
    whole = Selection(blocks)
    digests = [whole.digest, *(whole.draw(50, seed).digest for seed in (1, 2))]
    assert len(set(digests)) == 3
    assert whole.draw(100, 1).digest == "all"


def create_blocks(count, rows):
    zeros, files = np.zeros(count, dtype=np.int64), np.arange(count)
    return Blocks(zeros, files, files * rows, np.full(count, rows), np.full(count, 8_000_000))


@pytest.mark.parametrize("rank", [0, 8191, 16383])
def test_billion_rows_on_16384_ranks_need_one_entry_per_block(rank):
    tracemalloc.start()
    blocks = create_blocks(25_000, 40_000)
    selection = Selection(blocks)
    assert selection.count == 10**9
    order = WindowOrder(blocks, selection, 1, 0, 32_000_000)
    start, stop = split_evenly(10**9, rank, 16384)
    ranges = list(order.iter_ranges(start, stop))
    assert len(ranges) <= 2
    found = selection.locate(order.map_positions(np.arange(start, start + 64)))
    assert len({location.block for location in found}) <= 4
    assert tracemalloc.get_traced_memory()[1] < 500 * len(blocks)
    tracemalloc.stop()


def test_selection_needs_one_bit_per_row():
    blocks = create_blocks(2500, 40_000)
    bits = np.full(blocks.total_rows // 8, 0xAA, dtype=np.uint8)
    tracemalloc.start()
    selection = Selection(blocks, bits)
    assert selection.count == blocks.total_rows // 2
    order = WindowOrder(blocks, selection, 1, 0, 32_000_000)
    start, _ = split_evenly(order.n, 16383, 16384)
    found = selection.locate(order.map_positions(np.arange(start, start + 64)))
    assert all(location.row % 2 for location in found)
    assert len(selection.digest) == 16
    assert tracemalloc.get_traced_memory()[1] < 500 * len(blocks) + 2_000_000
    tracemalloc.stop()
