"""Segments: a descriptor lives as long as its segment is used, whoever finds it to be garbage."""

import gc
import os
import weakref

import numpy as np
import pytest

import miniray
from miniray.core import session
from miniray.core.local import system

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
    collected = weakref.ref(lease)
    cycle = [lease]
    cycle.append(cycle)
    del lease, cycle
    while collected() is not None:
        gc.collect()  # does nothing while a different thread is collecting
    again = store.allocate(MEGABYTE)
    assert again.segment.id == segment
    assert os.fstat(again.segment.fd).st_size == MEGABYTE


def use(store, size, write):
    """Let somebody have the object in a segment as his own, and perhaps write; the mapping used."""
    lease = store.allocate(size)
    np.frombuffer(lease.segment.map, np.uint8)[:] = 7
    memory = np.frombuffer(lease.private_map(), np.uint8)
    place = memory.__array_interface__["data"][0]
    assert memory.min() == memory.max() == 7
    if write:
        memory[size // 2] = 1
    return place, memory  # which, as values do, outlives the lease by a moment


@pytest.mark.skipif(not system.LINUX, reason="pages that were written to are seen on Linux only")
def test_memory_that_was_written_to_is_nobody_elses(store):
    """A mapping serves again until somebody writes to it, also after uses without a page fault."""
    size, places = 8 * MEGABYTE, []
    for write in (False, False, False, True, False):
        place, memory = use(store, size, write)
        places.append(place)
        del memory
    assert len(set(places[:4])) == 1


def test_the_descriptor_is_closed_with_the_last_use(store):
    lease = store.allocate(3 * MEGABYTE)
    number = int(lease.segment.fd)
    store.close()
    assert os.fstat(number).st_size == 3 * MEGABYTE  # its user is still there
    del lease
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)
