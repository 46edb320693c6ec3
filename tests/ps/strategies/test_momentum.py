"""momentum and diloco, by hand."""

import pytest

from tests.ps.strategies.helpers import Run


def test_momentum_is_on_the_change_between_syncs():
    run = Run("momentum", start=[0], momentum=0.5, lr=1)
    assert run([3], [5]) == [4]  # d = 4, v = 4
    # The workers stay where they are: d = 0, v = 2, and the weights go on.
    assert run([4], [4]) == [6]
    # d = mean(2, 4) − 6 = −3, v = 1 − 3 = −2
    assert run([2], [4]) == [4]


def test_momentum_is_no_moving_average():
    """The old implementation's rule was 0.5·old + 0.5·new, which would give 5 here."""
    run = Run("momentum", start=[0], momentum=0.5)
    run([4])
    assert run([6]) == [8]  # d = 6 − 4 = 2, v = 0.5·4 + 2 = 4


def test_momentum_learning_rate():
    run = Run("momentum", start=[1], momentum=0.5, lr=0.5)
    assert run([5]) == [3]  # d = 4, v = 4
    assert run([3]) == [4]  # d = 0, v = 2


def test_the_first_sync_takes_the_mean_and_no_momentum():
    run = Run("momentum", momentum=0.5)
    assert run([2], [4]) == [3]
    assert run.buffer("momentum") == [0]
    assert run([5], [5]) == [5]  # d = 2, v = 2


def test_without_momentum_it_is_the_mean():
    assert Run("momentum", start=[7], momentum=0)([1], [2]) == [1.5]


def test_diloco():
    run = Run("diloco", start=[1], lr=0.5, momentum=0.5)
    # g = 1 − 3 = −2, b = −2, step = g + 0.5·b = −3
    assert run([2], [4]) == [2.5]
    # g = 2.5 − 2.5 = 0, b = −1, step = −0.5
    assert run([2.5], [2.5]) == [2.75]


def test_diloco_is_torchs_nesterov_sgd():
    torch = pytest.importorskip("torch")
    parameter = torch.nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    optimizer = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    run = Run("diloco", start=[1, -2])
    for workers in ([[2, 0], [3, 1]], [[1, 1], [0, 2]], [[-1, 0], [5, 3]]):
        mean = torch.tensor(workers, dtype=torch.float64).mean(0)
        parameter.grad = parameter.detach() - mean
        optimizer.step()
        assert run(*workers) == pytest.approx(parameter.tolist(), rel=1e-12)


@pytest.mark.parametrize("options", [{"momentum": 1}, {"lr": 0}, {"lr": -1}, {"lr": float("inf")}])
@pytest.mark.parametrize("name", ["momentum", "diloco"])
def test_bad_options_are_refused(name, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        Run(name, **options)
