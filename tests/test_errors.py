"""The error hierarchy: what catches what, what survives the trip between processes."""

import copy
import pickle

import cloudpickle
import pytest

from miniray import errors
from miniray.errors import MinirayError, TaskError


class CustomError(Exception):
    def __init__(self, message, code):
        super().__init__(message)
        self.code = code

    def __reduce__(self):
        return CustomError, (self.args[0], self.code)


class GeneratorError(Exception):
    def __init__(self, message, *, code):
        super().__init__(message)
        self.code = code
        self.generator = (i for i in ())


class UnpicklableError(Exception):
    def __reduce__(self):
        raise TypeError("not me")


class SlotsError(Exception):
    __slots__ = ("code",)

    def __init__(self, code):
        self.code = code


class FinalStrError(Exception):
    def __str__(self):
        raise RuntimeError("an exception whose text cannot be had")


def caught(error, function="Worker.step", worker="Worker", pid=123):
    """``error`` raised, captured and looked at on the other side."""
    try:
        raise error
    except type(error) as seen:
        captured = TaskError.capture(seen, function, worker, pid)
    return pickle.loads(pickle.dumps(captured))


@pytest.mark.parametrize(
    ("name", "also"),
    [
        ("EngineStartError", RuntimeError),
        ("CapabilityError", NotImplementedError),
        ("NotSerializableError", TypeError),
        ("GetTimeoutError", TimeoutError),
        ("ObjectStoreFullError", MemoryError),
    ],
)
def test_errors_with_a_counterpart_are_caught_as_it(name, also):
    with pytest.raises(also):
        raise getattr(errors, name)("message")


def test_every_error_has_one_base():
    for name in errors.__all__:
        assert issubclass(getattr(errors, name), MinirayError), name


def test_a_task_error_is_also_the_users_type():
    error = caught(ValueError("bad input"))
    assert isinstance(error, TaskError)
    assert isinstance(error, ValueError)
    assert error.args == ("bad input",)


def test_its_text_says_where_and_shows_the_remote_traceback():
    text = str(caught(ValueError("bad input"), "Worker.step", "Worker(rank=3)", 4567))
    assert text.startswith("Worker.step failed in Worker(rank=3) (pid 4567)")
    assert "Traceback (most recent call last)" in text
    assert "raise error" in text
    error, place = text.splitlines()[-2:]
    assert error == "ValueError: bad input"
    assert place.startswith(f'Worker(rank=3) (pid 4567): File "{__file__}", line ')


def test_attributes_of_the_original_are_reachable():
    error = caught(CustomError("quota", 42))
    assert isinstance(error, CustomError)
    assert error.code == 42
    assert isinstance(error.cause, CustomError)


def test_os_errors_keep_their_number():
    error = caught(FileNotFoundError(2, "No such file", "x.txt"))
    assert isinstance(error, FileNotFoundError)
    assert (error.errno, error.filename) == (2, "x.txt")


def test_the_fields_survive_a_second_trip():
    once = caught(KeyError("k"))
    twice = pickle.loads(pickle.dumps(once))
    assert isinstance(twice, KeyError)
    assert str(twice) == str(once)
    assert (twice.function, twice.actor, twice.pid) == ("Worker.step", "Worker", 123)


def test_attributes_that_cannot_be_pickled_are_left_out():
    error = caught(GeneratorError("the message", code=7))
    assert isinstance(error, GeneratorError)
    assert isinstance(error.cause, GeneratorError)
    assert error.code == error.cause.code == 7
    assert not hasattr(error, "generator")
    assert error.args == ("the message",)


def test_arguments_that_cannot_be_pickled_are_told():
    error = caught(ValueError("bad", (i for i in ())))
    assert isinstance(error, ValueError)
    assert error.args[0] == "bad"
    assert error.args[1].startswith("<generator object")


def test_attributes_in_slots_arrive():
    error = caught(SlotsError(5))
    assert isinstance(error, SlotsError)
    assert error.code == error.cause.code == 5


def test_a_copy_is_the_same_error():
    error = copy.copy(caught(GeneratorError("the message", code=7)))
    assert isinstance(error, GeneratorError)
    assert error.cause.code == 7


def test_an_error_that_cannot_be_pickled_keeps_its_text():
    error = caught(UnpicklableError("the message"))
    assert error.cause is None
    assert type(error) is TaskError
    assert "UnpicklableError: the message" in str(error)


def test_an_error_through_two_actors_is_still_the_users_type():
    inner = caught(ValueError("deep"), "Server.sync", "Server", 1)
    outer = caught(inner, "Worker.step", "Worker", 2)
    assert isinstance(outer, ValueError)
    assert (outer.function, outer.pid) == ("Worker.step", 2)
    assert "Server.sync failed in Server (pid 1)" in str(outer)


def test_errors_of_our_own_keep_their_type_at_the_cause():
    error = caught(errors.GetTimeoutError("too slow"))
    assert isinstance(error, TaskError)
    assert isinstance(error.cause, errors.GetTimeoutError)


def test_an_exception_without_a_text_is_reported_all_the_same():
    error = caught(FinalStrError())
    assert isinstance(error, FinalStrError)
    assert "FinalStrError" in str(error)


@pytest.mark.parametrize(
    "error_type", [KeyboardInterrupt, SystemExit, StopIteration, UnicodeError, MemoryError]
)
def test_builtin_types_can_be_combined(error_type):
    assert isinstance(caught(error_type("x")), error_type)


def test_catching_the_base_type_works_across_the_trip():
    with pytest.raises(LookupError):
        raise caught(IndexError("i"))


@pytest.mark.parametrize("cls", [errors.ActorDiedError, errors.DataError, errors.WorkerLostError])
def test_fields_survive_pickling_and_default_to_none(cls: type[errors.MinirayError]):
    error = cls("text", rank=2, exit_code=7, in_init=False)
    received = pickle.loads(pickle.dumps(error))
    assert (received.rank, received.exit_code, received.in_init) == (2, 7, False)
    assert (received.worker, received.host, received.epoch, received.signal) == (
        None,
        None,
        None,
        None,
    )
    with pytest.raises(TypeError, match="rnak"):
        cls("text", rnak=2)


def test_code_is_derived_from_the_class():
    assert errors.ActorDiedError("text").code == "actor-died"
    assert errors.WorkerLostError("text").code == "worker-lost"
    assert errors.TaskError("f", "actor", 1, "").code == "task"


def test_fields_of_the_original_exception_win():
    class HttpError(Exception):
        code = 404

    error = errors.TaskError("f", "actor", 1, "", HttpError("no")).as_cause_type()
    assert error.code == 404
    error.add_fields(worker=3, epoch=1)
    received = pickle.loads(cloudpickle.dumps(error))
    assert (received.worker, received.epoch, received.step) == (3, 1, None)
