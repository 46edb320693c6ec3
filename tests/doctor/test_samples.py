"""Which samples were seen: exact while few, estimated beyond."""

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
        writer.flush()
    return read_box(box.path).passes


def test_few_ids_are_exact_and_in_order(box):
    (one,) = passes_of(box, [5, 3, 9, 3])
    assert (one.ids, one.count, one.is_exact) == ((5, 3, 9, 3), 4, True)
    assert samples.distinct(one) == 3


def test_overlap_of_exact_passes_is_the_share_of_the_smaller(box):
    a, b, c = passes_of(box, list(range(10)), list(range(8, 12)), [])
    assert samples.overlap(a, b) == 0.5  # 8 and 9, of four
    assert samples.overlap(a, c) == 0.0


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_overlap_of_long_passes_is_estimated(box, share):
    n = 50_000
    shared = int(n * share)
    a, b = passes_of(box, list(range(n)), list(range(n - shared, 2 * n - shared)), batch=1000)
    assert not a.is_exact
    assert len(a.sketch) == layout.SKETCH_SIZE
    assert samples.overlap(a, b) == pytest.approx(share, abs=0.12)
    assert samples.distinct(a) == pytest.approx(n, rel=0.2)


def test_a_long_pass_over_few_samples_is_found_to_repeat_them(box):
    ids = list(range(300)) * 20
    (one,) = passes_of(box, ids)
    assert one.count == 6000
    assert samples.distinct(one) == 300
    short, long = passes_of(box, list(range(300)), ids)[-2:]
    assert samples.overlap(short, long) == pytest.approx(1.0, abs=0.01)


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


def test_the_hash_is_that_of_splitmix64():
    import numpy as np

    # The published generator's first outputs for seed 0: the mixes of 0 and of its increment.
    assert samples.hash_ids(np.array([0])).tolist() == [0xE220A8397B1DCDAF]
    increment = np.array([0x9E3779B97F4A7C15], dtype=np.uint64).view(np.int64)
    assert samples.hash_ids(increment).tolist() == [0x6E789E6AA1B965F4]
