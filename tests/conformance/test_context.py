"""Who am I: the runtime context in the driver, in tasks and in actors."""

import socket

import pytest

import miniray


@miniray.remote
class Who:
    def __init__(self):
        self.in_init = miniray.get_runtime_context().get_actor_id()

    def ids(self):
        context = miniray.get_runtime_context()
        return {
            "actor_id": context.get_actor_id(),
            "actor_name": context.get_actor_name(),
            "task_id": context.get_task_id(),
            "worker_id": context.get_worker_id(),
            "node_id": context.get_node_id(),
            "job_id": context.get_job_id(),
            "namespace": context.namespace,
            "reconstructed": context.was_current_actor_reconstructed,
        }

    def id_in_init(self):
        return self.in_init

    def myself(self):
        return miniray.get_runtime_context().current_actor

    def nested(self):
        return miniray.get(ids_of_task.remote())

    def name_me(self, value):
        self.value = value

    def tell(self):
        return self.value


@miniray.remote
def ids_of_task():
    context = miniray.get_runtime_context()
    return {
        "actor_id": context.get_actor_id(),
        "task_id": context.get_task_id(),
        "node_id": context.get_node_id(),
        "job_id": context.get_job_id(),
        "current_actor": context.current_actor,
    }


def test_the_driver_is_no_task_and_no_actor(engine):
    context = miniray.get_runtime_context()
    assert context.get_actor_id() is None
    assert context.get_actor_name() is None
    assert context.get_task_id() is None
    assert context.current_actor is None


def test_a_task_has_an_id_and_is_no_actor(engine):
    first, second = miniray.get([ids_of_task.remote(), ids_of_task.remote()])
    assert first["actor_id"] is None
    assert first["current_actor"] is None
    assert first["task_id"] != second["task_id"]
    assert int(first["task_id"], 16) >= 0


@pytest.mark.slow_on_ray
def test_an_actor_knows_its_id(engine):
    one, other = Who.remote(), Who.remote()
    first, second = miniray.get([one.ids.remote(), other.ids.remote()])
    assert first["actor_id"] is not None
    assert first["actor_id"] != second["actor_id"]
    assert first["actor_id"] in repr(one)


def test_an_actors_id_is_the_same_in_every_call_and_in_init(engine):
    who = Who.remote()
    first, second = miniray.get([who.ids.remote(), who.ids.remote()])
    assert first["actor_id"] == second["actor_id"] == miniray.get(who.id_in_init.remote())
    assert first["task_id"] != second["task_id"]


@pytest.mark.slow_on_ray
def test_an_actor_knows_its_name(engine, unique):
    named = Who.options(name=unique).remote()
    assert miniray.get(named.ids.remote())["actor_name"] == unique
    assert miniray.get(Who.remote().ids.remote())["actor_name"] is None


@pytest.mark.slow_on_ray
def test_actors_have_workers_of_their_own(engine):
    one, other = Who.remote(), Who.remote()
    workers = {ids["worker_id"] for ids in miniray.get([one.ids.remote(), other.ids.remote()])}
    workers.add(miniray.get_runtime_context().get_worker_id())
    assert len(workers) == 3


@pytest.mark.slow_on_ray
def test_all_are_of_one_job_and_namespace(engine):
    here = miniray.get_runtime_context()
    there = miniray.get(Who.remote().ids.remote())
    assert there["job_id"] == here.get_job_id()
    assert there["namespace"] == here.namespace


@pytest.mark.slow_on_ray
def test_a_task_started_by_an_actor_is_not_the_actor(engine):
    assert miniray.get(Who.remote().nested.remote())["actor_id"] is None


@pytest.mark.slow_on_ray
def test_a_new_actor_was_not_reconstructed(engine):
    assert miniray.get(Who.remote().ids.remote())["reconstructed"] is False


def test_remote_code_does_not_end_the_session(engine):
    """It is the driver's, however often a worker says shutdown or leaves a ``with``."""

    @miniray.remote
    class Helpful:
        def tidy_up(self):
            with miniray.init(ignore_reinit_error=True):
                pass
            miniray.shutdown()
            return miniray.is_initialized()

    @miniray.remote
    def tidy_up():
        miniray.shutdown()
        return miniray.get(miniray.put("still there"))

    helpful = Helpful.remote()
    assert miniray.get([helpful.tidy_up.remote() for _ in range(2)]) == [True, True]
    assert miniray.get(tidy_up.remote()) == "still there"


def test_an_actor_can_give_away_a_handle_to_itself(engine):
    who = Who.remote()
    copy = miniray.get(who.myself.remote())
    assert copy == who
    miniray.get(copy.name_me.remote("x"))
    assert miniray.get(who.tell.remote()) == "x"


def test_nodes_describe_this_machine(engine):
    (node,) = miniray.nodes()
    assert node["Alive"]
    assert node["Resources"]["CPU"] == 8
    assert node["NodeManagerHostname"] == socket.gethostname()


@pytest.mark.slow_on_ray
def test_everything_runs_on_a_node_of_the_session(engine):
    ids = {node["NodeID"] for node in miniray.nodes()}
    assert miniray.get_runtime_context().get_node_id() in ids
    assert miniray.get(Who.remote().ids.remote())["node_id"] in ids
    assert miniray.get(ids_of_task.remote())["node_id"] in ids
