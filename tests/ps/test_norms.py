"""``divergence`` and ``change_norm`` count every weight."""

import numpy as np
import pytest

import miniray
from miniray.errors import NonFiniteWeightsError
from miniray.ps import ParameterServer, create_parameter_server
from miniray.ps.blocks import Crew, whole
from miniray.ps.combine import Combiner
from miniray.ps.strategies import make_strategy
from miniray.ps.weights import Layout
from tests.ps.helpers import call, error_text, workers


def measure(strategy, current, *arrays, threads=2):
    """Return (norm of the change, distances to the mean) of one sync."""
    layout = Layout([arrays[0]])
    ranges = whole([0], layout.leaves)
    combiner = Combiner(make_strategy(strategy, {}), layout.leaves, ranges, Crew(threads))
    shares = [1 / len(arrays)] * len(arrays)
    tally = combiner.combine([current], [[a] for a in arrays], shares, [np.empty_like(current)])
    return tally.change**0.5, np.sqrt(tally.distances)


def expected(current, *arrays):
    wide = [a.astype(np.float64) for a in arrays]
    mean = sum(wide) / len(wide)
    return np.linalg.norm(mean - current), [np.linalg.norm(a - mean) for a in wide]


def test_difference_in_last_layer_counts(engine):
    size, head = 5_000_000, 50_000
    server = ParameterServer.remote()
    weights = [{"body": np.zeros(size, np.float32), "head": np.zeros(head)} for _ in range(2)]
    call(server, "set_weights", {"body": np.zeros(size, np.float32), "head": np.full(head, 100.0)})
    weights[1]["body"][-head:] = 2
    report = call(server, "sync_from_workers", workers(*weights))
    far = np.sqrt(head)
    assert report["divergence"] == pytest.approx({"max": far, "mean": far}, rel=1e-6)
    assert report["change_norm"] == pytest.approx(np.sqrt(head * (1 + 100**2)), rel=1e-6)


@pytest.mark.parametrize("strategy", ["average", "median", "momentum"])
@pytest.mark.parametrize("count", [2, 3, 5])
def test_norms_are_those_of_numpy(strategy, count):
    random = np.random.default_rng(count)
    current, *arrays = (random.normal(size=1_200_003).astype(np.float32) for _ in range(count + 1))
    change, distances = measure(strategy, current, *arrays)
    want_change, want_distances = expected(current, *arrays)
    assert distances == pytest.approx(want_distances, rel=1e-6)
    if strategy == "average":
        assert change == pytest.approx(want_change, rel=1e-6)


@pytest.mark.parametrize("value", [1e30, 1.0, 1e-30])
def test_squares_that_float32_cannot_hold(value):
    one, other = (np.full(300_000, v, np.float32) for v in (value, 3 * value))
    current = np.zeros_like(one)
    change, distances = measure("average", current, one, other)
    want_change, want_distances = expected(current, one, other)
    assert change == pytest.approx(want_change, rel=1e-6, abs=0)
    assert distances == pytest.approx(want_distances, rel=1e-6, abs=0)


def test_distances_beyond_float32_of_finite_weights():
    """The difference, the sum and the square overflow float32, the median doesn't."""
    arrays = [np.full(9, v, np.float32) for v in (3e38, 3e38, -3e38)]
    change, distances = measure("median", np.zeros(9, np.float32), *arrays)
    assert change == pytest.approx(9e38, rel=1e-6)
    assert distances == pytest.approx([6e38, 6e38, 12e38], rel=1e-6)


def test_equal_workers_have_no_divergence():
    array = np.random.default_rng(0).normal(size=200_000).astype(np.float32)
    assert measure("average", array, array, array)[1].tolist() == [0, 0]


def test_norms_leave_out_memory_between_entries(engine):
    """From the second sync on, neighboring entries are combined together."""
    torch = pytest.importorskip("torch")

    @miniray.remote
    class Noisy:
        def __init__(self, seed):
            make = torch.Generator().manual_seed(seed)
            self.weights = [torch.randn(n, generator=make) for n in (300_000, 5, 70_001)]

        def get_weights(self):
            return self.weights

        def set_weights(self, weights):
            pass

    handles = [Noisy.remote(seed) for seed in range(3)]
    flat = [
        np.concatenate([w.numpy() for w in weights])
        for weights in miniray.get([h.get_weights.remote() for h in handles])
    ]
    server = create_parameter_server("average")
    _, distances = expected(flat[0], *flat)
    for _ in range(3):
        report = call(server, "sync_from_workers", handles)
        assert report["divergence"]["max"] == pytest.approx(max(distances), rel=1e-6)
        assert report["divergence"]["mean"] == pytest.approx(np.mean(distances), rel=1e-6)
    assert report["change_norm"] == 0


def test_krum_of_large_finite_weights(engine):
    values = (1e20, 1.1e20, 1.3e20, 2e20, -3e38)
    handles = workers(*([np.full(4, v, np.float32)] for v in values))
    server = create_parameter_server("krum")
    report = call(server, "sync_from_workers", handles)
    assert call(server, "get_weights")[0].tolist() == [np.float32(1.1e20)] * 4
    assert np.isfinite(report["divergence"]["max"])


def test_krum_overflow_names_no_worker_or_entry(engine, golden):
    handles = workers(*([np.full(2, v)] for v in (1e200, -1e200, 2e200, 3e200, 0.0)))
    with pytest.raises(NonFiniteWeightsError) as caught:
        call(create_parameter_server("krum"), "sync_from_workers", handles)
    assert (caught.value.workers, caught.value.entry) == ((), None)
    golden("krum_overflow.txt", error_text(caught.value))
