"""Weights in shared memory: who may write to them, and what becomes of memory used again."""

import gc
import os
import signal

import numpy as np
import pytest

import miniray
from miniray.core import session
from miniray.ps import Strategy, create_parameter_server
from tests.ps.helpers import call

torch = pytest.importorskip("torch")

#: Large enough to go through shared memory.
SIZE = 300_000


@miniray.remote
class Keeper:
    """A worker that keeps, changes and forgets what it is given, as users' code may."""

    def __init__(self, value):
        self.weights = [torch.full((SIZE,), float(value)), torch.full((7,), float(value))]
        self.given = []

    def get_weights(self):
        return self.weights

    def set_weights(self, weights):
        self.given.append(weights)
        for own, new in zip(self.weights, weights, strict=True):
            own.copy_(new)

    def add(self, value):
        for own in self.weights:
            own.add_(value)

    def spoil_given(self, value):
        """Write to the tensors received last, in place; returns what they held."""
        before = [float(t[0]) for t in self.given[-1]]
        for tensor in self.given[-1]:
            tensor.fill_(value)
        return before

    def forget(self):
        self.given.clear()

    def values_given(self):
        return [[(float(t.min()), float(t.max())) for t in weights] for weights in self.given]

    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)


def same(value):
    return [(value, value), (value, value)]


def test_a_worker_may_write_to_what_it_received(engine):
    keepers = [Keeper.remote(v) for v in (1, 3)]
    server = create_parameter_server()
    call(server, "sync_from_workers", keepers)
    assert call(keepers[0], "spoil_given", 99.0) == [2.0, 2.0]
    assert call(keepers[1], "values_given") == [same(2.0)]  # nobody else sees it
    assert float(call(server, "get_weights")[0][0]) == 2.0
    # Nor does it show in the memory's next use.
    for expected in (2.0, 2.0, 2.0):
        call(keepers[0], "forget")
        call(server, "sync_from_workers", keepers)
        assert call(keepers[0], "values_given") == [same(expected)]
        assert call(keepers[0], "spoil_given", -1.0) == [expected, expected]


def test_a_worker_may_keep_what_it_received(engine):
    """Every version stays as it was, however many follow."""
    keepers = [Keeper.remote(v) for v in (1, 3)]
    server = create_parameter_server()
    for _ in range(5):
        call(server, "sync_from_workers", keepers)
        miniray.get([k.add.remote(1.0) for k in keepers])
    expected = [same(2.0 + i) for i in range(5)]
    assert call(keepers[0], "values_given") == expected
    assert call(keepers[1], "values_given") == expected


def test_pulled_weights_are_the_callers_own(engine):
    server = create_parameter_server()
    call(server, "set_weights", [torch.ones(SIZE), np.ones(SIZE)])
    mine = call(server, "pull_weights")
    mine[0].fill_(5.0)
    assert float(call(server, "pull_weights")[0].max()) == 1.0
    assert float(call(server, "get_weights")[1].max()) == 1.0


def test_a_worker_that_dies_with_the_weights_mapped(local):
    """What it had is not used again for others; the server goes on with those that are left."""
    keepers = [Keeper.remote(v) for v in (1, 3, 5)]
    server = create_parameter_server()
    call(server, "sync_from_workers", keepers)
    with pytest.raises(miniray.errors.ActorDiedError):
        call(keepers[2], "die")
    left = keepers[:2]
    for i in range(4):
        miniray.get([k.add.remote(1.0) for k in left])
        call(server, "sync_from_workers", left)
        assert call(left[0], "values_given") == [same(3.0 + j) for j in range(i + 2)]


def test_a_server_that_dies_leaves_the_workers_what_they_have(local):
    keepers = [Keeper.remote(v) for v in (1, 3)]
    first = create_parameter_server()
    call(first, "sync_from_workers", keepers)
    miniray.kill(first)
    second = create_parameter_server()
    miniray.get([k.add.remote(1.0) for k in keepers])
    call(second, "sync_from_workers", keepers)
    assert call(keepers[0], "values_given") == [same(2.0), same(3.0)]


class Careless(Strategy):
    """Writes to what it must only read."""

    name = "careless"

    def __init__(self, what):
        self.what = what

    def combine(self, global_weights, worker_weights, weights):
        target = global_weights if self.what == "global" else worker_weights[0]
        if target is not None:
            target += 1
        return self.mean(worker_weights, weights, self.out)


@pytest.mark.parametrize("what", ["global", "worker"])
def test_a_strategy_that_writes_to_its_input_is_an_error(engine, what):
    keepers = [Keeper.remote(v) for v in (1, 3)]
    server = create_parameter_server(Careless(what))
    call(server, "set_weights", [torch.zeros(SIZE), torch.zeros(7)])
    with pytest.raises(miniray.errors.TaskError, match="read-only"):
        call(server, "sync_from_workers", keepers)
    assert float(call(server, "get_weights")[0].max()) == 0.0  # and the server lives


# -- the engine's part -----------------------------------------------------------------------------


def test_peek_shows_what_get_shows(local):
    engine = session.engine()
    value = {"t": torch.arange(SIZE), "a": np.arange(SIZE), "small": torch.ones(2), "n": 3}
    ref = miniray.put(value)
    peeked = engine.peek(ref)
    assert torch.equal(peeked["t"], value["t"])
    assert np.array_equal(peeked["a"], value["a"])
    assert torch.equal(peeked["small"], value["small"])
    assert peeked["n"] == 3
    del ref  # the tensors hold their memory themselves
    others = [miniray.put(np.full(SIZE, i)) for i in range(4)]
    assert torch.equal(peeked["t"], torch.arange(SIZE))
    assert len(others) == 4


def test_peek_raises_what_the_call_raised(local):
    @miniray.remote
    def fail():
        raise KeyError("no such thing")

    with pytest.raises(KeyError, match="no such thing"):
        session.engine().peek(fail.remote())


@pytest.mark.parametrize("size", [10, SIZE])
def test_put_filled(engine, size):
    holes = [torch.empty(size), np.empty(size, np.int64)]
    value = {"rest": np.arange(size), "holes": holes, "empty": torch.empty(0), "text": "x"}

    def fill(memory):
        memory[0].view(np.float32)[:] = 1.5
        memory[1].view(np.int64)[:] = 7

    got = miniray.get(session.engine().put_filled(value, holes, fill))
    assert torch.equal(got["holes"][0], torch.full((size,), 1.5))
    assert np.array_equal(got["holes"][1], np.full(size, 7))
    assert np.array_equal(got["rest"], np.arange(size))
    assert (got["text"], got["empty"].numel()) == ("x", 0)


def test_put_filled_that_fails_stores_nothing(local):
    usage = session.engine().node.usage

    def fill(memory):
        raise ArithmeticError("cannot")

    hole = np.empty(SIZE)
    with pytest.raises(ArithmeticError, match="cannot"):
        session.engine().put_filled([hole], [hole], fill)
    gc.collect()
    before = usage.total()
    kept = miniray.put(np.zeros(SIZE))  # takes the memory that was meant for the other
    assert usage.total() == before
    assert miniray.get(kept).sum() == 0


def test_a_mapping_that_was_written_to_is_not_used_again(local):
    """The same segment, received again and again, some of the receivers writing to it."""

    @miniray.remote
    class Receiver:
        def look(self, tensor, write):
            seen = (float(tensor[0]), float(tensor[-1]))
            if write:
                tensor[-1] = -1.0
            return seen

    receiver = Receiver.remote()
    for i, write in enumerate([False, False, True, False, True, True, False]):
        ref = miniray.put(torch.full((SIZE,), float(i)))
        seen = miniray.get(receiver.look.remote(ref, write))
        del ref
        assert seen == (i, i)


def test_changed_copies_take_no_memory_once_dropped(local):
    """A received tensor that was written to is freed with it, though the ref lives on."""
    ref = miniray.put(torch.zeros(2_000_000))

    def own_memory():
        with open("/proc/self/smaps_rollup") as lines:
            return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous"))

    before = own_memory()
    tensor = miniray.get(ref)
    tensor.fill_(1.0)
    assert own_memory() - before > 7000  # kB: the test sees what it is about
    del tensor
    assert own_memory() - before < 2000
    assert float(miniray.get(ref).max()) == 0.0
