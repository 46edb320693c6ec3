"""fedadam, fedyogi and fedadagrad, by hand: beta_1 = 0.5, beta_2 = 0.75, tau = 1, lr = 1."""

import math

import pytest

from tests.ps.strategies.helpers import Run

OPTIONS = {"lr": 1.0, "beta_1": 0.5, "tau": 1.0}


def test_fedadam():
    run = Run("fedadam", start=[0], beta_2=0.75, **OPTIONS)
    # d = 4, m = 2, v = 0.75·1 + 0.25·16 = 4.75
    first = 2 / (math.sqrt(4.75) + 1)
    assert run([3], [5]) == pytest.approx([first])
    # d = 0: m = 1, v = 0.75·4.75
    second = first + 1 / (math.sqrt(0.75 * 4.75) + 1)
    assert run([first], [first]) == pytest.approx([second])


def test_fedyogi():
    run = Run("fedyogi", start=[0], beta_2=0.75, **OPTIONS)
    # d = 4, v = 1 − 0.25·16·sign(1 − 16) = 5
    first = 2 / (math.sqrt(5) + 1)
    assert run([4]) == pytest.approx([first])
    # d = 1: m = 1.5, v = 5 − 0.25·1·sign(5 − 1) = 4.75
    second = first + 1.5 / (math.sqrt(4.75) + 1)
    assert run([first + 1]) == pytest.approx([second])
    assert run.buffer("v") == pytest.approx([4.75])


def test_fedadagrad():
    run = Run("fedadagrad", start=[0], lr=1.0, tau=1.0)
    # beta_1 = 0: m = d = 3, v = 1 + 9
    first = 3 / (math.sqrt(10) + 1)
    assert run([2], [4]) == pytest.approx([first])
    # d = 2, v = 14
    assert run([first + 2]) == pytest.approx([first + 2 / (math.sqrt(14) + 1)])


@pytest.mark.parametrize("name", ["fedadam", "fedyogi", "fedadagrad"])
def test_the_first_sync_takes_the_mean(name):
    run = Run(name, tau=0.5)
    assert run([1], [3]) == [2]
    assert run.buffer("m") == [0]
    assert run.buffer("v") == [0.25]


@pytest.mark.parametrize("name", ["fedadam", "fedyogi", "fedadagrad"])
def test_bad_options_are_refused(name):
    with pytest.raises(ValueError, match="tau"):
        Run(name, tau=0)
    with pytest.raises(ValueError, match="beta_1"):
        Run(name, beta_1=1)
