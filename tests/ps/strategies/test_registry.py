"""Names, options and strategies of one's own."""

import numpy as np
import pytest

import miniray
from miniray.ps import Strategy, check_strategy, register_strategy, strategy_names
from miniray.ps.strategies.base import _strategies
from tests.ps.helpers import call, weights_of, workers

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


def test_a_wrong_shape_is_reported(engine):
    @register_strategy("short")
    class Short(Strategy):
        def combine(self, global_weights, worker_weights, weights):
            return worker_weights[0][:1]

    try:
        server = miniray.ps.create_parameter_server("short")
        with pytest.raises(ValueError, match=r"'short' gave an array of shape \(1,\)"):
            call(server, "sync_from_workers", workers([np.zeros(3)]))
    finally:
        del _strategies["short"]


def test_an_unknown_name_is_refused_with_the_valid_ones():
    with pytest.raises(ValueError, match=r"'avrage'; there are average, diloco, .*weighted"):
        check_strategy("avrage", {})


def test_an_unknown_option_is_refused_with_the_valid_ones():
    with pytest.raises(TypeError, match="no option 'beta'; it takes momentum, lr"):
        check_strategy("momentum", {"beta": 1})
    with pytest.raises(TypeError, match="no option 'momentum'; it takes none"):
        check_strategy("average", {"momentum": 0.9})


def test_options_may_be_numpys_numbers():
    check_strategy("momentum", {"momentum": np.float32(0.5), "lr": np.int64(1)})
    check_strategy("krum", {"num_byzantine": np.int64(1)})
    with pytest.raises(ValueError, match="momentum must be a number"):
        check_strategy("momentum", {"momentum": True})


def test_only_strategies_can_be_registered():
    with pytest.raises(TypeError, match="subclass"):
        register_strategy("x")(dict)
    with pytest.raises(ValueError, match="name"):
        register_strategy("")
