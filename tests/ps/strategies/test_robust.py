"""median, trimmed_mean and krum, by hand."""

import numpy as np
import pytest

from miniray.ps.strategies.median import sorted_rows
from tests.ps.helpers import error_text
from tests.ps.strategies.helpers import Run


def test_median():
    assert Run("median")([1, 9], [5, 2], [100, 3]) == [5, 3]
    assert Run("median")([1], [2], [6], [1000]) == [4]


def test_median_starts_robust():
    """The first sync, too, is a median: a broken worker must not get into the first weights."""
    assert Run("median")([1], [1], [1e9]) == [1]


def test_trimmed_mean():
    # One off each end of four: (2 + 4) / 2
    assert Run("trimmed_mean", trim=0.25)([4], [-50], [2], [90]) == [3]
    # 0.2 of five is one: (1 + 2 + 3) / 3
    assert Run("trimmed_mean")([1], [2], [3], [0], [77]) == [2]


@pytest.mark.parametrize(("trim", "count", "cut"), [(0.14, 50, 7), (0.28, 25, 7)])
def test_trimmed_mean_cut_is_not_rounded_up_by_an_ulp(trim, count, cut):
    """``trim * count`` is 7.000000000000001."""
    squares = [i**2 for i in range(count)]
    kept = squares[cut : count - cut]
    run = Run("trimmed_mean", trim=trim)
    assert run(*([s] for s in squares)) == pytest.approx([sum(kept) / len(kept)])


def test_trimmed_mean_needs_enough_workers(golden):
    with pytest.raises(ValueError, match="trimmed_mean") as caught:
        Run("trimmed_mean")([1], [2])
    golden("trimmed_mean_workers.txt", error_text(caught.value))


@pytest.mark.parametrize("trim", [0, 0.5, -1])
def test_a_bad_trim_is_refused(trim):
    with pytest.raises(ValueError, match="trim"):
        Run("trimmed_mean", trim=trim)


def test_krum():
    # n − f − 2 = 2 neighbours: 0: 1+9, 1: 1+4, 3: 4+9 (to 1 and 0), 10: 49+81, 50: 1600+2209
    assert Run("krum")([0], [1], [3], [10], [50]) == [1]


def test_multi_krum():
    assert Run("krum", num_selected=2)([0], [1], [3], [10], [50]) == [0.5]


def test_krum_needs_enough_workers(golden):
    with pytest.raises(ValueError, match="krum") as too_few:
        Run("krum")([0], [1], [2], [3])
    with pytest.raises(ValueError, match="krum") as too_many:
        Run("krum", num_selected=5)([0], [1], [2], [3], [4])
    golden("krum_workers.txt", error_text(too_few.value) + error_text(too_many.value))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 16, 17, 20])
def test_rows_are_sorted(count):
    rows = np.random.default_rng(count).normal(size=(count, 50))
    room = {}
    found = sorted_rows(list(rows), lambda name: room.setdefault(name, np.empty(50)))
    assert np.array_equal(np.stack(found), np.sort(rows, axis=0))
