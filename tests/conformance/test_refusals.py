"""Mistakes that are refused at once, at the line that makes them, before anything runs."""

import threading

import pytest

import miniray
from miniray.errors import NotSerializableError
from tests.conformance.helpers import needs


@miniray.remote
def add(a, b):
    return a + b


@miniray.remote
class Greeter:
    def __init__(self, name):
        self.name = name

    def greet(self, greeting, *, loud=False):
        text = f"{greeting} {self.name}"
        return text.upper() if loud else text

    def part(self):
        return "bye"


class Outer:
    def __init__(self):
        self.config = {"handles": [1, threading.Lock()]}


def test_a_remote_function_is_not_called_directly(engine):
    with pytest.raises(TypeError, match=r"add\.remote"):
        add(1, 2)


@pytest.mark.parametrize(
    ("args", "kwargs"), [((1,), {}), ((1, 2, 3), {}), ((1, 2), {"c": 3}), ((1,), {"a": 2})]
)
def test_wrong_arguments_of_a_function(engine, args, kwargs):
    with pytest.raises(TypeError, match="add"):
        add.remote(*args, **kwargs)


def test_wrong_arguments_of_a_constructor(engine):
    with pytest.raises(TypeError, match="Greeter"):
        Greeter.remote()
    with pytest.raises(TypeError, match="Greeter"):
        Greeter.remote("a", "b")


def test_wrong_arguments_of_a_method(engine):
    greeter = Greeter.remote("Ann")
    with pytest.raises(TypeError, match="greet"):
        greeter.greet.remote()
    with pytest.raises(TypeError, match="greet"):
        greeter.greet.remote("hi", True)  # loud is keyword-only
    assert miniray.get(greeter.greet.remote("hi", loud=True)) == "HI ANN"


def test_an_unknown_method_names_those_there_are(engine):
    greeter = Greeter.remote("Ann")
    with pytest.raises(AttributeError, match=r"'meet'.*greet, part"):
        greeter.meet.remote()


def test_attributes_of_the_object_are_not_reachable(engine):
    greeter = Greeter.remote("Ann")
    with pytest.raises(AttributeError, match="name"):
        greeter.name


def test_an_unknown_option_names_those_there_are(engine):
    with pytest.raises(ValueError, match=r"'cpus'.*num_cpus"):
        add.options(cpus=1)
    with pytest.raises(ValueError, match="'num_returns'"):
        Greeter.options(num_returns=2)
    with pytest.raises(ValueError, match="max_retries"):
        miniray.method(max_retries=1)


@pytest.mark.parametrize(
    "bad",
    [
        {"num_cpus": -1},
        {"num_gpus": "all"},
        {"num_returns": -2},
        {"num_returns": "dynamic"},
        {"max_retries": -2},
        {"runtime_env": {"pip": ["x"]}},
        {"runtime_env": {"env_vars": {"A": 1}}},
    ],
    ids=str,
)
def test_a_bad_option_value_of_a_function(engine, bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        add.options(**bad)


@pytest.mark.parametrize(
    "bad",
    [
        {"max_restarts": 1.5},
        {"max_concurrency": 0},
        {"name": ""},
        {"lifetime": "forever"},
        {"lifetime": "detached"},
        {"get_if_exists": True},
    ],
    ids=str,
)
def test_a_bad_option_value_of_a_class(engine, bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Greeter.options(**bad)


def test_an_unpicklable_argument_is_refused_with_the_path_to_it(engine):
    with pytest.raises(NotSerializableError) as caught:
        add.remote(1, Outer())
    assert ".config['handles'][1]" in caught.value.path
    assert "[0][1]" not in caught.value.path  # the second of (args, kwargs): nobody's business
    assert "lock" in str(caught.value)


@pytest.mark.slow_on_ray
def test_an_unpicklable_argument_of_a_method(engine):
    greeter = Greeter.remote("Ann")
    with pytest.raises(NotSerializableError, match="'greeting'"):
        greeter.greet.remote(greeting={"key": threading.Lock()})
    assert miniray.get(greeter.greet.remote("hi")) == "hi Ann"


def test_an_unpicklable_argument_of_a_constructor(engine):
    with pytest.raises(NotSerializableError, match="lock"):
        Greeter.remote(threading.Lock())


def test_an_unpicklable_put(engine):
    with pytest.raises(NotSerializableError) as caught:
        miniray.put([1, {"x": threading.Lock()}])
    assert caught.value.path.endswith("[1]['x']")


def test_it_is_a_type_error(engine):
    with pytest.raises(TypeError):
        miniray.put(threading.Lock())


def test_what_a_pickled_object_raises_is_shown(engine):
    class Moody:
        def __reduce__(self):
            raise RuntimeError("not today")

    with pytest.raises(NotSerializableError, match="not today"):
        add.remote(1, [Moody()])


def test_a_function_that_captured_something_unpicklable(engine):
    needs(engine, "processes")  # code that stays in its process need not be pickled
    lock = threading.Lock()

    @miniray.remote
    def locked():
        return lock.locked()

    with pytest.raises(NotSerializableError, match="lock"):
        locked.remote()


def test_a_class_that_captured_something_unpicklable(engine):
    needs(engine, "processes")
    lock = threading.Lock()

    @miniray.remote
    class Locked:
        def locked(self):
            return lock.locked()

    with pytest.raises(NotSerializableError, match="lock"):
        Locked.remote()


def test_kill_and_cancel_refuse_each_others_arguments(engine):
    greeter = Greeter.remote("Ann")
    with pytest.raises(TypeError, match="cancel"):
        miniray.kill(greeter.part.remote())
    with pytest.raises(TypeError, match="ObjectRef"):
        miniray.cancel(greeter)


def test_remote_refuses_what_is_neither_function_nor_class(engine):
    with pytest.raises(TypeError, match="function or a class"):
        miniray.remote(3)
    with pytest.raises(TypeError, match="already"):
        miniray.remote(add)
