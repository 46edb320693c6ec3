"""The parts of the demo that have an answer one can work out by hand."""

import pytest

from miniray.demos.monte_carlo import Tally, _thinned


def test_estimate_and_error():
    tally = Tally()
    tally.add(points=60, hits=50, seconds=1.0)
    tally.add(points=40, hits=30, seconds=0.5)
    assert tally.estimate == pytest.approx(3.2)  # 4 × 80 / 100
    assert tally.error == pytest.approx(0.16)  # 4 × √(0.8 × 0.2 / 100)
    assert (tally.batches, tally.seconds) == (2, 1.5)


@pytest.mark.parametrize("length", [1, 199, 200, 201, 5000])
def test_thinning_keeps_both_ends_and_the_order(length):
    thin = _thinned(list(range(length)))
    assert len(thin) <= 200
    assert (thin[0], thin[-1]) == (0, length - 1)
    assert thin == sorted(set(thin))
