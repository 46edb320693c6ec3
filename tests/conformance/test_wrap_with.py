"""``ActorClass.wrap_with``: the actor holds a wrapper, and handles behave like the user's class."""

import copy
import os

import cloudpickle
import pytest

import miniray
from miniray.core import startup
from miniray.core.remote import ActorClass
from miniray.errors import ActorDiedError, NotSerializableError, TaskError
from tests.conformance.helpers import eventually, needs

pytestmark = pytest.mark.usefixtures("engine")


@miniray.remote
class Worker:
    """Trains."""

    def __init__(self, start=0, *, fail=False):
        if fail:
            raise ValueError("bad start")
        self.value = start

    def __call__(self, n):
        return self.value * n

    def __repr__(self):
        return f"worker at {self.value}"

    def add(self, n=1):
        self.value += n
        return self.value

    def fail(self):
        raise KeyError("lost")

    def fail_inside(self):
        self.fail()

    def user(self):
        return "a method, though the wrapper has an attribute of that name"

    def evaluate(self):
        return "user"

    def count_up(self, n):
        yield from range(n)

    @miniray.method(num_returns=2)
    def both(self):
        return self.value, self.value + 1

    def _private(self):
        return "private"


class Wrapper:
    """Has methods of its own beside those of the user's object."""

    def __init__(self, user):
        self.user = user
        self.calls = 0

    def run(self, method, *args):
        self.calls += 1
        return getattr(self.user, method)(*args), self.calls

    def evaluate(self, rows):
        return "wrapper", rows, self.user.evaluate()

    @miniray.method(num_returns=2)
    def split(self):
        return self.calls, self.user.value

    @staticmethod
    def double(n):
        return 2 * n


@pytest.fixture
def wrapped():
    return Worker.wrap_with(Wrapper)


def test_methods_of_both_are_callable(wrapped):
    handle = wrapped.remote(3)
    assert miniray.get(handle.add.remote(n=2)) == 5
    assert miniray.get(handle.run.remote("add", 1)) == (6, 1)
    assert miniray.get(handle.user.remote()).startswith("a method")
    assert miniray.get(handle._private.remote()) == "private"
    assert miniray.get(handle.__call__.remote(2)) == 12
    assert miniray.get(handle.both.remote()) == [6, 7]
    assert miniray.get(handle.split.remote()) == [1, 6]
    assert miniray.get(handle.double.remote(4)) == 8
    assert [miniray.get(ref) for ref in handle.count_up.remote(3)] == [0, 1, 2]


@pytest.mark.slow_on_ray
def test_wrapper_method_hides_the_users(wrapped):
    assert miniray.get(wrapped.remote().evaluate.remote(5)) == ("wrapper", 5, "user")
    assert miniray.get(Worker.remote().evaluate.remote()) == "user"


@pytest.mark.slow_on_ray
def test_signatures_are_checked_at_the_call(wrapped):
    with pytest.raises(TypeError):
        wrapped.remote(1, 2)
    handle = wrapped.remote()
    for method, args in ((handle.add, (1, 2)), (handle.run, ()), (handle.evaluate, ())):
        with pytest.raises(TypeError) as caught:
            method.remote(*args)
        assert not isinstance(caught.value, TaskError)


@pytest.mark.slow_on_ray
def test_unknown_method_lists_the_users_methods(wrapped):
    handle = wrapped.remote()
    with pytest.raises(AttributeError) as caught:
        handle.ad
    text = str(caught.value)
    assert text.endswith("add, both, count_up, evaluate, fail, fail_inside, user")
    assert "Worker" in text
    assert "add" in dir(handle)
    assert "run" not in dir(handle)


def test_errors_name_the_users_class_and_method(wrapped):
    """The innermost method if the wrapper called it, else the one that was called."""
    handle = wrapped.remote()
    for ref, function in (
        (handle.fail.remote(), "Worker.fail"),
        (handle.fail_inside.remote(), "Worker.fail_inside"),
        (handle.run.remote("fail"), "Worker.fail"),
        (handle.run.remote("fail_inside"), "Worker.fail"),
        (handle.run.remote("missing"), "Worker.run"),
    ):
        with pytest.raises((KeyError, AttributeError)) as caught:
            miniray.get(ref)
        assert caught.value.function == function
        if function != "Worker.run":
            assert 'raise KeyError("lost")' in str(caught.value)
    assert miniray.get(handle.add.remote()) == 1


@pytest.mark.slow_on_ray
def test_error_in_the_users_init_names_the_users_class(wrapped):
    with pytest.raises(ActorDiedError) as caught:
        miniray.get(wrapped.remote(fail=True).add.remote())
    assert caught.value.in_init
    assert 'raise ValueError("bad start")' in str(caught.value)


@pytest.mark.slow_on_ray
def test_error_in_the_wrappers_init_is_one_in_init():
    class Broken:
        def __init__(self, user):
            raise OSError(f"no port for {user!r}")

    with pytest.raises(ActorDiedError) as caught:
        miniray.get(Worker.wrap_with(Broken).remote(7).add.remote())
    assert caught.value.in_init
    assert "no port for worker at 7" in str(caught.value)


def test_names_and_options_are_the_users(wrapped, unique):
    assert isinstance(wrapped, ActorClass)
    assert (wrapped.__name__, wrapped.__doc__) == ("Worker", "Trains.")
    assert repr(wrapped) == repr(Worker)
    handle = wrapped.options(name=unique).remote(1)
    assert repr(handle).startswith("ActorHandle(Worker, ")
    named = miniray.get_actor(unique)
    assert named == handle
    assert miniray.get(named.run.remote("add", 1)) == (2, 1)


@pytest.mark.slow_on_ray
def test_options_before_wrapping_stay(unique):
    handle = Worker.options(name=unique).wrap_with(Wrapper).remote(1)
    assert miniray.get_actor(unique) == handle


def test_handles_travel(wrapped):
    handle = wrapped.remote(1)

    @miniray.remote
    def use(held):
        other = copy.copy(held["worker"])
        found = miniray.get([other.add.remote(2), other.run.remote("add", 3)])
        return found, miniray.get(other.evaluate.remote(1))[0], hasattr(other, "missing")

    found = miniray.get(use.remote({"worker": handle}))
    assert found == ([3, (6, 1)], "wrapper", False)


@pytest.mark.slow_on_ray
def test_wrapped_class_travels(wrapped):
    @miniray.remote
    def create(actor_class):
        return miniray.get(actor_class.remote(4).run.remote("add", 1))

    assert miniray.get(create.remote(wrapped)) == (5, 1)
    restored = cloudpickle.loads(cloudpickle.dumps(wrapped))
    assert miniray.get(restored.remote(4).run.remote("add", 1)) == (5, 1)


@pytest.mark.slow_on_ray
def test_restarted_actor_has_a_new_wrapper(wrapped, engine):
    handle = wrapped.options(max_restarts=1).remote(5)
    assert miniray.get([handle.run.remote("add", 1) for _ in range(2)]) == [(6, 1), (7, 2)]
    miniray.kill(handle, no_restart=False)

    def is_new():
        try:
            return miniray.get(handle.split.remote()) == [0, 5]
        except ActorDiedError:  # on Ray, calls fail until it has restarted
            return False

    eventually(is_new)


@pytest.mark.slow_on_ray
def test_async_methods_make_an_async_actor(engine):
    needs(engine, "concurrent")

    class Async:
        def __init__(self, user):
            import asyncio

            self.opened = asyncio.Event()

        async def wait(self):
            await self.opened.wait()
            return "through"

        async def open(self):
            self.opened.set()

    handle = Worker.wrap_with(Async).remote()
    waiting = handle.wait.remote()
    handle.open.remote()
    assert miniray.get([waiting, handle.add.remote()]) == ["through", 1]


@pytest.mark.slow_on_ray
def test_actor_subclass_can_be_wrapped():
    class Typed(miniray.Actor):
        @miniray.method
        def pid(self):
            return os.getpid()

    handle = Typed.options().wrap_with(Wrapper).remote()
    assert miniray.get(handle.run.remote("pid"))[0] == miniray.get(handle.pid.remote())
    with pytest.raises(AttributeError):
        handle.remote


class Binder(Wrapper):
    """Binds a value before ``__init__``, and takes any arguments for a method of the user's."""

    @staticmethod
    def __before_init__(user):
        user.bound = "before"

    def scale(self, *args, **kwargs):
        return self.user.scale(*args, **kwargs)


class Bound:
    def __init__(self, value=0):
        self.value = value
        self.seen = self.bound

    def scale(self, n, *, plus=0):
        return self.seen, n * self.value + plus


def test_context_wraps_and_binds_before_init():
    with startup.actors_with(wrapper=Binder):
        handle = miniray.remote(Bound).remote(3)
        typed = Worker.wrap_with(Wrapper).remote()  # keeps its own
    assert miniray.get(handle.scale.remote(2, plus=1)) == ("before", 7)
    assert miniray.get(typed.evaluate.remote(1)) == ("wrapper", 1, "user")


@pytest.mark.slow_on_ray
def test_variadic_wrapper_method_has_the_users_signature():
    handle = miniray.remote(Bound).wrap_with(Binder).remote()
    with pytest.raises(TypeError) as caught:
        handle.scale.remote(2, minus=1)
    assert not isinstance(caught.value, TaskError)


def test_invalid_wrapper_raises_type_error(wrapped):
    for wrapper in (Wrapper(None), len, None):
        with pytest.raises(TypeError):
            Worker.wrap_with(wrapper)
    with pytest.raises(TypeError):
        wrapped.wrap_with(Wrapper)


def test_unpicklable_class_names_the_attribute(engine):
    needs(engine, "processes")

    class Holder:
        items = (i for i in range(3))

    for actor_class in (miniray.remote(Holder), miniray.remote(Holder).wrap_with(Wrapper)):
        with pytest.raises(NotSerializableError) as caught:
            actor_class.remote()
        assert caught.value.path.endswith(f"{Holder.__qualname__}.items")
