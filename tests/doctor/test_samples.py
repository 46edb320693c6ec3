"""Which samples were seen: exact numbers while few, lower bounds beyond."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miniray.doctor import layout, samples
from miniray.doctor.box import Box
from miniray.doctor.reader import read_box


@pytest.fixture
def box(tmp_path):
    box = Box.create(tmp_path / "0.box")
    box.write_info({"rank": 0})
    yield box
    box.close()


def passes_of(box, *id_lists, batch=64):
    for epoch, ids in enumerate(id_lists):
        writer = samples.PassWriter(box, 0, epoch)
        for start in range(0, len(ids), batch):
            writer.add(ids[start : start + batch])
    return read_box(box.path).passes


def test_few_ids_are_exact_and_in_order(box):
    (one,) = passes_of(box, [5, 3, 9, 3])
    assert (one.ids, one.count, one.is_exact) == ((5, 3, 9, 3), 4, True)
    assert samples.count_distinct(one) == 3


def test_overlap_of_exact_passes_is_the_share_of_the_smaller(box):
    a, b, c = passes_of(box, list(range(10)), list(range(8, 12)), [])
    assert samples.overlap(a, b) == 0.5  # 8 and 9, of four
    assert samples.overlap(a, c) == 0.0


@pytest.mark.parametrize(("first", "shared"), [(20_000, 0), (3000, 1096), (0, 4096)])
def test_long_passes_have_lower_bounds(box, first, shared):
    """Two passes of 20,000 different ids each; the second one starts at ``first``."""
    a, b = passes_of(box, list(range(20_000)), list(range(first, first + 20_000)), batch=1000)
    assert (a.count, a.is_exact, len(a.ids)) == (20_000, False, layout.PASS_IDS)
    assert samples.count_distinct(a) == layout.PASS_IDS
    assert samples.count_shared(a, b) == shared
    assert samples.count_distinct(a, b) == 2 * layout.PASS_IDS - shared
    assert samples.overlap(a, b) == shared / layout.PASS_IDS


def test_what_is_shared_is_exact_or_a_lower_bound(box, golden):
    few = passes_of(box, list(range(8)), list(range(4, 12)))
    many = passes_of(box, list(range(5000)), list(range(5000)))[-2:]
    lines = [samples.describe_overlap(*pair) for pair in (few, many)]
    golden("overlap.txt", "\n".join(lines) + "\n")


def test_a_long_pass_over_few_samples_is_found_to_repeat_them(box):
    ids = list(range(300)) * 20
    (one,) = passes_of(box, ids)
    assert one.count == 6000
    assert samples.count_distinct(one) == 300
    short, long = passes_of(box, list(range(300)), ids)[-2:]
    assert samples.overlap(short, long) == 1.0


def test_the_same_order_twice_is_seen_also_when_an_epoch_is_cut_short(box):
    first, second, other = passes_of(
        box, list(range(100)), list(range(40)), list(range(99, -1, -1))
    )
    assert samples.same_order(first, second) is True
    assert samples.same_order(first, other) is False
    assert samples.same_order(*passes_of(box, [1, 2], [1, 2])[-2:]) is None


def test_the_last_six_passes_are_kept(box):
    found = passes_of(box, *[[epoch] for epoch in range(9)])
    assert [one.epoch for one in found] == [3, 4, 5, 6, 7, 8]
    assert [one.ids for one in found] == [(3,), (4,), (5,), (6,), (7,), (8,)]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=200), st.integers(1, 50))
def test_any_ids_in_any_batches_come_back(tmp_path_factory, ids, batch):
    box = Box.create(tmp_path_factory.mktemp("ids") / "0.box")
    box.write_info({"rank": 0})
    (one,) = passes_of(box, ids, batch=batch)
    box.close()
    assert list(one.ids) == ids
    if ids:
        assert samples.overlap(one, one) == 1.0
