"""Fields of Ray's errors, without a running Ray."""

import pytest

from miniray.errors import ActorDiedError


@pytest.fixture(scope="module")
def exceptions():
    return pytest.importorskip("ray").exceptions


@pytest.fixture(scope="module")
def translate(exceptions):
    from miniray.core.ray.refs import translate

    return translate


def create_death(exceptions, message, pid=4711):
    """Return the error that Ray raises for an actor that ended."""
    from ray.core.generated.common_pb2 import ActorDiedErrorContext

    context = ActorDiedErrorContext(
        actor_id=bytes(16),
        class_name="Trainer",
        pid=pid,
        name="pid: 1",
        node_ip_address="192.0.2.7" if pid else "",
        error_message=message,
    )
    return exceptions.ActorDiedError(context)


@pytest.mark.parametrize(
    ("message", "exit_code"),
    [
        ("Worker exits unexpectedly. Worker exits with an exit code 3.", 3),
        ("Worker unexpectedly exits with a connection error code 2. End of file.", None),
    ],
)
def test_death_has_the_fields_that_ray_knows(exceptions, translate, message, exit_code):
    error = translate(create_death(exceptions, message))
    assert type(error) is ActorDiedError
    assert (error.pid, error.host, error.exit_code) == (4711, "192.0.2.7", exit_code)
    assert (error.in_init, error.signal) == (False, None)


def test_actor_that_never_started_has_no_process(exceptions, translate):
    error = translate(create_death(exceptions, "The actor never ran.", pid=0))
    assert (error.pid, error.host, error.in_init) == (None, None, False)


def test_unavailable_actor_has_not_failed_in_init(exceptions, translate):
    error = translate(exceptions.ActorUnavailableError("no answer", bytes(16)))
    assert (type(error), error.in_init) == (ActorDiedError, False)


def test_arguments_that_failed_count_as_init(exceptions, translate):
    """No traceback of ``__init__`` is in the text, because it was never called."""
    ray_error = exceptions.RayActorError(
        "00" * 16,
        "The actor died because of an error raised in its creation task, ray::Trainer.__init__() "
        "(pid=12, ip=192.0.2.7, actor_id=00, repr=<T>)\n"
        "  At least one of the input arguments for this task could not be computed:\n"
        "ray.exceptions.RayTaskError: ray::load() (pid=13, ip=192.0.2.8)\n"
        "SystemError: Worker exits with an exit code 3",
        actor_init_failed=True,
    )
    error = translate(ray_error)
    assert (error.pid, error.host, error.in_init) == (12, "192.0.2.7", True)
    assert error.exit_code is None
