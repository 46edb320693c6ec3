"""Segments: a descriptor lives as long as its segment is used, whoever finds it to be garbage."""

import gc
import os

import pytest

import miniray
from miniray.core import session

MEGABYTE = 1 << 20


@pytest.fixture(scope="module")
def store():
    miniray.init(backend="local", num_workers=1)
    yield session.engine().node.store
    miniray.shutdown()


def test_a_segment_out_of_a_dying_cycle_keeps_its_descriptor(store):
    """The collector finalises lease and segment in any order; the store uses the segment again."""
    lease = store.allocate(MEGABYTE)
    segment = lease.segment.id
    cycle = [lease]
    cycle.append(cycle)
    del lease, cycle
    gc.collect()
    again = store.allocate(MEGABYTE)
    assert again.segment.id == segment
    assert os.fstat(again.segment.fd).st_size == MEGABYTE


def test_the_descriptor_is_closed_with_the_last_use(store):
    lease = store.allocate(3 * MEGABYTE)
    number = int(lease.segment.fd)
    store.close()
    assert os.fstat(number).st_size == 3 * MEGABYTE  # its user is still there
    del lease
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)
