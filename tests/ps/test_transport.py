"""Both ways by which weights come to the server: the same results, and nobody is read half."""

import ctypes
import os
import platform
import signal
import struct
import time
from pathlib import Path

import numpy as np
import pytest

import miniray
from miniray.errors import SyncError, WorkerLostError
from miniray.ps import Strategy, collect, create_parameter_server
from miniray.ps.server import Server
from miniray.ps.strategies import make_strategy
from tests.ps.helpers import call

torch = pytest.importorskip("torch")

#: Three pieces of numbers, and less than one but enough for shared memory.
LARGE, SMALL = 300_000, 30_000


@pytest.fixture(scope="module", autouse=True)
def engine():
    miniray.shutdown()
    with miniray.init(backend="local", num_workers=1):
        yield


@miniray.remote
class Holder:
    """A worker whose weights stay where they are, as a model's do."""

    def __init__(self, value, size=LARGE, fresh=False):
        self.weights = {
            "layer": [torch.full((size,), float(value)), torch.tensor(float(value))],
            "half": torch.full((5,), value, dtype=torch.float16),
            "numpy": np.full((3, 2), value, np.float64),
            "steps": torch.tensor(int(value)),
            "mask": np.array([value > 1, False]),
        }
        self.fresh = fresh
        self.given = []
        self.friend = None

    def get_weights(self):
        if self.friend is not None:
            miniray.get(self.friend.pid.remote())
        if self.fresh:
            self.given.append({**self.weights, "layer": [t.clone() for t in self.weights["layer"]]})
            return self.given[-1]  # and all of them stay, or the next would be where this was
        return self.weights

    def set_weights(self, weights):
        self.set(weights["layer"][0][0], weights)

    def set(self, value, weights=None):
        for tensor in (*self.weights["layer"], self.weights["half"]):
            tensor.fill_(float(value))
        self.weights["numpy"].fill(float(value))
        if weights is not None:
            self.weights["steps"].copy_(weights["steps"])

    def ask(self, friend):
        self.friend = friend

    def pid(self):
        return os.getpid()


@miniray.remote(max_concurrency=2)
class Threaded:
    def __init__(self):
        self.weights = [torch.ones(SMALL)]

    def get_weights(self):
        return self.weights

    def set_weights(self, weights):
        self.weights[0].copy_(weights[0])


@miniray.remote
class Async:
    def __init__(self):
        self.weights = [torch.ones(SMALL)]

    async def get_weights(self):
        return self.weights

    async def set_weights(self, weights):
        self.weights[0].copy_(weights[0])


def transport(server):
    return list(call(server, "get_stats")["transport"].values())


def reading(server, holders):
    """A server that reads these workers from now on."""
    for _ in range(2):
        call(server, "sync_from_workers", holders)
    return server


@pytest.mark.parametrize("strategy", ["weighted", "median"])
def test_both_give_the_same(strategy):
    holders = [Holder.remote(0) for _ in range(3)]
    found = {}
    for way in ("copy", "read"):
        server = create_parameter_server(strategy, transport=way)
        states = []
        for i in range(4):
            miniray.get([h.set.remote(i + v) for h, v in zip(holders, (1, 1.7, 7), strict=True)])
            call(server, "sync_from_workers", holders)
            state, weights = call(server, "get_state"), call(holders[2], "get_weights")
            arrays = [*state["weights"], *weights["layer"], weights["half"], weights["numpy"]]
            arrays += [a for buffers in state["buffers"].values() for a in buffers]
            states.append([np.asarray(a).tobytes() for a in arrays])
        found[way] = states
        assert transport(server) == [way] * 3
    assert found["copy"] == found["read"]


def test_integers_and_booleans_are_read_too():
    holders = [Holder.remote(v, SMALL) for v in (1, 2, 6)]
    server = create_parameter_server(transport="read")
    for _ in range(3):
        call(server, "sync_from_workers", holders)
    assert transport(server) == ["read"] * 3
    weights = call(server, "get_weights")
    assert (int(weights["steps"]), weights["mask"].tolist()) == (3, [True, False])


class Interrupting(Strategy):
    """The mean; on the way, at one piece of the third sync, something happens to a worker."""

    name = "interrupting"

    def __init__(self, at, act):
        self.at = at
        self.act = act
        self.seen = 0

    def combine(self, global_weights, worker_weights, weights):
        if len(self.out) >= self.at:
            self.seen += 1
            if self.seen == 3:
                self.act()
        return self.mean(worker_weights, weights, self.out)


class Kill:
    def __init__(self, pid):
        self.pid = pid

    def __call__(self):
        os.kill(self.pid, signal.SIGKILL)
        while (
            Path(f"/proc/{self.pid}/statm").exists()
            and Path(f"/proc/{self.pid}/statm").read_text().split()[0] != "0"
        ):
            time.sleep(0.001)  # until its memory is gone


@pytest.mark.parametrize("size", [LARGE, SMALL])
def test_a_worker_killed_while_it_is_read(size):
    """Before all of it was read, or just after: named, and never averaged."""
    holders = [Holder.remote(v, size) for v in (1, 2, 3)]
    strategy = Interrupting(min(size, 131_072), Kill(call(holders[1], "pid")))
    if size == LARGE:
        strategy.seen = -2  # two pieces of this length each time: at the first of the third sync
    server = create_parameter_server(strategy, threads=1, transport="read")
    reading(server, holders)
    before = call(server, "get_state")
    with pytest.raises(WorkerLostError) as caught:
        call(server, "sync_from_workers", holders)
    assert (caught.value.workers, caught.value.phase) == ((1,), "collect")
    assert "SIGKILL" in str(caught.value)
    after, stats = call(server, "get_state"), call(server, "get_stats")
    assert (after["version"], stats["num_syncs"], stats["failed_syncs"]) == (2, 2, 1)
    assert all(
        np.array_equal(a, b) for a, b in zip(after["weights"], before["weights"], strict=True)
    )
    # The others were let go, are as they were, and a new one takes its place.
    left = [holders[0], Holder.remote(8, size), holders[2]]
    for _ in range(2):
        call(server, "sync_from_workers", left)
    assert transport(server) == ["read"] * 3
    assert float(call(left[2], "get_weights")["layer"][0][-1]) == 4.0


class WaitFor:
    def __init__(self, path):
        self.path = path

    def __call__(self):
        (self.path / "reading").touch()
        while not (self.path / "go").exists():
            time.sleep(0.001)


def test_a_worker_does_nothing_else_while_it_is_read(tmp_path):
    holders = [Holder.remote(v) for v in (1, 3)]
    strategy = Interrupting(131_072, WaitFor(tmp_path))
    strategy.seen = -2
    server = reading(create_parameter_server(strategy, threads=1, transport="read"), holders)
    miniray.get([h.set.remote(v) for h, v in zip(holders, (1, 3), strict=True)])
    sync = server.sync_from_workers.remote(holders)
    while not (tmp_path / "reading").exists():
        time.sleep(0.001)
    changes = [h.set.remote(100) for h in holders]
    assert miniray.wait(changes, timeout=0.3)[0] == []
    (tmp_path / "go").touch()
    miniray.get(sync)
    assert transport(server) == ["read"] * 2
    assert {float(x) for x in call(server, "get_weights")["layer"][0].unique()} == {2.0}


def test_a_worker_that_others_wait_for_is_not_held(monkeypatch):
    """Worker 1 asks worker 0 for something in its get_weights."""
    monkeypatch.setitem(collect._PATIENCE, "read", 0.2)
    holders = [Holder.remote(v, SMALL) for v in (1, 3)]
    options = {"on_nonfinite": "error", "num_workers": None, "threads": None}
    server = Server(make_strategy("average", {}), transport="read", **options)  # not in an actor
    for _ in range(2):
        server.sync_from_workers(holders)
    miniray.get(holders[1].ask.remote(holders[0]))
    server.sync_from_workers(holders)
    assert server.get_stats()["transport"][0] == "copy: other workers took too long"
    assert float(server.get_weights()["layer"][0].max()) == 2.0


def test_the_same_worker_twice():
    holder = Holder.remote(1, SMALL)
    server = reading(create_parameter_server(transport="read"), [holder, holder])
    miniray.get(server.sync_from_workers.remote([holder, holder]), timeout=30)
    assert transport(server) == ["copy"] * 2


class Sandboxed(Strategy):
    """The mean, in a process that may not read another's memory: the kernel refuses it."""

    name = "sandboxed"

    def __init__(self, code):
        self.code = code

    def __setstate__(self, state):  # when it arrives at the server
        self.__dict__.update(state)
        number = {"x86_64": 310, "aarch64": 270}[platform.machine()]
        refused, allowed = 0x00050000 | self.code, 0x7FFF0000
        # Load the system call's number; if it is this one: refused, else allowed.
        rules = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, refused)]
        rules.append((0x06, 0, 0, allowed))
        program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *r) for r in rules))
        header = ctypes.create_string_buffer(
            struct.pack("HxxxxxxQ", len(rules), ctypes.addressof(program))
        )
        libc = ctypes.CDLL(None)
        assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
        assert libc.prctl(22, 2, ctypes.byref(header), 0, 0) == 0  # PR_SET_SECCOMP

    def combine(self, global_weights, worker_weights, weights):
        return self.mean(worker_weights, weights, self.out)


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="number not known")
@pytest.mark.parametrize(
    ("code", "words"), [(1, "Operation not permitted"), (38, "Function not implemented")]
)
def test_a_kernel_that_refuses(code, words):
    holders = [Holder.remote(v, SMALL) for v in (1, 3)]
    server = create_parameter_server(Sandboxed(code), threads=1, transport="read")
    for i in range(4):
        miniray.get([h.set.remote(v + i) for h, v in zip(holders, (1, 3), strict=True)])
        assert call(server, "sync_from_workers", holders)["synced"]
        assert float(call(holders[0], "get_weights")["layer"][0].max()) == 2.0 + i
    for way, holder in zip(transport(server), holders, strict=True):
        pid = call(holder, "pid")
        assert way == f"copy: the memory of process {pid} cannot be read: {words}"


def test_an_error_in_get_weights_lets_the_others_go():
    holders = [Holder.remote(v, SMALL) for v in (1, 2, 3)]
    server = reading(create_parameter_server(transport="read"), holders)
    miniray.get(holders[1].ask.remote("nobody"))
    with pytest.raises(SyncError) as caught:
        call(server, "sync_from_workers", holders)
    assert (caught.value.workers, caught.value.phase) == ((1,), "collect")
    assert "Holder.get_weights" in str(caught.value)
    miniray.get(holders[1].ask.remote(None), timeout=30)
    assert miniray.get([h.pid.remote() for h in holders], timeout=30)
    call(server, "sync_from_workers", holders)
    assert transport(server) == ["read"] * 3


@pytest.mark.parametrize("kind", [Threaded, Async])
def test_workers_that_do_several_things_at_once_are_copied(kind):
    workers = [kind.remote() for _ in range(2)]
    server = create_parameter_server(transport="read")
    for _ in range(3):
        call(server, "sync_from_workers", workers)
    reason = {Threaded: "copy: the worker runs several calls at once", Async: "copy"}[kind]
    assert transport(server) == [reason] * 2


def test_weights_whose_structure_changes():
    holders = [Holder.remote(v, SMALL) for v in (1, 3)]
    server = reading(create_parameter_server(transport="read"), holders)
    other = Holder.remote(5, SMALL + 1)
    with pytest.raises(miniray.errors.WeightsMismatchError) as caught:
        call(server, "sync_from_workers", [holders[0], other])
    assert caught.value.worker == 1
    call(server, "sync_from_workers", holders)
    assert transport(server) == ["read"] * 2


def test_the_usual_way():
    """Small weights are copied; large ones once they are known to stay, if huge pages are there."""
    small, large = Holder.remote(1, SMALL), [Holder.remote(v, 2_500_000) for v in (1, 3)]
    fresh = Holder.remote(2, 2_500_000, fresh=True)
    server = create_parameter_server(threads=1)
    for _ in range(3):
        call(server, "sync_from_workers", [small])
    assert transport(server) == ["copy"]  # the room for reading would be larger than they are
    server = create_parameter_server(threads=1)
    for i in range(6):
        miniray.get([h.set.remote(v + i) for h, v in zip([*large, fresh], (1, 3, 2), strict=True)])
        call(server, "sync_from_workers", [*large, fresh])
        assert float(call(server, "get_weights")["layer"][0].min()) == 2.0 + i
        assert float(call(server, "get_weights")["layer"][0].max()) == 2.0 + i
    *stay, moves = transport(server)
    assert moves == "copy: they were not at this place before"
    slow, none = "other workers took too long", "the system gives no huge pages for them"
    assert set(stay) <= {"read", f"copy: {slow}", f"copy: {none}"}


def test_transport_must_be_one_of_them():
    with pytest.raises(ValueError, match="transport"):
        create_parameter_server(transport="fly")
