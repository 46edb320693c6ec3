"""average, weighted and ema, by hand."""

import pytest

from tests.ps.strategies.helpers import Run


def test_average():
    assert Run("average")([1, 2], [3, 6]) == [2, 4]
    assert Run("average")([1, 0], [2, 0], [6, 3]) == [3, 1]


def test_average_ignores_the_global_weights():
    assert Run("average", start=[100, 100])([1, 2], [3, 6]) == [2, 4]


def test_weighted():
    # 0.25·4 + 0.75·8 = 7
    assert Run("weighted")([4, 0], [8, 4], weights=[0.25, 0.75]) == [7, 3]


def test_ema():
    run = Run("ema", start=[10, 0], decay=0.75)
    assert run([2, 4], [2, 12]) == [8, 2]  # 0.75·10 + 0.25·2; 0.25·8
    assert run([0, 2], [0, 2]) == [6, 2]


def test_ema_takes_the_mean_when_there_is_nothing_yet():
    assert Run("ema", decay=0.9)([1], [3]) == [2]


def test_one_worker_is_its_own_mean():
    assert Run("average")([1.5, -2]) == [1.5, -2]


@pytest.mark.parametrize("decay", [-0.1, 1, float("nan"), "much", True])
def test_a_bad_decay_is_refused(decay):
    with pytest.raises(ValueError, match="decay"):
        Run("ema", decay=decay)
