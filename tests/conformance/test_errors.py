"""Errors of user code: caught by their own type, with their attributes and the remote traceback."""

import json
import os
import pickle
import threading

import pytest

import miniray
from miniray.errors import MinirayError, NotSerializableError, TaskError
from tests.conformance.helpers import Gate, needs


class ShopError(Exception):
    def __init__(self, message, code):
        super().__init__(message, code)
        self.code = code
        self.note = "attached"


class Narrow(ShopError):
    pass


class Stubborn(Exception):
    """Python's own way cannot unpickle it: its constructor wants more than it passes on."""

    def __init__(self, first, *, second):
        super().__init__(f"{first} and {second}")
        self.second = second


class Locked(Exception):
    """Holds something that cannot travel, and something that can."""

    def __init__(self):
        super().__init__("holds a lock")
        self.lock = threading.Lock()
        self.code = 7


class Unpicklable(Exception):
    def __reduce__(self):
        raise ValueError("not me")


@miniray.remote
def fail(kind, *args, **kwargs):
    raise kind(*args, **kwargs)


@miniray.remote
def divide(a, b):
    return a / b


@miniray.remote
def identity(value):
    return value


@miniray.remote
class Shop:
    def __init__(self, supplier=None):
        self.supplier = supplier
        self.calls = 0

    def buy(self, code):
        self.calls += 1
        if self.supplier is not None:
            return miniray.get(self.supplier.buy.remote(code))
        raise ShopError("sold out", code)

    def count(self):
        return self.calls

    def same(self, value):
        return value


def test_the_users_exception_type_is_caught(engine):
    with pytest.raises(ZeroDivisionError):
        miniray.get(divide.remote(1, 0))


def test_it_is_a_task_error_too(engine):
    with pytest.raises(TaskError) as caught:
        miniray.get(divide.remote(1, 0))
    assert isinstance(caught.value, ZeroDivisionError)
    assert isinstance(caught.value, MinirayError)


def test_a_base_class_of_it_is_caught(engine):
    with pytest.raises(ShopError):
        miniray.get(fail.remote(Narrow, "x", 1))


def test_another_type_is_not_caught(engine):
    with pytest.raises(TaskError) as caught:
        miniray.get(fail.remote(KeyError, "x"))
    assert not isinstance(caught.value, ValueError)


def test_attributes_and_arguments_are_kept(engine):
    with pytest.raises(ShopError) as caught:
        miniray.get(fail.remote(ShopError, "closed", 17))
    assert caught.value.code == 17
    assert caught.value.note == "attached"
    assert caught.value.args == ("closed", 17)


def test_the_original_is_the_cause(engine):
    with pytest.raises(ShopError) as caught:
        miniray.get(fail.remote(ShopError, "closed", 17))
    assert type(caught.value.cause) is ShopError
    assert caught.value.cause.code == 17


def test_state_of_builtin_exceptions_is_kept(engine):
    with pytest.raises(FileNotFoundError) as caught:
        miniray.get(miniray.remote(open).remote("/nonexistent/file"))
    assert caught.value.errno == 2
    assert caught.value.filename == "/nonexistent/file"


def test_an_exception_of_a_library(engine):
    with pytest.raises(json.JSONDecodeError) as caught:
        miniray.get(miniray.remote(json.loads).remote("{"))
    assert caught.value.pos == 1


def test_the_text_shows_the_remote_traceback(engine):
    with pytest.raises(ZeroDivisionError) as caught:
        miniray.get(divide.remote(1, 0))
    text = str(caught.value)
    assert "divide" in text
    assert "ZeroDivisionError: division by zero" in text
    assert os.path.basename(__file__) in text
    assert "return a / b" in text


def test_the_text_names_the_actor_and_its_process(engine, unique):
    shop = Shop.options(name=unique).remote()
    with pytest.raises(ShopError) as caught:
        miniray.get(shop.buy.remote(1))
    assert "Shop.buy" in caught.value.function
    assert unique in str(caught.value)
    assert f"pid {caught.value.pid}" in str(caught.value)


def test_the_pid_is_the_workers(engine):
    needs(engine, "processes")
    with pytest.raises(ZeroDivisionError) as caught:
        miniray.get(divide.remote(1, 0))
    assert caught.value.pid not in (0, os.getpid())


def test_every_get_raises_again(engine):
    ref = divide.remote(1, 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            miniray.get(ref)


def test_an_exception_returned_is_a_value(engine):
    value = miniray.get(identity.remote(ValueError("just a value")))
    assert isinstance(value, ValueError)
    assert not isinstance(value, TaskError)


def test_get_of_a_list_raises_the_first_error_in_it(engine):
    refs = [identity.remote(1), fail.remote(KeyError, "k"), fail.remote(IndexError, "i")]
    miniray.wait(refs, num_returns=3)  # get does not wait for the others once one has failed
    with pytest.raises(KeyError):
        miniray.get(refs)


@pytest.mark.slow_on_ray
def test_a_failed_call_leaves_the_actor_alive(engine):
    shop = Shop.remote()
    with pytest.raises(ShopError):
        miniray.get(shop.buy.remote(1))
    assert miniray.get(shop.count.remote()) == 1


def test_an_error_as_argument_fails_the_call(engine):
    with pytest.raises(ZeroDivisionError):
        miniray.get(identity.remote(divide.remote(1, 0)))


def test_an_error_as_argument_keeps_the_method_from_running(engine):
    shop = Shop.remote()
    with pytest.raises(ZeroDivisionError):
        miniray.get(shop.buy.remote(divide.remote(1, 0)))
    assert miniray.get(shop.count.remote()) == 0


def test_an_error_passes_through_an_actor_in_between(engine):
    shop = Shop.remote(Shop.remote())
    with pytest.raises(ShopError) as caught:
        miniray.get(shop.buy.remote(5))
    assert caught.value.code == 5
    assert "sold out" in str(caught.value)


@pytest.mark.slow_on_ray
def test_an_error_passes_through_a_chain_of_actors(engine):
    shop = Shop.remote(Shop.remote(Shop.remote(Shop.remote())))
    with pytest.raises(ShopError) as caught:
        miniray.get(shop.buy.remote(6))
    assert caught.value.code == 6


@pytest.mark.slow_on_ray
@pytest.mark.parametrize("actors", [0, 1, 2])
def test_an_error_passes_through_a_long_chain_of_calls(engine, tmp_path, actors):
    gate = Gate(tmp_path)

    @miniray.remote
    def fail_later():
        gate.wait()
        raise ShopError("closed", 5)

    if not engine.capabilities.concurrent:
        gate.open()
    calls = [Shop.remote().same for _ in range(actors)] or [identity]
    ref = fail_later.remote()
    for i in range(400):
        ref = calls[i % len(calls)].remote(ref)
    gate.open()
    with pytest.raises(ShopError) as caught:
        miniray.get(ref)
    assert caught.value.code == 5
    assert miniray.get(identity.remote(1)) == 1


@pytest.mark.slow_on_ray
def test_remote_code_can_catch_what_remote_code_raised(engine):
    @miniray.remote
    def careful():
        try:
            return miniray.get(divide.remote(1, 0))
        except ZeroDivisionError:
            return "caught"

    assert miniray.get(careful.remote()) == "caught"


def test_a_chained_exception_shows_both(engine):
    @miniray.remote
    def translate():
        try:
            {}["missing"]
        except KeyError as error:
            raise RuntimeError("no such entry") from error

    with pytest.raises(RuntimeError) as caught:
        miniray.get(translate.remote())
    assert "KeyError: 'missing'" in str(caught.value)


def test_an_exception_arrives_whatever_its_constructor_takes(engine):
    with pytest.raises(Stubborn) as caught:
        miniray.get(fail.remote(Stubborn, "one", second="two"))
    assert caught.value.args == ("one and two",)
    assert caught.value.second == caught.value.cause.second == "two"


def test_it_arrives_so_through_an_actor_in_between_and_plain_pickle(engine):
    @miniray.remote
    def between():
        miniray.get(fail.remote(Stubborn, "one", second="two"))

    with pytest.raises(Stubborn) as caught:
        miniray.get(between.remote())
    again = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(again, Stubborn)
    assert again.second == "two"


def test_attributes_that_cannot_travel_are_left_out(engine):
    with pytest.raises(Locked, match="holds a lock") as caught:
        miniray.get(fail.remote(Locked))
    assert caught.value.code == 7
    assert not hasattr(caught.value, "lock")


def test_an_exception_that_cannot_travel_is_told_in_text(engine):
    with pytest.raises(TaskError, match="Unpicklable: because") as caught:
        miniray.get(fail.remote(Unpicklable, "because"))
    assert caught.value.cause is None


def test_an_exception_defined_in_a_function(engine):
    class Private(Exception):
        pass

    with pytest.raises(Private, match="secret"):
        miniray.get(fail.remote(Private, "secret"))


def test_all_returns_of_a_failed_call_fail(engine):
    for ref in divide.options(num_returns=2).remote(1, 0):
        with pytest.raises(ZeroDivisionError):
            miniray.get(ref)


def test_an_error_survives_plain_pickle(engine):
    with pytest.raises(ZeroDivisionError) as caught:
        miniray.get(divide.remote(1, 0))
    copy = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(copy, ZeroDivisionError)
    assert str(copy) == str(caught.value)


def test_what_a_task_raises_of_ours_keeps_its_type(engine):
    @miniray.remote
    def refuse():
        raise miniray.errors.ObjectLostError("gone")

    with pytest.raises(miniray.errors.ObjectLostError, match="gone"):
        miniray.get(refuse.remote())


def test_an_unpicklable_result_is_the_calls_error(engine):
    @miniray.remote
    def make_lock():
        return {"lock": threading.Lock()}

    with pytest.raises((TaskError, NotSerializableError), match="lock"):
        miniray.get(make_lock.remote())
