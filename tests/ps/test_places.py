"""Weights as runs of neighbouring entries: the same numbers as entry by entry, bit for bit."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import miniray
from miniray.core import session
from miniray.ps import create_parameter_server
from miniray.ps.model import Given, Model
from miniray.ps.places import Stowed
from miniray.ps.strategies import make_strategy
from miniray.ps.weights import Layout
from tests.ps.helpers import call, weights_of, workers

torch = pytest.importorskip("torch")

#: Enough for a value to go through shared memory.
LARGE = 30_000
STRATEGIES = ["average", "weighted", "ema", "momentum", "fedadam", "median", "trimmed_mean", "krum"]
DTYPES = ["float32", "float64", "float16", ">f4", "complex64", "int64", "bool"]


@pytest.fixture(scope="module")
def engine():
    miniray.shutdown()
    with miniray.init(backend="local", num_workers=1):
        yield session.engine()


@st.composite
def entries(draw):
    """(dtype, shape, torch or not) of each entry: some empty, some without dimensions."""
    shapes = st.sampled_from([(), (0,), (1,), (3,), (7, 5), (2, 3, 4), (64,), (0, 4)])
    few = st.tuples(st.sampled_from(DTYPES), shapes, st.booleans())
    found = draw(st.lists(few, min_size=1, max_size=12))
    found.insert(draw(st.integers(0, len(found))), ("float32", (LARGE,), draw(st.booleans())))
    return found


def made(entries, seed, tensors=True):
    generator = np.random.default_rng(seed)
    values = []
    for dtype, shape, as_tensor in entries:
        array = np.array(generator.standard_normal(shape) * 4).astype(dtype)
        if tensors and as_tensor and array.dtype.isnative:
            array = torch.from_numpy(np.array(array))
        values.append(array)
    return values


def synced(engine, model, weights, shares, joined):
    """A sync as the server makes it; with ``joined`` of values known by their place."""
    refs = [engine.put(w) for w in weights]
    found = []
    for i, ref in enumerate(refs):
        stored = engine.stored(ref) if joined else None
        known = model.knows(stored)
        found.append(Given(i, None if known else engine.peek(ref), ref, stored))
    new = model.combined(found, shares)
    model.adopt(new)
    return new.tally, all(g.weights is None for g in found)


def as_bytes(weights):
    return [(a.dtype, np.asarray(a).shape, np.asarray(a).tobytes()) for a in weights]


@settings(max_examples=40, deadline=None)
@given(entries(), st.sampled_from(STRATEGIES), st.integers(0, 2**32))
def test_runs_give_what_entries_give(engine, entries, name, seed):
    """Three syncs: the second and third are of known values, and go on from the first's state."""
    joined, plain = (Model(make_strategy(name, {}), "error", 1) for _ in range(2))
    for i in range(3):
        weights = [made(entries, seed + 10 * i + j) for j in range(5)]
        shares = [1.0, 2.0, 0.5, 1.0, 3.0]
        first, known = synced(engine, joined, weights, shares, joined=True)
        second, _ = synced(engine, plain, weights, shares, joined=False)
        assert known == (i > 0)
        assert isinstance(joined._sources, Stowed) == (i > 0)
        assert as_bytes(joined.weights) == as_bytes(plain.weights)
        assert first.change == pytest.approx(second.change, rel=1e-5)
        assert first.distances == pytest.approx(second.distances, rel=1e-4)
    buffers = zip(joined.buffers().items(), plain.buffers().items(), strict=True)
    for (key, mine), (other, theirs) in buffers:
        assert key == other
        assert as_bytes(mine) == as_bytes(theirs)


def test_what_lies_between_entries_does_not_matter(engine):
    """Memory that is used again may hold anything there, NaN too."""
    model = Model(make_strategy("median", {}), "error", 1)
    weights = [torch.ones(LARGE), torch.ones(3), torch.tensor(7), torch.ones(5)]
    for _ in range(3):
        refs = [engine.put(weights) for _ in range(3)]
        for ref in refs:
            blob = ref._entry.value
            memory = np.frombuffer(blob.lease.segment.map, np.uint8)
            ends = [at + size for at, size in blob.layout]
            for end, (start, _) in zip(ends, blob.layout[1:], strict=False):
                memory[end:start] = 0xFF  # NaN as any kind of float
        found = [Given(i, engine.peek(r), r, engine.stored(r)) for i, r in enumerate(refs)]
        new = model.combined(found, [1.0] * 3)
        model.adopt(new)
        assert new.tally.change == 0
        assert new.tally.distances.tolist() == [0] * 3
        assert [float(w.sum()) for w in model.weights] == [LARGE, 3, 7, 5]
    assert model._joined is not None
    assert len(model._joined.ranges) == 1  # the counter lies inside the run


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("strategy", ["average", "median"])
def test_a_broken_entry_of_a_run_is_named(engine, strategy, bad):
    def make(value):
        return {"a": torch.full((LARGE,), 1.0), "b": torch.full((5,), value), "c": torch.ones(9)}

    handles = workers(make(1.0), make(3.0), make(5.0))
    server = create_parameter_server(strategy, on_nonfinite="skip")
    for _ in range(2):
        call(server, "sync_from_workers", handles)
    miniray.get(handles[1].set_weights.remote(make(bad)))
    assert call(server, "sync_from_workers", handles)["skipped"] == [1]
    strict = create_parameter_server(strategy)
    miniray.get(strict.sync_from_workers.remote(handles))
    miniray.get(strict.sync_from_workers.remote(handles))
    miniray.get(handles[2].set_weights.remote(make(bad)))
    with pytest.raises(miniray.errors.NonFiniteWeightsError) as caught:
        call(strict, "sync_from_workers", handles)
    assert (caught.value.workers, caught.value.entry) == ((2,), "['b']")
    assert call(strict, "get_stats")["num_syncs"] == 2


def test_weights_of_another_kind_in_between(engine):
    """A worker whose shapes change is found out although the others' values are known."""
    handles = workers(*([torch.full((LARGE,), v), torch.ones(4)] for v in (1.0, 3.0)))
    server = create_parameter_server("momentum")
    for _ in range(3):
        call(server, "sync_from_workers", handles)
    miniray.get(handles[1].set_weights.remote([torch.ones(LARGE), torch.ones(3)]))
    with pytest.raises(miniray.errors.WeightsMismatchError) as caught:
        call(server, "sync_from_workers", handles)
    assert (caught.value.worker, caught.value.entry) == (1, "[1]")
    # Known by other means: a parameter instead of a tensor, and the same numbers.
    again = [torch.nn.Parameter(torch.full((LARGE,), 2.0)), torch.ones(4)]
    miniray.get(handles[1].set_weights.remote(again))
    call(server, "sync_from_workers", handles)
    assert call(server, "get_stats")["num_syncs"] == 4
    assert [float(w.max()) for w in weights_of(handles)[0]] == [2.0, 1.0]


def test_tied_and_odd_arrays_are_combined_by_entry(engine):
    tied = torch.ones(LARGE)
    for weights in (
        [tied, tied],
        [np.asfortranarray(np.ones((LARGE, 2)))],
        [torch.ones(LARGE), 1.0],
        [torch.ones(LARGE, dtype=torch.bfloat16)],
    ):
        model = Model(make_strategy("average", {}), "error", 1)
        for _ in range(2):
            _, known = synced(engine, model, [weights] * 2, [1.0, 1.0], joined=True)
            assert not known
        got = Layout(weights).extract(model.weights, "the result", "what was given")
        assert [float(s[0]) for s in got] == [1.0] * len(weights)


def test_a_state_loaded_between_syncs(engine):
    """Buffers are shared by both ways of combining."""
    weights = [[torch.full((LARGE,), float(v)), torch.full((3,), float(v))] for v in (1, 3)]
    first, second = (Model(make_strategy("momentum", {}), "error", 1) for _ in range(2))
    for model in (first, second):
        model.set([torch.zeros(LARGE), torch.zeros(3)])
        for _ in range(3):
            synced(engine, model, weights, [1.0, 1.0], joined=model is first)
    buffers = second.buffers()
    second.load_buffers({n: [a * 2 for a in arrays] for n, arrays in buffers.items()})
    first.load_buffers({n: [a * 2 for a in arrays] for n, arrays in buffers.items()})
    synced(engine, second, weights, [1.0, 1.0], joined=True)
    synced(engine, first, weights, [1.0, 1.0], joined=False)
    assert as_bytes(first.weights) == as_bytes(second.weights)
    assert as_bytes(first.buffers()["momentum"]) == as_bytes(second.buffers()["momentum"])
