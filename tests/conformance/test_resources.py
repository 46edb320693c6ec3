"""Resources: counted, held by living actors, refused when the machine cannot ever give them.

The session has 8 CPUs and 2 GPUs, whatever the machine has.
"""

import gc
import os

import pytest

import miniray
from miniray.errors import ActorUnschedulableError
from tests.conformance.helpers import Gate, eventually, needs


@miniray.remote
class Worker:
    def gpus(self):
        return miniray.get_gpu_ids()

    def visible(self):
        return os.environ.get("CUDA_VISIBLE_DEVICES")

    def environment(self, name):
        return os.environ.get(name)

    def environment_of_a_task(self, name):
        return miniray.get(environment.remote(name))


@miniray.remote
def environment(name):
    return os.environ.get(name)


@miniray.remote
def gpus():
    return miniray.get_gpu_ids(), os.environ.get("CUDA_VISIBLE_DEVICES")


def free(kind):
    return miniray.available_resources().get(kind, 0.0)


@pytest.fixture
def all_free(engine):
    """Actors of earlier tests have ended; on some engines that takes a moment."""
    gc.collect()  # a failed test's traceback keeps handles, and so actors, in cycles
    eventually(lambda: free("CPU") == 8 and free("GPU") == 2)


def test_totals_are_what_init_said(engine):
    totals = miniray.cluster_resources()
    assert totals["CPU"] == 8
    assert totals["GPU"] == 2
    assert totals["memory"] > 0


@pytest.mark.slow_on_ray
def test_an_actor_holds_its_cpus_while_it_lives(engine, all_free):
    worker = Worker.options(num_cpus=3).remote()
    miniray.get(worker.gpus.remote())
    eventually(lambda: free("CPU") == 5)
    del worker
    eventually(lambda: free("CPU") == 8)


@pytest.mark.slow_on_ray
def test_a_killed_actor_gives_its_cpus_back(engine, all_free):
    worker = Worker.options(num_cpus=2).remote()
    miniray.get(worker.gpus.remote())
    eventually(lambda: free("CPU") == 6)
    miniray.kill(worker)
    eventually(lambda: free("CPU") == 8)


@pytest.mark.slow_on_ray
def test_an_actor_whose_init_failed_holds_nothing(engine, all_free):
    @miniray.remote(num_cpus=4)
    class Broken:
        def __init__(self):
            raise ValueError("no")

        def ping(self):
            pass

    broken = Broken.remote()
    with pytest.raises(miniray.errors.ActorDiedError):
        miniray.get(broken.ping.remote())
    eventually(lambda: free("CPU") == 8)


@pytest.mark.slow_on_ray
def test_an_actor_without_a_request_holds_no_cpu(engine, all_free):
    worker = Worker.remote()
    miniray.get(worker.gpus.remote())
    eventually(lambda: free("CPU") == 8)
    assert worker is not None  # held until here


@pytest.mark.slow_on_ray
def test_fractions_of_a_cpu(engine, all_free):
    workers = [Worker.options(num_cpus=0.5).remote() for _ in range(3)]
    miniray.get([w.gpus.remote() for w in workers])
    eventually(lambda: free("CPU") == 6.5)


def test_a_running_task_uses_a_cpu(engine, all_free, tmp_path):
    needs(engine, "concurrent")
    gate = Gate(tmp_path)

    @miniray.remote(num_cpus=2)
    def blocked():
        gate.announce()
        gate.wait()

    ref = blocked.remote()
    eventually(gate.arrived)
    eventually(lambda: free("CPU") == 6)
    gate.open()
    miniray.get(ref)
    eventually(lambda: free("CPU") == 8)


@pytest.mark.slow_on_ray
def test_an_actor_waits_for_resources_that_are_taken(engine, all_free):
    needs(engine, "concurrent")
    first = Worker.options(num_cpus=8).remote()
    miniray.get(first.gpus.remote())
    second = Worker.options(num_cpus=8).remote()
    answer = second.gpus.remote()
    assert miniray.wait([answer], timeout=0.2)[0] == []
    del first
    assert miniray.get(answer) == []


@pytest.mark.parametrize("request_", [{"num_cpus": 9}, {"num_gpus": 3}], ids=str)
def test_an_actor_that_can_never_fit_is_refused_at_once(engine, request_):
    with pytest.raises(ActorUnschedulableError, match=r"8 CPU.*2 GPU"):
        Worker.options(**request_).remote()


@pytest.mark.parametrize("request_", [{"num_cpus": 9}, {"num_gpus": 3}], ids=str)
def test_a_task_that_can_never_fit_is_refused_at_once(engine, request_):
    with pytest.raises(ActorUnschedulableError, match=r"8 CPU.*2 GPU"):
        gpus.options(**request_).remote()


@pytest.mark.slow_on_ray
def test_tasks_nested_deeper_than_there_are_cpus(engine, all_free):
    @miniray.remote
    def down(n):
        return n if n == 0 else miniray.get(down.remote(n - 1)) + 1

    # Nine tasks wait for one another on eight CPUs: one that waits lends its CPU.
    assert miniray.get(down.remote(8)) == 8


# -- GPUs ------------------------------------------------------------------------------------------


def test_an_actor_gets_a_gpu_of_its_own(engine, all_free):
    one = Worker.options(num_gpus=1).remote()
    other = Worker.options(num_gpus=1).remote()
    ids = miniray.get([one.gpus.remote(), other.gpus.remote()])
    assert sorted(ids) == [[0], [1]]
    visible = miniray.get([one.visible.remote(), other.visible.remote()])
    assert visible == [str(ids[0][0]), str(ids[1][0])]


@pytest.mark.slow_on_ray
def test_an_actor_gets_several_gpus(engine, all_free):
    worker = Worker.options(num_gpus=2).remote()
    assert sorted(miniray.get(worker.gpus.remote())) == [0, 1]
    assert miniray.get(worker.visible.remote()) in ("0,1", "1,0")
    eventually(lambda: free("GPU") == 0)


@pytest.mark.slow_on_ray
def test_fractions_share_a_gpu(engine, all_free):
    workers = [Worker.options(num_gpus=0.5).remote() for _ in range(4)]
    ids = miniray.get([w.gpus.remote() for w in workers])
    assert sorted(ids) == [[0], [0], [1], [1]]


@pytest.mark.slow_on_ray
def test_a_gpu_is_free_again_when_its_actor_is_gone(engine, all_free):
    worker = Worker.options(num_gpus=2).remote()
    miniray.get(worker.gpus.remote())
    del worker
    eventually(lambda: free("GPU") == 2)
    again = Worker.options(num_gpus=2).remote()
    assert sorted(miniray.get(again.gpus.remote())) == [0, 1]


def test_a_task_gets_a_gpu(engine, all_free):
    ids, visible = miniray.get(gpus.options(num_gpus=1).remote())
    assert len(ids) == 1
    assert visible == str(ids[0])


@pytest.mark.slow_on_ray
def test_without_a_request_there_are_no_gpus(engine):
    assert miniray.get(Worker.remote().gpus.remote()) == []
    assert miniray.get(gpus.remote())[0] == []


def test_the_driver_has_all_gpus(engine):
    assert miniray.get_gpu_ids() == [0, 1]


# -- environment variables -------------------------------------------------------------------------


def test_environment_variables_of_a_task(engine):
    env = {"env_vars": {"CONFORMANCE_TASK": "yes"}}
    assert miniray.get(environment.options(runtime_env=env).remote("CONFORMANCE_TASK")) == "yes"
    assert miniray.get(environment.remote("CONFORMANCE_TASK")) is None
    assert "CONFORMANCE_TASK" not in os.environ


@pytest.mark.slow_on_ray
def test_environment_variables_of_an_actor(engine):
    env = {"env_vars": {"CONFORMANCE_ACTOR": "yes"}}
    worker = Worker.options(runtime_env=env).remote()
    assert miniray.get(worker.environment.remote("CONFORMANCE_ACTOR")) == "yes"
    assert miniray.get(Worker.remote().environment.remote("CONFORMANCE_ACTOR")) is None


@pytest.mark.slow_on_ray
def test_environment_variables_are_there_in_init(engine):
    @miniray.remote(runtime_env={"env_vars": {"CONFORMANCE_INIT": "early"}})
    class Early:
        def __init__(self):
            self.seen = os.environ.get("CONFORMANCE_INIT")

        def get(self):
            return self.seen

    assert miniray.get(Early.remote().get.remote()) == "early"


@pytest.mark.slow_on_ray
def test_environment_variables_are_inherited_by_what_an_actor_starts(engine):
    env = {"env_vars": {"CONFORMANCE_CHILD": "yes"}}
    worker = Worker.options(runtime_env=env).remote()
    assert miniray.get(worker.environment_of_a_task.remote("CONFORMANCE_CHILD")) == "yes"
