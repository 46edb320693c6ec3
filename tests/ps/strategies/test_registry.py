"""Names, options and strategies of one's own."""

import numpy as np
import pytest

import miniray
from miniray.ps import Strategy, check_strategy, register_strategy, strategy_names
from miniray.ps.strategies.average import Average
from miniray.ps.strategies.base import _strategies, make_strategy
from tests.ps.helpers import call, error_text, weights_of, workers

BUILT_IN = [
    *("average", "diloco", "ema", "fedadagrad", "fedadam", "fedyogi", "krum", "median"),
    *("momentum", "trimmed_mean", "weighted"),
]


@pytest.fixture
def midrange():
    @register_strategy("midrange")
    class Midrange(Strategy):
        buffers = {"seen": 0.0}  # noqa: RUF012

        def combine(self, global_weights, worker_weights, weights):
            self.new_buffer("seen")[:] = self.buffer("seen") + 1
            return (np.minimum.reduce(worker_weights) + np.maximum.reduce(worker_weights)) / 2

    yield Midrange
    del _strategies["midrange"]


def test_the_names():
    assert strategy_names() == BUILT_IN


def test_a_strategy_of_ones_own(engine, midrange):
    server = miniray.ps.create_parameter_server("midrange")
    handles = workers([np.array([0.0, 1])], [np.array([1.0, 1])], [np.array([10.0, 3])])
    call(server, "sync_from_workers", handles)
    call(server, "sync_from_workers", handles)
    assert weights_of(handles)[0][0].tolist() == [5, 2]
    assert call(server, "get_stats")["strategy"] == "midrange"
    assert call(server, "get_state")["buffers"]["seen"][0].tolist() == [2, 2]


@pytest.mark.parametrize(
    ("name", "options", "error"),
    [
        ("avrage", {}, ValueError),
        ("momentum", {"beta": 1}, TypeError),
        ("momentum", {"mometum": 0.9}, TypeError),
        ("average", {"momentum": 0.9}, TypeError),
        ("momentum", {"momentum": True}, ValueError),
        (Average(), {"lr": 1}, TypeError),
    ],
)
def test_wrong_names_and_options_raise(name, options, error, golden):
    with pytest.raises(error) as caught:
        check_strategy(name, options)
    label = "-".join([name if isinstance(name, str) else "object", *options])
    golden(f"strategy_{label}.txt", error_text(caught.value))


def test_options_may_be_numpys_numbers():
    momentum = make_strategy("momentum", {"momentum": np.float32(0.5), "lr": np.int64(1)})
    assert (momentum.momentum, momentum.lr) == (0.5, 1)
    assert make_strategy("krum", {"num_byzantine": np.int64(1)}).num_byzantine == 1


def test_only_strategies_can_be_registered():
    with pytest.raises(TypeError):
        register_strategy("x")(dict)
    with pytest.raises(ValueError, match="name"):
        register_strategy("")
