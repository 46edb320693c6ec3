"""``miniray.Actor``: actors without a decorator, for type checkers; handles like any other."""

import pickle

import cloudpickle
import pytest

import miniray
from miniray.core.remote import ActorClass, ActorHandle

pytestmark = pytest.mark.usefixtures("engine")


class Counter(miniray.Actor):
    """Counts."""

    def __init__(self, start=0):
        self.value = start

    @miniray.method
    def add(self, n):
        self.value += n
        return self.value

    @miniray.method(num_returns=2)
    def both(self):
        return self.add(1), self.add(1)

    def unmarked(self):
        return self.add(10)


class Doubler(Counter):
    @miniray.method
    def add(self, n):
        return 2 * super().add(n)


@miniray.remote
def ask(handle):
    return miniray.get(handle.add.remote(5))


@pytest.mark.slow_on_ray
def test_it_needs_no_decorator():
    counter = Counter.remote(1)
    assert isinstance(counter, ActorHandle)
    assert miniray.get(counter.add.remote(2)) == 3
    assert miniray.get(counter.both.remote()) == [4, 5]
    assert miniray.get(counter.unmarked.remote()) == 15
    assert miniray.get(ask.remote(counter)) == 20


def test_options_and_names():
    counter = Counter.options(name="typed").remote(7)
    assert miniray.get_actor("typed") == counter
    assert miniray.get(miniray.get_actor("typed").add.remote(0)) == 7
    with pytest.raises(ValueError, match="'cpus'"):
        Counter.options(cpus=1)


@pytest.mark.slow_on_ray
def test_a_class_derived_from_it_is_its_own():
    assert miniray.get(Doubler.remote(1).add.remote(2)) == 6
    assert miniray.get(Counter.remote(1).add.remote(2)) == 3


@pytest.mark.slow_on_ray
def test_a_decorator_makes_it_an_actor_class():
    decorated = miniray.remote(max_restarts=1)(Counter)
    assert isinstance(decorated, ActorClass)
    assert miniray.get(decorated.remote(1).add.remote(1)) == 2


def test_what_starts_it_is_no_method_of_it():
    counter = Counter.remote()
    for name in ("remote", "options"):
        with pytest.raises(AttributeError, match=f"'{name}'.*add, both"):
            getattr(counter, name)


def test_an_ordinary_object_is_one():
    counter = Counter(1)
    assert counter.add(1) == 2
    assert counter.both() == (3, 4)
    assert pickle.loads(cloudpickle.dumps(Counter))(5).add(1) == 6


def test_wrong_arguments_are_refused_before_anything_starts():
    with pytest.raises(TypeError, match="Counter"):
        Counter.remote(1, 2)


@pytest.mark.slow_on_ray
def test_method_says_how_it_is_used():
    for wrong in (lambda: miniray.method(), lambda: miniray.method(1), lambda: miniray.method(x=1)):
        with pytest.raises((TypeError, ValueError)):
            wrong()
