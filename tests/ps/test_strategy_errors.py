"""A strategy that raises fails the sync, whatever it raises and wherever."""

import queue

import numpy as np
import pytest

from miniray.errors import StrategyError
from miniray.ps import Strategy, create_parameter_server
from miniray.ps.blocks import PIECE, Crew, whole
from miniray.ps.combine import Combiner
from miniray.ps.weights import Layout
from tests.ps.helpers import call, error_text, weights_of, workers

#: Enough numbers for several pieces and threads.
LARGE = 9 * PIECE + 17
MARK = -7.0


class Failing(Strategy):
    """The mean, until a piece contains ``MARK``."""

    name = "failing"
    buffers = {"count": 0.0}  # noqa: RUF012

    def __init__(self, kind):
        self.kind = kind

    def combine(self, global_weights, worker_weights, weights):
        self.new_buffer("count")[:] = self.buffer("count") + 1
        if (worker_weights[0] == MARK).any():
            raise self.kind("bad piece")
        return self.mean(worker_weights, weights, self.out)


def marked(size, place):
    array = np.ones(size, np.float32)
    array[place] = MARK
    return array


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("place", [0, LARGE // 2, LARGE - 1], ids=["first", "middle", "last"])
@pytest.mark.parametrize("kind", [IndexError, StopIteration, queue.Empty, KeyError])
def test_exception_in_any_piece_is_raised(kind, place, threads):
    array = marked(LARGE, place)
    layout = Layout({"w": array})
    combiner = Combiner(Failing(kind), layout.leaves, whole([0], layout.leaves), Crew(threads))
    target = np.empty_like(array)
    with pytest.raises(StrategyError) as caught:
        combiner.combine(None, [[array], [array]], [0.5, 0.5], [target])
    assert (caught.value.strategy, caught.value.entry) == ("failing", "['w']")
    assert type(caught.value.__cause__) is kind
    # The threads are ready for the next run, and combine every piece.
    good = np.ones_like(array)
    combiner.combine(None, [[good], [good * 3]], [0.5, 0.5], [target])
    assert (target == 2).all()


@pytest.mark.parametrize("size", [5, LARGE])
@pytest.mark.parametrize(
    "options",
    [{}, {"threads": 1}, {"mode": "async"}],
    ids=["sync", "one-thread", "async"],
)
def test_failed_sync_changes_nothing(engine, options, size):
    server = create_parameter_server(Failing(IndexError), **options)
    handles = workers({"a": 1.0, "w": marked(size, -1)}, {"a": 1.0, "w": np.ones(size, np.float32)})
    call(server, "set_weights", {"a": 0.0, "w": np.zeros(size, np.float32)})
    before = call(server, "get_state")
    with pytest.raises(StrategyError) as caught:
        call(server, "sync_from_workers", handles)
    error = caught.value
    assert (error.strategy, error.entry) == ("failing", "['w']")
    after = call(server, "get_state")
    assert after["version"] == before["version"]
    assert np.array_equal(after["weights"][1], before["weights"][1])
    assert [a.sum() for a in after["buffers"]["count"]] == [0, 0]
    assert [w["w"][-1] for w in weights_of(handles)] == [MARK, 1]
    assert call(server, "get_stats")["failed_syncs"] == 1


@pytest.mark.parametrize("size", [5, LARGE])
def test_failed_push_changes_nothing(engine, size):
    """Pieces before the failing one were already combined."""
    server = create_parameter_server(Failing(IndexError), mode="async")
    call(server, "set_weights", [np.zeros(size, np.float32)])
    call(server, "push_weights", 0, [np.ones(size, np.float32)])
    before = call(server, "get_state")
    with pytest.raises(StrategyError) as caught:
        call(server, "push_weights", 0, [marked(size, -1)])
    assert caught.value.entry == "[0]"
    after = call(server, "get_state")
    assert np.array_equal(after["weights"][0], before["weights"][0])
    assert np.array_equal(after["buffers"]["count"][0], before["buffers"]["count"][0])
    call(server, "push_weights", 0, [np.full(size, 3, np.float32)])
    assert (call(server, "get_weights")[0] == 3).all()


class Odd(Strategy):
    """Returns something that isn't a piece."""

    name = "odd"

    def __init__(self, result):
        self.result = result

    def combine(self, global_weights, worker_weights, weights):
        return self.result


@pytest.mark.parametrize("result", [np.zeros(1), None], ids=["shape", "none"])
def test_wrong_result_is_an_error(engine, result, golden):
    server = create_parameter_server(Odd(result))
    with pytest.raises(StrategyError) as caught:
        call(server, "sync_from_workers", workers({"w": np.zeros(3)}))
    assert (caught.value.strategy, caught.value.entry) == ("odd", "['w']")
    if result is not None:
        golden("strategy_result.txt", error_text(caught.value))
