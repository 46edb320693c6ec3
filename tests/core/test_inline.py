"""What only the inline engine promises: the caller's thread, the user's frames, no waiting."""

import asyncio
import bdb
import gc
import os
import threading
import traceback
import warnings

import pytest

import miniray
from miniray.errors import ActorDiedError, ActorUnschedulableError, TaskError, WorkerCrashedError
from tests.conformance.helpers import exists


@pytest.fixture(autouse=True)
def session(monkeypatch):
    monkeypatch.delenv("MINIRAY_BACKEND", raising=False)
    miniray.shutdown()
    with miniray.init(backend="inline", num_cpus=2, num_gpus=1):
        yield


@miniray.remote
def call(function, *args):
    return function(*args)


@miniray.remote
class Runner:
    def __init__(self):
        self.depth = 0

    def thread(self):
        return threading.get_ident(), os.getpid()

    def fail(self, secret):
        raise ValueError(f"{secret}")

    def nest(self, n):
        self.depth += 1
        if n:
            me = miniray.get_runtime_context().current_actor
            return miniray.get(me.nest.remote(n - 1))
        return self.depth

    def kill_myself(self):
        miniray.kill(miniray.get_runtime_context().current_actor)
        return "gone"


def test_code_runs_at_the_call_in_the_calling_thread():
    ref = Runner.remote().thread.remote()
    assert miniray.get(ref) == (threading.get_ident(), os.getpid())


def test_breakpoint_stops_under_the_caller(monkeypatch):
    stops = []
    monkeypatch.setattr(
        "sys.breakpointhook", lambda: stops.append([f.name for f in traceback.extract_stack()])
    )

    @miniray.remote
    def debugged():
        breakpoint()  # noqa: T100

    debugged.remote()
    (stack,) = stops
    assert stack.index("test_breakpoint_stops_under_the_caller") < stack.index("debugged")


def test_the_users_own_exception_with_its_frames_is_the_cause():
    with pytest.raises(ValueError, match="s3") as caught:
        miniray.get(Runner.remote().fail.remote("s3"))
    original = caught.value.__cause__
    assert type(original) is ValueError
    frames = [frame for frame, _ in traceback.walk_tb(original.__traceback__)]
    assert [frame.f_code.co_name for frame in frames] == ["fail"]  # nothing of ours in front
    assert frames[0].f_locals["secret"] == "s3"


def test_a_kept_error_does_not_keep_the_callers_actors():
    gc.disable()  # without its help: reference counts alone must do
    try:
        runner = Runner.options(name="runner").remote()
        ref = runner.fail.remote("x")
        del runner
        assert not exists("runner")
        with pytest.raises(TaskError):
            miniray.get(ref)
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", [KeyboardInterrupt, bdb.BdbQuit])
def test_ctrl_c_and_leaving_the_debugger_end_the_program(kind):
    def leave():
        raise kind

    with pytest.raises(kind) as caught:
        call.remote(leave)
    assert not isinstance(caught.value, TaskError)


def test_sys_exit_in_a_task_is_a_crash_of_its_worker():
    with pytest.raises(WorkerCrashedError, match="3"):
        miniray.get(call.remote(exit, 3))


def test_an_actor_may_call_itself():
    assert miniray.get(Runner.remote().nest.remote(5)) == 6


def test_an_async_actor_may_await_itself():
    @miniray.remote
    class Recursive:
        async def down(self, n):
            me = miniray.get_runtime_context().current_actor
            return 0 if n == 0 else 1 + await me.down.remote(n - 1)

    assert miniray.get(Recursive.remote().down.remote(4)) == 4


def test_an_actor_that_kills_itself_returns_nothing():
    runner = Runner.remote()
    with pytest.raises(ActorDiedError):
        miniray.get(runner.kill_myself.remote())


def test_what_would_have_to_wait_is_refused_with_the_reason():
    holder = Runner.options(num_cpus=2, num_gpus=1).remote()
    for request in ({"num_cpus": 1}, {"num_gpus": 1}):
        with pytest.raises(ActorUnschedulableError, match="inline"):
            Runner.options(**request).remote()
    with pytest.raises(ActorUnschedulableError, match="inline"):
        call.remote(len, "x")  # a task wants a CPU
    del holder
    assert miniray.get(call.remote(len, "x")) == 1


def test_an_actor_lends_its_cpus_to_the_tasks_it_waits_for():
    @miniray.remote(num_cpus=2)
    class Greedy:
        def ask(self):
            return miniray.get(call.remote(len, "abc"))

    assert miniray.get(Greedy.remote().ask.remote()) == 3


def test_a_callees_environment_does_not_reach_the_actor_it_calls():
    @miniray.remote
    class Environment:
        def read(self):
            return os.environ.get("INLINE_TEST")

    reader = Environment.remote()

    @miniray.remote(runtime_env={"env_vars": {"INLINE_TEST": "task"}})
    def ask():
        return os.environ["INLINE_TEST"], miniray.get(reader.read.remote())

    assert miniray.get(ask.remote()) == ("task", None)
    assert "INLINE_TEST" not in os.environ


def test_tasks_left_on_an_actors_loop_end_with_it():
    @miniray.remote
    class Background:
        async def start(self, log):
            self.task = asyncio.ensure_future(self.tick())

        async def tick(self):
            await asyncio.Event().wait()

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # an unclosed loop or a destroyed task would warn
        actor = Background.options(name="background").remote()
        miniray.get(actor.start.remote(None))
        del actor
        gc.collect()
    assert not exists("background")


def test_driver_threads_take_turns_on_an_actor():
    @miniray.remote
    class Exclusive:
        def __init__(self):
            self.inside = self.most = 0

        def enter(self):
            self.inside += 1
            self.most = max(self.most, self.inside)
            threading.Event().wait(0.001)
            self.inside -= 1
            return self.most

    actor = Exclusive.remote()
    threads = [threading.Thread(target=actor.enter.remote) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert miniray.get(actor.enter.remote()) == 1
