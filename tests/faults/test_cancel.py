"""Cancelling while processes die, and of what is on its way to one."""

import os
import signal

import pytest

import miniray
from miniray.core import session
from miniray.errors import TaskCancelledError
from tests.conformance.helpers import Gate
from tests.faults.helpers import eventually, pids


@miniray.remote(max_restarts=1, max_task_retries=1)
class Restarted:
    def note(self, folder, gate):
        note(folder, gate)


def note(folder, gate):
    (folder / str(os.getpid())).touch()
    gate.wait()


@pytest.mark.parametrize("where", ["task", "actor"])
def test_a_call_whose_process_just_died_does_not_run_again(engine, tmp_path, where):
    gate, ran = Gate(tmp_path), tmp_path / "ran"
    ran.mkdir()
    actor = Restarted.remote()
    ref = (miniray.remote(note) if where == "task" else actor.note).remote(ran, gate)
    pid = int(eventually(lambda: os.listdir(ran))[0])
    zygote = pids(engine)[0]
    os.kill(zygote, signal.SIGSTOP)  # the connection is closed, but nobody says yet what happened
    try:
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: not any(channel.handler for channel in _channels(engine, pid)))
        miniray.cancel(ref)
    finally:
        os.kill(zygote, signal.SIGCONT)
    with pytest.raises(TaskCancelledError):
        miniray.get(ref, timeout=20)
    assert os.listdir(ran) == [str(pid)]


def _channels(engine, pid):
    control = engine.node.released_actors.__self__._control
    procs = [w.proc for w in control.processes.workers.values() if w.pid == pid]
    return [channel for proc in procs for channel in engine.node.channels.get(proc, ())]


def test_force_ends_no_task_that_is_before_the_cancelled_one(tmp_path):
    gate = Gate(tmp_path)

    @miniray.remote(max_retries=0)
    def work(blocks):
        if blocks:
            gate.announce()
            gate.wait()
        return os.getpid()

    miniray.init(1, num_cpus=1)  # a single worker: tasks are sent to it one behind the other
    (pid,) = set(miniray.get([work.remote(False) for _ in range(200)]))  # so they are short
    refs = [work.remote(i == 0) for i in range(10)]
    eventually(gate.arrived)
    miniray.cancel(refs[-1], force=True)
    node = session.engine().node
    (worker,) = node.channels
    node.ask_and_wait(worker, "value", 0)  # answered after it has read the request to cancel
    gate.open()
    assert miniray.get(refs[:-1], timeout=20) == [pid] * 9
    with pytest.raises(TaskCancelledError):
        miniray.get(refs[-1], timeout=20)
