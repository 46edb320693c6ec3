"""The parts of the demo that have an answer one can work out by hand."""

import pytest

from miniray.demos import CircleCounts


def test_estimate_and_error():
    counts = CircleCounts()
    counts.add(points=60, hits=50)
    counts.add(points=40, hits=30)
    assert counts.estimate == pytest.approx(3.2)  # 4 × 80 / 100
    assert counts.error == pytest.approx(0.16)  # 4 × √(0.8 × 0.2 / 100)
