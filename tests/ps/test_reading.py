"""Weights read from a process's own memory: the same numbers as from copies, bit for bit."""

import ctypes
import errno
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import miniray
from miniray.core import session
from miniray.errors import NonFiniteWeightsError
from miniray.ps import offer
from miniray.ps.model import Given, Model
from miniray.ps.reading import Far, Memory, UnreadableError
from miniray.ps.strategies import make_strategy
from tests.ps.test_places import LARGE, as_bytes, entries, made

torch = pytest.importorskip("torch")

STRATEGIES = ["average", "weighted", "momentum", "ema", "diloco", "fedadam", "fedyogi"]
STRATEGIES += ["fedadagrad", "median", "trimmed_mean", "krum"]
SHARES = [1.0, 2.0, 0.5, 1.0, 3.0]


@pytest.fixture(scope="module")
def engine():
    miniray.shutdown()
    with miniray.init(backend="local", num_workers=1):
        yield session.engine()


def far(model, worker, weights):
    """What the server makes of an offer, here of this very process."""
    plan = offer._made(weights, [])
    addresses = np.array([address for address, _ in plan.spans], np.uint64)
    found = model.places.located(plan.digest, addresses)
    return Given(worker, None, far=Far(model.places, Memory(os.getpid()), found))


def copied(engine, model, worker, weights):
    ref = engine.put(weights)
    stored = engine.stored(ref)
    return Given(worker, None if model.knows(stored) else engine.peek(ref), ref, stored)


def synced(engine, model, weights, read, shares=SHARES):
    if read and model.places is not None:
        found = [far(model, i, w) for i, w in enumerate(weights)]
    else:
        found = [copied(engine, model, i, w) for i, w in enumerate(weights)]
    new = model.combined(found, shares[: len(weights)])
    model.adopt(new)
    return new


@settings(max_examples=25, deadline=None)
@given(entries(), st.sampled_from(STRATEGIES), st.integers(0, 2**32))
def test_what_is_read_is_what_would_be_copied(engine, entries, name, seed):
    """Five syncs; from the third on one of the two models reads."""
    reader, copier = (Model(make_strategy(name, {}), "error", 1) for _ in range(2))
    for i in range(5):
        weights = [made(entries, seed + 10 * i + j) for j in range(5)]
        assert (reader.places is not None) == (i > 1)
        first = synced(engine, reader, weights, read=True).tally
        second = synced(engine, copier, weights, read=False).tally
        assert as_bytes(reader.weights) == as_bytes(copier.weights)
        assert first.change == second.change
        assert first.distances.tolist() == second.distances.tolist()
    for name, arrays in reader.buffers().items():
        assert as_bytes(arrays) == as_bytes(copier.buffers()[name])


def ready(engine, strategy="average", on_nonfinite="error", like=None):
    """A model that can read weights like these."""
    model = Model(make_strategy(strategy, {}), on_nonfinite, 1)
    like = like or [torch.ones(LARGE), torch.ones(5)]
    for _ in range(2):
        synced(engine, model, [like] * 3, read=False)
    return model


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("strategy", ["average", "median"])
def test_what_is_not_finite_is_found_where_it_lies(engine, strategy, bad):
    weights = [[torch.full((LARGE,), v), torch.full((5,), v)] for v in (1.0, 2.0, 3.0)]
    weights[1][1][4] = bad
    with pytest.raises(NonFiniteWeightsError) as caught:
        synced(engine, ready(engine, strategy), weights, read=True)
    assert (caught.value.workers, caught.value.entry) == ((1,), "[1]")
    model = ready(engine, strategy, "skip")
    assert synced(engine, model, weights, read=True).skipped == [1]
    expected = {"average": (1.0 * 1 + 0.5 * 3) / 1.5, "median": 2.0}[strategy]
    assert [float(w.max()) for w in model.weights] == pytest.approx([expected] * 2)


def test_thousands_of_small_entries(engine):
    """More of them in a piece than one system call takes."""
    model = ready(engine, like=[torch.ones(12) for _ in range(2500)])
    weights = [[torch.full((12,), float(v + i)) for i in range(2500)] for v in (0, 3, 6)]
    assert model.places is not None
    synced(engine, model, weights, read=True, shares=[1.0] * 3)
    assert [float(w.sum()) for w in model.weights] == [12.0 * (3 + i) for i in range(2500)]


def test_a_worker_that_lies_otherwise_makes_reading_impossible(engine):
    """Known by its numbers but not by its places: nothing is combined from halves of both."""
    model = ready(engine)
    other = [torch.nn.Parameter(torch.ones(LARGE)), torch.ones(5)]
    some = [far(model, 0, [torch.ones(LARGE), torch.ones(5)]), Given(1, other)]
    with pytest.raises(UnreadableError):
        model.combined(some, [1.0, 1.0])


def test_a_structure_that_is_not_known_is_not_located(engine):
    model = ready(engine)
    for weights in ([torch.ones(LARGE), torch.ones(4)], [torch.ones(LARGE), np.ones(5, "f4")]):
        plan = offer._made(weights, [])
        assert model.places.located(plan.digest, np.zeros(2, np.uint64)) is None


def test_memory_that_is_not_there():
    memory = Memory(os.getpid())
    with pytest.raises(UnreadableError, match=os.strerror(errno.EFAULT)):
        memory.read_bytes(4096, 8)
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(UnreadableError, match=os.strerror(errno.ESRCH)):
        Memory(child).read_bytes(4096, 8)


def test_huge_pages_change_nothing_but_speed():
    """Whether or not the system has any: addresses and contents stay."""
    array = np.arange(3_000_000, dtype=np.float32)
    span = (array.__array_interface__["data"][0], array.nbytes)
    answer = offer.gathered([span])
    assert array.__array_interface__["data"][0] == span[0]
    assert np.array_equal(array, np.arange(3_000_000, dtype=np.float32))
    if answer:
        with open("/proc/self/smaps_rollup") as lines:
            huge = next(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages"))
        assert huge >= 8 * 1024  # kB, of 11.4 MB
    assert not offer.gathered([(ctypes.addressof(ctypes.create_string_buffer(100)), 100)])


def test_neighbours_are_gathered_together():
    joined = offer._joined([(300_000, 100), (0, 1000), (1500, 500), (900, 50)])
    assert joined == [(0, 2000), (300_000, 300_100)]


class TestSignature:
    """Equal only for the same kind of arrays at the same place."""

    @staticmethod
    def of(weights):
        found = []
        return found if offer._describe(weights, found, set(), torch) else None

    def test_the_same_again(self):
        a, b = torch.ones(3, 2), np.ones(4)
        weights = {"a": a, "b": [b, (a[:0],)]}
        again = {"a": a.detach(), "b": [b.view(), (a.detach()[:0],)]}
        assert self.of(weights) == self.of(again) is not None

    @pytest.mark.parametrize(
        "other",
        [
            lambda a: [a.clone()],
            lambda a: [a.view(2, 3)],
            lambda a: [a.view(torch.int32)],
            lambda a: [torch.nn.Parameter(a)],
            lambda a: (a,),
            lambda a: [a, a[:0]],
            lambda a: {"a": a},
        ],
    )
    def test_others(self, other):
        a = torch.ones(3, 2)
        mine, theirs = self.of([a]), self.of(other(a))
        assert theirs is not None
        assert mine != theirs

    def test_what_cannot_be_read(self):
        a = torch.ones(3, 2)
        for weights in (
            [a.t()],
            [a, a],
            [a.to_sparse()],
            [torch.ones(2, dtype=torch.complex64).conj()],
            [np.asfortranarray(np.ones((2, 3)))],
            [np.array([None])],
            [1.0],
            [None],
        ):
            assert self.of(weights) is None
