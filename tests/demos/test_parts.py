"""The parts of the demo that have an answer one can work out by hand."""

import pytest

from miniray.demos import Tally


def test_estimate_and_error():
    tally = Tally()
    tally.add(points=60, hits=50)
    tally.add(points=40, hits=30)
    assert tally.estimate == pytest.approx(3.2)  # 4 × 80 / 100
    assert tally.error == pytest.approx(0.16)  # 4 × √(0.8 × 0.2 / 100)
