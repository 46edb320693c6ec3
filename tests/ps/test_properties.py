"""Properties that hold for any weights."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.ps.strategies.helpers import Run

NAMES = ["average", "weighted", "ema", "momentum", "diloco", "median"]
ADAPTIVE = ["fedadam", "fedyogi", "fedadagrad"]
floats = st.floats(-1e6, 1e6)


def vectors(count):
    return st.integers(1, 20).flatmap(
        lambda n: st.lists(hnp.arrays(np.float64, n, elements=floats), min_size=count, max_size=8)
    )


@settings(max_examples=50, deadline=None)
@given(hnp.arrays(np.float64, 7, elements=floats), st.integers(1, 9), st.sampled_from(NAMES))
def test_equal_weights_stay_as_they_are(vector, count, name):
    got = Run(name, start=vector)(*[vector] * count)
    assert got == pytest.approx(vector.tolist(), rel=1e-15)


@settings(max_examples=30, deadline=None)
@given(hnp.arrays(np.float64, 7, elements=floats), st.sampled_from(ADAPTIVE))
def test_adaptive_optimizers_do_not_move_without_a_change(vector, name):
    assert Run(name, start=vector)(vector, vector) == vector.tolist()


@settings(max_examples=50, deadline=None)
@given(vectors(3), st.sampled_from([*NAMES, *ADAPTIVE, "trimmed_mean"]), st.randoms())
def test_the_order_of_workers_does_not_matter(workers, name, random):
    start = np.zeros_like(workers[0])
    shuffled = random.sample(workers, len(workers))
    first, second = Run(name, start=start)(*workers), Run(name, start=start)(*shuffled)
    assert first == pytest.approx(second, rel=1e-6, abs=1e-6)


@settings(max_examples=50, deadline=None)
@given(vectors(2), st.floats(-100, 100), st.sampled_from(NAMES))
def test_scaling_the_workers_scales_the_result(workers, factor, name):
    start = np.zeros_like(workers[0])
    plain = Run(name, start=start)(*workers)
    scaled = Run(name, start=start)(*[w * factor for w in workers])
    assert scaled == pytest.approx([factor * x for x in plain], rel=1e-6, abs=1e-4)


@settings(max_examples=50, deadline=None)
@given(vectors(1))
def test_the_average_is_that_of_numpy(workers):
    assert Run("average")(*workers) == pytest.approx(np.mean(workers, axis=0).tolist(), abs=1e-6)
    assert Run("median")(*workers) == pytest.approx(np.median(workers, axis=0).tolist(), abs=1e-9)
