"""Process groups of actors: meeting, and saying who did not come."""

import sys

import pytest

import miniray
from miniray.core.engine import Engine
from miniray.errors import GroupError, PeerLostError, TaskError
from miniray.train.lockstep.health.status import _is_waiting, is_consequence
from miniray.train.lockstep.process_group import (
    GroupHost,
    find_interface,
    find_missing,
    join,
    leave,
)

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402


@miniray.remote
class Member:
    def add_up(self, spec, rank):
        import torch.distributed as dist

        join(spec, rank)
        try:
            total = torch.tensor([float(rank + 1)])
            dist.all_reduce(total)
            return total.item(), dist.get_backend()
        finally:
            leave()
            leave()  # again: harmless

    def come(self, spec, rank):
        join(spec, rank)

    def is_in_a_group(self):
        import torch.distributed as dist

        return dist.is_initialized()


def test_actors_meet_add_up_leave_and_meet_again(raises):
    miniray.init(backend="local")
    members = [Member.remote() for _ in range(2)]
    for _ in range(2):
        host = GroupHost(2, timeout=50)
        calls = [m.add_up.remote(host.spec, rank) for rank, m in enumerate(members)]
        assert miniray.get(calls) == [(3.0, "gloo")] * 2
        host.close()
        host.close()
    # The error names the missing rank, and the rank that waited is not in a group.
    host = GroupHost(3, timeout=1, name="the trio")
    with raises(GroupError):
        miniray.get(members[0].come.remote(host.spec, 0))
    assert not miniray.get(members[0].is_in_a_group.remote())
    with raises(GroupError):
        miniray.get(members[1].come.remote(host.spec, 0))
    miniray.shutdown()


def test_a_process_is_in_one_group_at_a_time(raises):
    host = GroupHost(1)
    store = join(host.spec, 0)
    try:
        store.set("key", "value")
        assert host.store.get("key") == b"value"
        with raises(GroupError):
            join(host.spec, 0)
    finally:
        leave()


def test_the_store_is_at_the_address_that_nodes_know(monkeypatch):
    """A machine without a default route has no other way to find it."""
    miniray.init(backend="inline")
    try:
        monkeypatch.setattr(Engine, "node_address", lambda self: "127.0.0.2")
        host = GroupHost(1, other_machines=True)
        assert host.spec.host == "127.0.0.2"
        assert host.spec.connect().check(["nothing"]) is False
        host.close()
    finally:
        miniray.shutdown()


def test_the_interface_to_a_host_is_found():
    assert find_interface("127.0.0.1", 1) in ("lo", "lo0")
    assert find_interface("localhost", 1) in ("lo", "lo0")
    assert find_interface("no.such.host.invalid", 1) is None


@pytest.mark.parametrize("arguments", [{"world_size": 0}, {"world_size": 1, "timeout": 0}])
def test_nonsense_is_refused(arguments, raises):
    with raises(ValueError):
        GroupHost(**arguments)


def test_waiting_for_ranks_is_recognized_in_the_stack():
    found = []

    class Store:
        def check(self, keys):
            found.append(_is_waiting(sys._getframe(1)))
            return True

    assert find_missing(Store(), "here", 2, 1.0) == []
    assert found == [True, True]


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]"


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (RuntimeError(GLOO), True),
        (RuntimeError(f"[Rank 0]: Rank 1 failed to pass monitoredBarrier\n{GLOO}"), True),
        (dist.DistNetworkError("client socket has timed out"), True),
        (RuntimeError("Connection closed by peer: the database timed out"), False),
        (RuntimeError("a gloomy case"), False),
        (ConnectionResetError("Connection reset by peer"), False),
        (GroupError(f"quotes {GLOO}"), False),
        (PeerLostError("rank 1"), True),
    ],
    ids=str,
)
def test_only_errors_of_torch_mean_that_a_rank_is_lost(error, is_lost):
    assert is_consequence(error) == is_lost
    assert is_consequence(TaskError.capture(error, "f", "rank", 1)) == is_lost


def test_a_rank_lost_while_it_joins_is_reported_by_the_others(monkeypatch):
    """The text of torch's error isn't parsed again in the driver."""
    host = GroupHost(1)

    def lose(*args, **kwargs):
        raise RuntimeError(GLOO)

    monkeypatch.setattr(dist, "init_process_group", lose)
    with pytest.raises(PeerLostError) as caught:
        join(host.spec, 0)
    assert caught.value.rank == 0
    assert not dist.is_initialized()
