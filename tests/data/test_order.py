"""Orders are bijections, and ranks meet only at their borders."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from miniray.data.plan.groups import GroupedOrder
from miniray.data.plan.order import GlobalOrder, SequentialOrder, WindowOrder
from miniray.data.plan.shard import part_bounds

blocks = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 500)), min_size=1, max_size=30)


def split(blocks):
    return [rows for rows, _ in blocks], [rows * each for rows, each in blocks]


def all_places(order):
    return list(zip(*order.places(range(order.n)), strict=True))


def expected(sizes):
    return [(block, row) for block, size in enumerate(sizes) for row in range(size)]


@given(st.integers(0, 500), st.integers(1, 40))
def test_parts_are_disjoint_complete_and_even(n, world):
    rows, sizes = [], []
    for rank in range(world):
        low, high = part_bounds(n, rank, world)
        rows += range(low, high)
        sizes.append(high - low)
    assert rows == list(range(n))
    assert max(sizes) - min(sizes) <= 1


@settings(max_examples=150, deadline=None)
@given(blocks, st.integers(), st.integers(0, 3), st.integers(1, 20_000), st.integers(1, 12))
def test_every_place_once(blocks, seed, epoch, window, world):
    sizes, nbytes = split(blocks)
    assert all_places(SequentialOrder(sizes)) == expected(sizes)
    assert sorted(all_places(GlobalOrder(sizes, seed, epoch))) == expected(sizes)
    order = WindowOrder(sizes, nbytes, seed, epoch, window, world)
    places = all_places(order)
    assert sorted(places) == expected(sizes)
    touched = []
    for rank in range(world):
        start, end = part_bounds(order.n, rank, world)
        touched += {block for block, _ in places[start:end]}
    assert len(touched) <= sum(size > 0 for size in sizes) + world - 1


@settings(max_examples=150, deadline=None)
@given(blocks, st.integers(1, 20_000), st.integers(1, 8))
def test_little_is_held_at_a_time(blocks, window, world):
    """Between the first and the last row of a block there are no more bytes than a window has."""
    sizes, nbytes = split(blocks)
    order = WindowOrder(sizes, nbytes, 1, 0, window, world)
    block = order.places(range(order.n))[0]
    for start, end in itertools.pairwise(order._edges):
        inside = set(block[start:end])
        if len(inside) > 1:
            assert sum(nbytes[block] for block in inside) <= window


@settings(max_examples=150, deadline=None)
@given(
    blocks,
    st.integers(1, 9),
    st.integers(1, 20_000),
    st.sampled_from([None, "window", "global"]),
    st.data(),
)
def test_groups_stay_whole(blocks, largest, window, shuffle, data):
    sizes, nbytes = split(blocks)
    n = sum(sizes)
    starts = [0] if n else []
    while starts and starts[-1] + largest < n:
        starts.append(starts[-1] + data.draw(st.integers(1, largest)))
    order = GroupedOrder(sizes, nbytes, starts, shuffle, 3, 1, window)
    places = all_places(order)
    assert sorted(places) == expected(sizes)
    natural = {place: i for i, place in enumerate(expected(sizes))}
    rows = [natural[place] for place in places]
    begins = set(starts)
    assert all(b == a + 1 or b in begins for a, b in itertools.pairwise(rows))
    for position in range(n):
        snapped = order.snap(position)
        assert snapped == n or rows[snapped] in begins
        assert snapped >= position
        assert not begins & set(rows[position:snapped])
