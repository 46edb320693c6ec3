"""A worker's process ends in every way there is: each waiting ``get`` learns of it, and how."""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import threading
import time

import numpy as np
import pytest

import miniray
from miniray.core.local.dispatch import Dispatcher
from miniray.errors import ActorDiedError, MinirayError, ObjectLostError, WorkerCrashedError
from tests.faults.helpers import SOON, eventually, fails_soon, is_process, pids
from tests.faults.workers import double

#: How to end a process, and what the error must say about it.
ENDS = {
    "sigkill": (lambda: os.kill(os.getpid(), signal.SIGKILL), "SIGKILL"),
    "sigterm": (lambda: os.kill(os.getpid(), signal.SIGTERM), "SIGTERM"),
    "segfault": (lambda: ctypes.string_at(0), "SIGSEGV"),
    "abort": (os.abort, "SIGABRT"),
    "os_exit": (lambda: os._exit(3), "code 3"),
    "sys_exit": (lambda: sys.exit(4), "code 4"),
}

ends = pytest.mark.parametrize("how", ENDS)


@miniray.remote
class Mortal:
    def __init__(self, how=None):
        if how is not None:
            ENDS[how][0]()

    def pid(self):
        return os.getpid()

    def die(self, how, *last_words):
        for words in last_words:
            print(words)
        ENDS[how][0]()

    def sleep(self, seconds=600):
        time.sleep(seconds)

    def wait_for(self, boxed):
        return miniray.get(boxed[0])

    def make(self, size):
        return np.ones(size, np.uint8)

    def put(self, size):
        return [miniray.put(np.ones(size, np.uint8))]

    def add(self, array):
        return int(array[0])


@miniray.remote(max_retries=0)
def die(how):
    print("a task's last words")
    ENDS[how][0]()


@ends
def test_in_a_method(engine, how):
    actor = Mortal.options(name="Victim").remote()
    pid = miniray.get(actor.pid.remote())
    text = fails_soon(actor.die.remote(how, "first words", "last words"), ActorDiedError)
    for expected in ("Victim", f"pid {pid}", ENDS[how][1], "first words\n", "last words\n"):
        assert expected in text
    fails_soon(actor.pid.remote(), ActorDiedError, ENDS[how][1])


@ends
def test_in_the_constructor(engine, how):
    miniray.get(
        Mortal.remote().pid.remote()
    )  # what is promised is counted from a death, not a start
    actor = Mortal.remote(how)
    fails_soon(actor.pid.remote(), ActorDiedError, ENDS[how][1])


@ends
def test_in_a_task(engine, how):
    text = fails_soon(die.remote(how), WorkerCrashedError, ENDS[how][1])
    assert "a task's last words" in text
    assert miniray.get(miniray.remote(abs).remote(-1)) == 1


def test_a_task_that_was_only_just_sent(engine, monkeypatch):
    """Its worker is gone before whoever sent it has looked whether that one is idle."""
    sent = []

    def send_and_lose(dispatcher, channel, lane, call):
        send(dispatcher, channel, lane, call)
        if not sent:
            sent.append(call.id)
            channel.lost(interrupted=True)
            assert eventually(lambda: channel.handler is None)  # its end is being reported

    send = Dispatcher._send
    monkeypatch.setattr(Dispatcher, "_send", send_and_lose)
    assert miniray.get(double.remote(4), timeout=30) == 8
    assert sent


def test_while_idle(engine):
    actor = Mortal.remote()
    os.kill(miniray.get(actor.pid.remote()), signal.SIGKILL)
    fails_soon(actor.pid.remote(), ActorDiedError, "SIGKILL")


def test_while_queued_calls_wait(engine):
    actor = Mortal.remote()
    pid = miniray.get(actor.pid.remote())
    refs = [actor.sleep.remote(), *(actor.pid.remote() for _ in range(100))]
    os.kill(pid, signal.SIGKILL)
    for ref in refs:
        fails_soon(ref, ActorDiedError, "SIGKILL")


def test_before_it_runs(engine):
    """Killed as soon as there is a process, most likely before it has received its class."""
    for _ in range(5):
        before = set(pids(engine))
        actor = Mortal.remote()
        ref = actor.pid.remote()
        (pid,) = eventually(lambda before=before: set(pids(engine)) - before)
        os.kill(pid, signal.SIGKILL)
        # The answer may have been quicker than the kill.
        with contextlib.suppress(ActorDiedError):
            assert miniray.get(ref, timeout=SOON) == pid
        fails_soon(actor.pid.remote(), ActorDiedError, "SIGKILL")


def test_killed_while_its_arguments_are_pending(engine):
    slow = Mortal.remote()
    actor = Mortal.remote(slow.sleep.remote())
    ref = actor.pid.remote()
    miniray.kill(actor)
    fails_soon(ref, ActorDiedError, "kill")


def test_every_kind_of_waiter_is_told(engine):
    actor, watcher = Mortal.remote(), Mortal.remote()
    pid = miniray.get(actor.pid.remote())
    ref = actor.sleep.remote()
    errors = []

    def wait_in_thread():
        try:
            miniray.get(ref)
        except ActorDiedError as error:
            errors.append(str(error))

    async def wait_in_loop():
        await ref

    def run_loop():
        try:
            asyncio.run(wait_in_loop())
        except ActorDiedError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=wait_in_thread) for _ in range(4)]
    threads.append(threading.Thread(target=run_loop))
    for thread in threads:
        thread.start()
    future = ref.future()
    elsewhere = watcher.wait_for.remote([ref])
    depending = watcher.add.remote(ref)
    miniray.wait([ref], timeout=0.2)  # let them all come to wait
    os.kill(pid, signal.SIGKILL)
    assert miniray.wait([ref, elsewhere], num_returns=2, timeout=SOON)[1] == []
    for thread in threads:
        thread.join(SOON)
        assert not thread.is_alive()
    assert len(errors) == 5
    assert all("SIGKILL" in text for text in errors)
    assert isinstance(future.exception(timeout=SOON), ActorDiedError)
    fails_soon(elsewhere, ActorDiedError, "SIGKILL")
    fails_soon(depending, ActorDiedError, "SIGKILL")


def test_an_actor_that_calls_it_is_told(engine):
    @miniray.remote
    class Caller:
        def call(self, other):
            return miniray.get(other.sleep.remote())

    actor = Mortal.remote()
    pid = miniray.get(actor.pid.remote())
    callers = [Caller.remote() for _ in range(3)]
    refs = [caller.call.remote(actor) for caller in callers]
    miniray.wait(refs, timeout=0.3)
    os.kill(pid, signal.SIGKILL)
    for ref in refs:
        fails_soon(ref, ActorDiedError, "SIGKILL")


def test_a_stream_ends_with_the_error(engine):
    @miniray.remote
    class Source:
        def items(self):
            yield 1
            yield 2
            os.kill(os.getpid(), signal.SIGKILL)

    refs = list(Source.remote().items.options(num_returns="streaming").remote())
    assert miniray.get(refs[:-1]) == [1, 2]
    fails_soon(refs[-1], ActorDiedError, "SIGKILL")


def test_while_it_writes_a_large_result(engine):
    for delay in (0.0, 0.02, 0.05, 0.1):
        actor = Mortal.remote()
        pid = miniray.get(actor.pid.remote())
        ref = actor.make.remote(200_000_000)
        eventually(lambda: engine.node.usage.total() > 0)  # the memory is there, the pages come
        miniray.wait([ref], timeout=delay)
        os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ActorDiedError):
            assert miniray.get(ref, timeout=SOON).all()
        fails_soon(actor.pid.remote(), ActorDiedError, "SIGKILL")
        del ref
        eventually(lambda: engine.node.usage.total() == 0, 5)


def test_the_sender_of_a_large_argument(engine):
    @miniray.remote
    class Sender:
        def pid(self):
            return os.getpid()

        def send(self, other):
            return miniray.get(other.add.remote(np.ones(200_000_000, np.uint8)))

    sender, receiver = Sender.remote(), Mortal.remote()
    pid = miniray.get(sender.pid.remote())
    ref = sender.send.remote(receiver)
    eventually(lambda: engine.node.usage.total() > 0)
    os.kill(pid, signal.SIGKILL)
    fails_soon(ref, ActorDiedError, "SIGKILL")
    assert miniray.get(receiver.add.remote(np.full(10, 7))) == 7
    eventually(lambda: engine.node.usage.total() == 0, 5)


def test_while_results_fill_the_connection(engine):
    """Values too small for shared memory: megabytes of them wait in the worker to be sent."""
    actor = Mortal.remote()
    pid = miniray.get(actor.pid.remote())
    refs = [actor.make.remote(90_000) for _ in range(300)]
    miniray.get(refs[3])
    os.kill(pid, signal.SIGKILL)
    assert miniray.wait(refs, num_returns=300, timeout=SOON)[1] == []
    outcomes = []
    for ref in refs:
        try:
            outcomes.append(int(miniray.get(ref).sum()))
        except ActorDiedError:
            outcomes.append(None)
    assert outcomes[0] == 90_000
    assert set(outcomes) <= {90_000, None}


def test_objects_that_it_owned_are_lost(engine):
    actor = Mortal.remote()
    (ref,) = miniray.get(actor.put.remote(1000))
    (kept,) = miniray.get(actor.put.remote(1_000_000))
    array = miniray.get(kept)
    os.kill(miniray.get(actor.pid.remote()), signal.SIGKILL)
    fails_soon(actor.pid.remote(), ActorDiedError)
    fails_soon(ref, ObjectLostError, "keep a handle of the actor")
    assert array.sum() == 1_000_000  # memory that is mapped stays
    assert miniray.get(kept).sum() == 1_000_000


def test_its_forked_child_keeps_no_connection_alive(engine, tmp_path):
    """The child holds all of its parent's descriptors: a closing socket would never be seen."""

    @miniray.remote
    class Parent:
        def fork(self):
            child = os.fork()
            if child == 0:
                os.setsid()  # out of the process group that dies with the parent
                time.sleep(600)
            return os.getpid(), child, [miniray.put("small")]

        def sleep(self):
            time.sleep(600)

    actor = Parent.remote()
    watcher = Mortal.remote()
    pid, child, (ref,) = miniray.get(actor.fork.remote())
    sleeping = actor.sleep.remote()
    elsewhere = watcher.wait_for.remote([sleeping])
    os.kill(pid, signal.SIGKILL)
    fails_soon(sleeping, ActorDiedError, "SIGKILL")
    fails_soon(elsewhere, ActorDiedError, "SIGKILL")
    fails_soon(actor.sleep.remote(), ActorDiedError)
    fails_soon(ref, ObjectLostError)
    miniray.shutdown()
    assert not is_process(child)


def test_everything_it_started_ends_with_it(engine):
    @miniray.remote
    class Parent:
        def start(self):
            import subprocess

            return os.getpid(), subprocess.Popen(["sleep", "600"]).pid

    pid, child = miniray.get(
        Parent.options(name="keeper", lifetime="detached").remote().start.remote()
    )
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: not is_process(child), SOON)


def test_errors_are_minirays_own(engine):
    for ref in (Mortal.remote("abort").pid.remote(), die.remote("abort")):
        with pytest.raises(MinirayError):
            miniray.get(ref, timeout=SOON)


@miniray.remote
class Quitter:
    def quit(self, *words):
        print("before")
        sys.exit(*words)


class AsyncQuitter(Quitter.__wrapped__):
    async def quit(self, *words):
        super().quit(*words)


@pytest.mark.parametrize(
    "actor_class",
    [Quitter, Quitter.options(max_concurrency=2), miniray.remote(AsyncQuitter)],
    ids=["plain", "threads", "async"],
)
def test_what_sys_exit_says_is_part_of_the_error(engine, actor_class):
    for words, code in ((["no data in /data"], 1), ([], 0)):
        with pytest.raises(ActorDiedError) as died:
            miniray.get(actor_class.remote().quit.remote(*words), timeout=SOON)
        assert (died.value.exit_code, died.value.signal) == (code, None)
        printed = "".join(f"    {line}\n" for line in ("before", *words))
        assert printed in str(died.value)


def test_who_was_killed_on_purpose_was_not_killed_by_somebody(engine):
    actor = Mortal.remote()
    miniray.kill(actor)
    text = fails_soon(actor.pid.remote(), ActorDiedError)
    assert "miniray.kill()" in text
    assert "by somebody" not in text
