"""Parts of the local engine without processes: connections of a worker, cancel requests, control.

A node here has no I/O thread: each test calls what that thread would call.
"""

import asyncio
import contextlib
import shutil
import socket
import tempfile
import threading
from unittest.mock import Mock

import pytest

from miniray.core.local import async_executor, calls, executors
from miniray.core.local.control import Control
from miniray.core.local.engine import LocalEngine
from miniray.core.local.node import Node
from miniray.core.local.objects import PLAIN, Blob, Entry, LocalRef
from miniray.core.local.peers import CANCEL, FORGET
from miniray.core.local.spawner import SessionInfo
from miniray.core.local.store import Usage
from miniray.core.local.wire import Stream
from miniray.core.local.worker import Server

CALLER, WORKER = 1, 2


@pytest.fixture
def node():
    folder = tempfile.mkdtemp(prefix="miniray-")  # short: the path of a socket is in it
    info = SessionInfo(
        session_id="unit",
        directory=folder,
        token=bytes(32),
        namespace="unit",
        resources={"CPU": 1.0},
        usage_fd=Usage.create(1 << 20).fd,
        memory_limit=1 << 20,
        spill_dir=folder,
        log_dir=folder,
    )
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    node = Node(info, WORKER, 2, listener)
    node.engine = LocalEngine(node, ())
    yield node
    node.close()
    shutil.rmtree(folder)


# -- the end of a connection -------------------------------------------------------------------


@pytest.fixture
def server(node):
    return Server(node, node.engine, "unit", is_actor=False)


def closed_connection(server):
    """Connect a caller that is gone already; return the worker's end."""
    ours, theirs = socket.socketpair()
    theirs.close()
    server._connected(ours, CALLER)
    return server._connections[ours.fileno()]


def test_both_threads_see_the_end_of_a_connection(server):
    stream = closed_connection(server)
    assert server._read(stream) == []
    assert server._read(stream) == []
    assert stream.closed
    assert server._connections == {}


def test_the_io_thread_drops_a_connection_that_is_ready(server, monkeypatch):
    """It does so after the main thread has learned that there is something to read."""
    stream = closed_connection(server)
    poll = server._poller.poll
    seen = []

    def drop_after_poll(timeout=None):
        ready = poll(timeout)
        if stream.fd in dict(ready):
            seen.append(stream.fd)
            server._read(stream)
            server._exit()
        return ready

    monkeypatch.setattr(server._poller, "poll", drop_after_poll)
    server._loop()  # returns because of _exit()
    assert seen == [stream.fd]


# -- requests to cancel --------------------------------------------------------------------------


class Target:
    """The instance of an actor, with a method that is canceled while it runs."""

    def __init__(self, executor):
        self.executor = executor

    def canceled(self, id):
        self.executor.cancel(id)
        return id

    def fail_canceled(self, id):
        self.executor.cancel(id)
        raise ValueError(id)

    async def later(self, id):
        return id


@pytest.fixture
def stream():
    ours, theirs = socket.socketpair()
    with contextlib.closing(theirs):
        yield Stream(ours, CALLER, lambda _: None)


def job(stream, id, method):
    return executors.Job(stream, id, method, 1, (id,), {})


@pytest.mark.parametrize("method", ["canceled", "fail_canceled"])
def test_a_call_of_a_sync_actor_ends_with_its_cancel_request(node, stream, method):
    executor = executors.Executor(node, "unit")
    executor.instance = Target(executor)
    for id in range(20):
        executor.run(job(stream, id, method))
    assert executor.cancelled == set()


def test_a_request_that_arrives_before_the_call_is_kept_for_it(node, stream):
    executor = executors.Executor(node, "unit")
    executor.instance = Target(executor)
    executor.cancel(7)
    executor.run(job(stream, 8, "later"))
    assert executor.cancelled == {7}
    executor.run(job(stream, 7, "later"))
    assert executor.cancelled == set()


def test_a_request_that_arrives_after_the_call_is_forgotten(node, stream):
    executor = executors.Executor(node, "unit")
    executor.cancel(7)
    executor.forget(7)
    assert executor.cancelled == set()


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_async_actor_forgets_cancel_requests(node, stream, when):
    executor = async_executor.AsyncExecutor(node, "unit", 10, lambda stream: jobs)
    executor.instance = Target(executor)
    jobs = [job(stream, 7, "later")]

    async def main():
        if when == "before":
            executor.cancel(7)
            await asyncio.sleep(0)
            assert executor.cancelled == {7}
        executor._on_readable(stream)
        while executor._tasks:
            await asyncio.sleep(0)
        if when == "after":
            executor.cancel(7)
            executor.forget(7)
            await asyncio.sleep(0)

    executor._loop.run_until_complete(main())
    executor._loop.close()
    assert executor.cancelled == set()


class Recorder:
    """Stands for a node: keeps what is sent to other processes."""

    closing = False

    def __init__(self):
        self.lock = threading.RLock()
        self.awaited = set()
        self.sent = []
        self.ids = iter(range(100, 200))

    def tell(self, proc, kind, meta):
        self.sent.append((proc, kind, meta))
        return True


@pytest.mark.parametrize("num_returns", [1, 2, "streaming"])
@pytest.mark.parametrize("ended", [False, True])
def test_the_caller_sends_forget_after_the_outcome(num_returns, ended):
    node = Recorder()
    sink, result = calls.make_sink(node, 7, num_returns)
    call = calls.Call(7, sink, "method", num_returns)
    outcome = (calls.BLOB, [Blob(), Blob()]) if num_returns == 2 else (PLAIN, 1)
    if ended:
        sink.resolve(*outcome)
    call.request_cancel(node, WORKER, recursive=True)
    requested = (WORKER, CANCEL, (7, True))
    if not ended:
        if num_returns == "streaming":
            sink.add(Blob())
        assert node.sent == [requested]
        sink.resolve(*outcome)
    assert node.sent == [requested, (WORKER, FORGET, 7)]
    del result


# -- the control plane's lock --------------------------------------------------------------------


@pytest.fixture
def control():
    """Only the lock and the actions of a control plane."""
    control = Control.__new__(Control)
    control.lock = threading.RLock()
    control._do = []
    return control


def free(lock):
    """Whether another thread could take ``lock``."""
    taken = []

    def take():
        taken.append(lock.acquire(blocking=False))
        if taken[0]:
            lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return taken[0]


def test_actions_run_in_order_without_the_lock(control):
    ran = []
    with control.locked():
        for i in range(3):
            control.later(lambda i=i: ran.append((i, free(control.lock))))
        assert ran == []
    assert ran == [(0, True), (1, True), (2, True)]


def test_a_caller_that_raises_leaves_no_action_to_the_next_one(control):
    ran = []
    with pytest.raises(KeyError), control.locked():
        control.later(lambda: ran.append("first"))
        raise KeyError
    assert ran == ["first"]
    with control.locked():
        control.later(lambda: ran.append("second"))
    assert ran == ["first", "second"]


def test_an_action_that_raises_does_not_drop_the_others(control):
    ran = []
    with pytest.raises(ZeroDivisionError), control.locked():
        control.later(lambda: 1 / 0)
        control.later(lambda: ran.append("after"))
    assert ran == ["after"]


# -- whether a worker may end --------------------------------------------------------------------


def asked(node):
    """Ask ``node`` when it is idle; the list has an entry when it has answered."""
    answers = []
    node.answers["when_idle"](0, None, [], lambda answer, blobs: answers.append(answer))
    node.turn()
    return answers


def own(node, proc, value):
    """An object of ``node`` that ``proc`` holds."""
    entry = Entry(node, next(node.ids))
    entry.resolve(PLAIN, value)
    node.give(entry, proc)
    return entry.id


def test_a_worker_is_idle_when_the_last_holder_is_done(node):
    id = own(node, 3, "value")
    node.give(node.find(id), 4)
    answers = asked(node)
    node.take_back(3, [(id, 1)])
    node.turn()
    assert answers == []
    node.declare_dead(4)
    node.turn()
    assert answers == [None]
    node.turn()
    assert answers == [None]


def test_a_ref_inside_an_object_keeps_its_owner(node):
    inner = Entry(node, next(node.ids))
    inner.resolve(PLAIN, 1)
    outer = Entry(node, next(node.ids))
    outer.resolve(calls.BLOB, Blob.of(node, [LocalRef(inner)]))
    fds = []
    wire = outer.blob().to_wire(node, 3, fds)
    del outer
    answers = asked(node)
    assert answers == []
    node.take_back(3, [(wire[0][0][0], 1)])
    node.turn()
    assert answers == [None]


def test_a_worker_that_waits_for_an_argument_is_not_idle(node):
    entry = Entry(node, next(node.ids))
    entry.add_waiter(lambda: None)
    answers = asked(node)
    assert answers == []
    entry.resolve(PLAIN, 1)
    node.turn()
    assert answers == [None]


def test_a_worker_with_an_unanswered_call_is_not_idle(node):
    channel = Mock(pending={7: "call"})
    node.channels[3] = {channel}
    answers = asked(node)
    assert answers == []
    channel.pending.clear()
    node.turn()
    assert answers == [None]


def test_memory_that_others_have_mapped_does_not_keep_a_worker(node):
    lease = node.store.allocate(1000)
    node.give(lease, 3)
    assert asked(node) == [None]
    node.take_back(3, [(lease.id, 1)])
