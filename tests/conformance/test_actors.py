"""Actors: objects that live somewhere else."""

import os
import threading

import pytest

import miniray
from tests.conformance.helpers import Gate, needs


class PlainCounter:
    """Counts."""

    step = 1

    def __init__(self, start=0, *, scale=1):
        self.value = start
        self.scale = scale

    def add(self, amount=None):
        self.value += self.step if amount is None else amount
        return self.value * self.scale

    def read(self):
        return self.value * self.scale

    def items(self):
        self.kept = [1, 2]
        return self.kept

    def kept_items(self):
        return self.kept

    @miniray.method(num_returns=2)
    def halves(self):
        return self.value / 2, self.value / 2

    @staticmethod
    def twice(x):
        return 2 * x

    @classmethod
    def class_step(cls):
        return cls.step

    def _hidden(self):
        return "hidden"

    def __call__(self, x):
        return self.value + x

    def pid(self):
        return os.getpid()


class PlainBigStep(PlainCounter):
    step = 10

    def __init__(self):
        super().__init__(start=5)


Counter = miniray.remote(PlainCounter)
BigStep = miniray.remote(PlainBigStep)


@miniray.remote
class Bare:
    def ping(self):
        return "pong"


def test_state_is_kept_between_calls(engine):
    counter = Counter.remote()
    assert miniray.get([counter.add.remote() for _ in range(3)]) == [1, 2, 3]


def test_constructor_arguments(engine):
    counter = Counter.remote(5, scale=2)
    assert miniray.get(counter.read.remote()) == 10


def test_a_ref_as_constructor_argument_is_its_value(engine):
    counter = Counter.remote(miniray.put(6))
    assert miniray.get(counter.read.remote()) == 6


@pytest.mark.slow_on_ray
def test_a_class_without_init(engine):
    assert miniray.get(Bare.remote().ping.remote()) == "pong"


@pytest.mark.slow_on_ray
def test_actors_of_one_class_are_independent(engine):
    one, other = Counter.remote(0), Counter.remote(100)
    miniray.get(one.add.remote(1))
    assert miniray.get([one.read.remote(), other.read.remote()]) == [1, 100]


@pytest.mark.slow_on_ray
def test_method_arguments_by_name(engine):
    assert miniray.get(Counter.remote(1).add.remote(amount=4)) == 5


def test_method_with_declared_returns(engine):
    refs = Counter.remote(8).halves.remote()
    assert miniray.get(refs) == [4, 4]


def test_method_options_override_the_declared_returns(engine):
    ref = Counter.remote(8).halves.options(num_returns=1).remote()
    assert miniray.get(ref) == (4, 4)


@pytest.mark.slow_on_ray
def test_a_method_without_returns_still_runs(engine):
    counter = Counter.remote()
    assert counter.add.options(num_returns=0).remote() is None
    assert miniray.get(counter.read.remote()) == 1


@pytest.mark.slow_on_ray
def test_inherited_methods_and_attributes(engine):
    actor = BigStep.remote()
    assert miniray.get([actor.add.remote(), actor.read.remote()]) == [15, 15]


@pytest.mark.slow_on_ray
def test_static_and_class_methods(engine):
    actor = BigStep.remote()
    assert miniray.get([actor.twice.remote(4), actor.class_step.remote()]) == [8, 10]


@pytest.mark.slow_on_ray
def test_methods_with_a_leading_underscore(engine):
    assert miniray.get(Bare.remote().ping.remote()) == "pong"
    assert miniray.get(Counter.remote()._hidden.remote()) == "hidden"


@pytest.mark.slow_on_ray
def test_a_callable_object(engine):
    assert miniray.get(Counter.remote(3).__call__.remote(4)) == 7


@pytest.mark.slow_on_ray
def test_a_bound_remote_method_can_be_kept(engine):
    add = Counter.remote(1).add  # the handle itself is gone
    assert miniray.get([add.remote(), add.remote()]) == [2, 3]


@pytest.mark.slow_on_ray
def test_what_an_actor_returns_is_a_copy(engine):
    counter = Counter.remote()
    items = miniray.get(counter.items.remote())
    items.append(3)
    assert miniray.get(counter.kept_items.remote()) == [1, 2]


def test_handles_are_equal_when_the_actor_is_the_same(engine, unique):
    counter = Counter.options(name=unique).remote()
    same, other = miniray.get_actor(unique), Counter.remote()
    assert same == counter
    assert hash(same) == hash(counter)
    assert other != counter


def test_a_handle_says_what_it_is(engine):
    counter = Counter.remote()
    assert "PlainCounter" in repr(counter)
    assert {"add", "read"} <= set(dir(counter))


@pytest.mark.slow_on_ray
def test_an_actor_class_defined_in_a_function(engine):
    bonus = 7

    @miniray.remote
    class Local:
        def read(self):
            return bonus

    assert miniray.get(Local.remote().read.remote()) == 7


@pytest.mark.slow_on_ray
def test_many_actors_without_a_request_fit_on_few_cpus(engine):
    actors = [Bare.remote() for _ in range(12)]  # the session has 8 CPUs
    assert miniray.get([actor.ping.remote() for actor in actors]) == ["pong"] * 12


@pytest.mark.slow_on_ray
def test_an_actor_has_its_own_process(engine):
    needs(engine, "processes")
    one, other = Counter.remote(), Counter.remote()
    first = miniray.get([one.pid.remote(), one.pid.remote(), other.pid.remote()])
    assert first[0] == first[1]
    assert len({os.getpid(), first[0], first[2]}) == 3


@pytest.mark.slow_on_ray
def test_actors_work_at_the_same_time(engine, tmp_path):
    needs(engine, "concurrent")

    @miniray.remote
    class Meeting:
        def meet(self, mine, other):
            mine.open()
            other.wait()
            return True

    gates = Gate(tmp_path, "a"), Gate(tmp_path, "b")
    one, other = Meeting.remote(), Meeting.remote()
    refs = [one.meet.remote(*gates), other.meet.remote(*gates[::-1])]
    assert miniray.get(refs) == [True, True]


@pytest.mark.slow_on_ray
def test_calls_to_one_actor_do_not_overlap(engine):
    @miniray.remote
    class Exclusive:
        def __init__(self):
            self.inside = 0

        def enter(self):
            self.inside += 1
            seen = self.inside
            threading.Event().wait(0.002)  # gives another call the chance to get in
            self.inside -= 1
            return seen

    actor = Exclusive.remote()
    assert miniray.get([actor.enter.remote() for _ in range(20)]) == [1] * 20


def test_options_leave_the_class_alone(engine, unique):
    named = Counter.options(name=unique)
    assert named is not Counter
    first, second = Counter.remote(), Counter.remote()  # would clash had the name stuck
    assert first != second


def test_the_plain_class_is_at_hand(engine):
    assert Counter.__wrapped__ is PlainCounter
    assert Counter.__doc__ == "Counts."


def test_an_actor_class_is_not_called_directly(engine):
    with pytest.raises(TypeError, match=r"PlainCounter\.remote"):
        Counter()


def test_an_actor_class_is_not_inherited_from(engine):
    with pytest.raises(TypeError, match="inherit"):

        class Derived(Counter):
            pass


def test_an_actor_method_is_not_called_directly(engine):
    counter = Counter.remote()
    with pytest.raises(TypeError, match=r"add\.remote"):
        counter.add(1)
