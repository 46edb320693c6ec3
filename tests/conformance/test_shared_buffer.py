"""Shared buffers: memory that the driver and all actors map read-write."""

import pickle

import numpy as np
import pytest

import miniray
from miniray import limits
from miniray.core import SharedBuffer
from miniray.errors import CapabilityError, NotSerializableError, ObjectStoreFullError
from tests.conformance.helpers import needs


@miniray.remote
class Writer:
    def fill(self, buffer, value):
        np.frombuffer(buffer.map(), np.uint8)[:] = value

    def read(self, held):
        return held["buffer"].map()[0]

    def hold(self, buffer):
        self.buffer = buffer
        return buffer

    def give(self):
        return self.buffer

    def pass_on(self, other):
        miniray.get(other.hold.remote(self.buffer))

    def add(self, value):
        np.frombuffer(self.buffer.map(), np.uint8)[:] += np.uint8(value)

    def close(self, buffer):
        buffer.close()


@pytest.fixture
def buffer(engine):
    needs(engine, "shared_memory")
    return SharedBuffer(1001)


def contents(buffer):
    return set(buffer.map())


def test_unsupported_engine_raises_capability_error(engine):
    if engine.capabilities.shared_memory:
        SharedBuffer(1)
    else:
        with pytest.raises(CapabilityError):
            SharedBuffer(1)


def test_new_buffer_has_the_size_and_zeros(buffer):
    assert (buffer.size, len(buffer.map())) == (1001, 1001)
    assert contents(buffer) == {0}


@pytest.mark.parametrize("size", [0, -1, 1.5, "1", True, None])
def test_invalid_size_raises_value_error(engine, size):
    with pytest.raises(ValueError):
        SharedBuffer(size)


def test_writes_of_actors_are_visible_everywhere(buffer):
    first, second = Writer.remote(), Writer.remote()
    view = np.frombuffer(buffer.map(), np.uint8)
    miniray.get(first.fill.remote(buffer, 3))
    assert (view == 3).all()
    assert miniray.get(second.read.remote({"buffer": buffer})) == 3
    view[:] = 4
    assert miniray.get(first.read.remote({"buffer": buffer})) == 4


def test_task_and_put_share_the_same_memory(buffer):
    fill = miniray.remote(lambda held: held[0].map().__setitem__(0, 7))
    miniray.get(fill.remote([buffer]))
    assert miniray.get(miniray.put(buffer)).map()[0] == 7


def test_returned_buffer_is_the_same_memory(buffer):
    returned = miniray.get(Writer.remote().hold.remote(buffer))
    assert (type(returned), returned.size) == (SharedBuffer, 1001)
    returned.map()[1000] = 9
    assert buffer.map()[1000] == 9


def test_buffer_passed_from_actor_to_actor(buffer):
    first, second = Writer.remote(), Writer.remote()
    miniray.get(first.hold.remote(buffer))
    miniray.get(first.pass_on.remote(second))
    miniray.get([first.add.remote(1), second.add.remote(2)])
    assert contents(buffer) == {3}
    miniray.kill(first)
    miniray.get(second.add.remote(2))
    assert contents(buffer) == {5}


def test_last_holder_keeps_the_content(buffer):
    writer = Writer.remote()
    miniray.get(writer.hold.remote(buffer))
    buffer.map()[:] = bytes([6]) * 1001
    buffer.close()
    assert contents(miniray.get(writer.give.remote())) == {6}


def test_closed_buffer_raises_and_its_views_stay_valid(buffer):
    writer = Writer.remote()
    view = buffer.map()
    buffer.close()
    buffer.close()
    view[0] = 5
    assert np.frombuffer(view, np.uint8).sum() == 5
    with pytest.raises(ValueError):
        buffer.map()
    with pytest.raises(NotSerializableError):
        writer.fill.remote(buffer, 1)


def test_close_in_an_actor_does_not_close_others(buffer):
    miniray.get(Writer.remote().close.remote(buffer))
    buffer.map()[0] = 1
    assert miniray.get(Writer.remote().read.remote({"buffer": buffer})) == 1


def test_readonly_map_rejects_writes(buffer):
    view = buffer.map(writable=False)
    assert not np.frombuffer(view, np.uint8).flags.writeable
    with pytest.raises(TypeError):
        view[0] = 1


def test_plain_pickle_raises_type_error(buffer):
    with pytest.raises(TypeError):
        pickle.dumps(buffer)


def test_more_than_available_memory_raises(buffer, monkeypatch):
    with pytest.raises(ObjectStoreFullError):
        SharedBuffer(limits.memory_total() * 2)
    monkeypatch.setattr(limits, "memory_available", lambda: 4096)
    SharedBuffer(4096)
    with pytest.raises(ObjectStoreFullError):
        SharedBuffer(4097)
