"""Handles and refs travel: in arguments, containers, results, puts and closures."""

import pytest

import miniray
from tests.conformance.helpers import eventually, exists


@miniray.remote
class Cell:
    def __init__(self, value=0):
        self.value = value

    def get(self):
        return self.value

    def set(self, value):
        self.value = value
        return value


def dead(cell):
    try:
        miniray.get(cell.get.remote())
    except miniray.errors.ActorDiedError:
        return True
    return False


@miniray.remote
class Keeper:
    """Holds whatever it is given."""

    def __init__(self, held=None):
        self.held = held

    def hold(self, held):
        self.held = held

    def give(self):
        return self.held

    def read(self):
        return miniray.get(self.held["cell"].get.remote())

    def drop(self):
        self.held = None

    def make(self, value):
        self.held = {"cell": Cell.remote(value)}
        return self.held["cell"]

    def end(self, cell):
        miniray.kill(cell)


@miniray.remote
class ParameterServer:
    def sync_from_workers(self, workers):
        values = miniray.get([worker.get.remote() for worker in workers])
        mean = sum(values) / len(values)
        miniray.get([worker.set.remote(mean) for worker in workers])
        return mean


@miniray.remote
def set_cell(cell, value):
    return miniray.get(cell.set.remote(value))


@miniray.remote
def read_nested(values):
    return miniray.get(values["refs"][0][0])


@miniray.remote
def make_cell(value):
    return Cell.remote(value)


def test_a_handle_as_a_tasks_argument(engine):
    cell = Cell.remote()
    assert miniray.get(set_cell.remote(cell, 3)) == 3
    assert miniray.get(cell.get.remote()) == 3


def test_a_handle_as_a_keyword_argument(engine):
    cell = Cell.remote()
    miniray.get(set_cell.remote(value=4, cell=cell))
    assert miniray.get(cell.get.remote()) == 4


def test_a_handle_in_a_container_of_a_constructor(engine):
    keeper = Keeper.remote({"cell": Cell.remote(5)})
    assert miniray.get(keeper.read.remote()) == 5


@pytest.mark.slow_on_ray
def test_a_handle_in_a_method_argument(engine):
    keeper = Keeper.remote()
    miniray.get(keeper.hold.remote({"cell": Cell.remote(6)}))
    assert miniray.get(keeper.read.remote()) == 6


def test_a_method_of_a_handle(engine):
    @miniray.remote
    def apply(method, value):
        return miniray.get(method.remote(value))

    cell = Cell.remote()
    assert miniray.get(apply.remote(cell.set, 4)) == 4
    assert miniray.get(cell.get.remote()) == 4


@pytest.mark.slow_on_ray
def test_a_list_of_handles(engine):
    workers = [Cell.remote(value) for value in (1, 2, 6)]
    server = ParameterServer.remote()
    assert miniray.get(server.sync_from_workers.remote(workers)) == 3
    assert miniray.get([worker.get.remote() for worker in workers]) == [3, 3, 3]


def test_a_handle_in_a_put(engine):
    ref = miniray.put([Cell.remote(7)])
    assert miniray.get(miniray.get(ref)[0].get.remote()) == 7


@pytest.mark.slow_on_ray
def test_a_handle_returned_by_a_task(engine):
    cell = miniray.get(make_cell.remote(8))
    assert miniray.get(cell.get.remote()) == 8


@pytest.mark.slow_on_ray
def test_a_handle_returned_by_an_actor(engine):
    keeper = Keeper.remote()
    cell = miniray.get(keeper.make.remote(9))
    assert miniray.get(cell.set.remote(10)) == 10  # two callers: their calls have no order
    assert miniray.get(keeper.read.remote()) == 10


@pytest.mark.slow_on_ray
def test_a_returned_handle_is_the_same_actor(engine):
    cell = Cell.remote()
    keeper = Keeper.remote([cell])
    assert miniray.get(keeper.give.remote()) == [cell]


def test_a_handle_in_a_closure(engine):
    cell = Cell.remote(11)

    @miniray.remote
    def read():
        return miniray.get(cell.get.remote())

    assert miniray.get(read.remote()) == 11


@pytest.mark.slow_on_ray
def test_a_handle_in_the_closure_of_a_class(engine):
    cell = Cell.remote(12)

    @miniray.remote
    class Reader:
        def read(self):
            return miniray.get(cell.get.remote())

    assert miniray.get(Reader.remote().read.remote()) == 12


@pytest.mark.slow_on_ray
def test_a_handle_as_an_attribute_of_a_value(engine):
    class Bag:
        def __init__(self, cell):
            self.cell = cell

        def read(self):
            return miniray.get(self.cell.get.remote())

    @miniray.remote
    def read(bag):
        return bag.read()

    assert miniray.get(read.remote(Bag(Cell.remote(13)))) == 13


@pytest.mark.slow_on_ray
def test_a_ref_as_a_handles_argument_from_elsewhere(engine):
    cell = Cell.remote()

    @miniray.remote
    def set_from_ref(refs):
        return miniray.get(cell.set.remote(refs[0]))  # resolved on the way from here to the cell

    assert miniray.get(set_from_ref.remote([miniray.put(14)])) == 14


def test_a_ref_deep_in_a_container(engine):
    assert miniray.get(read_nested.remote({"refs": [(miniray.put(15),)]})) == 15


def test_a_ref_in_a_closure(engine):
    ref = miniray.put(16)

    @miniray.remote
    def read():
        return miniray.get(ref)

    assert miniray.get(read.remote()) == 16


def test_a_ref_kept_by_an_actor_and_given_back(engine):
    keeper = Keeper.remote()
    miniray.get(keeper.hold.remote([miniray.put(17)]))  # nobody else holds it now
    (ref,) = miniray.get(keeper.give.remote())
    assert miniray.get(ref) == 17


def test_a_ref_to_a_call_of_an_actor_travels(engine):
    cell = Cell.remote(18)
    assert miniray.get(read_nested.remote({"refs": [[cell.get.remote()]]})) == 18


def test_a_ref_made_elsewhere_outlives_the_task_that_made_it(engine):
    @miniray.remote
    def make():
        return [miniray.put([i] * 1000) for i in range(3)]

    refs = miniray.get(make.remote())
    assert [value[-1] for value in miniray.get(refs)] == [0, 1, 2]


def test_a_large_array_by_ref_through_an_actor(engine):
    np = pytest.importorskip("numpy")
    array = np.arange(200_000)
    keeper = Keeper.remote([miniray.put(array)])
    (ref,) = miniray.get(keeper.give.remote())
    assert np.array_equal(miniray.get(ref), array)


def test_a_remote_function_travels(engine):
    @miniray.remote
    def apply(function, value):
        return miniray.get(function.remote(value))

    @miniray.remote
    def double(x):
        return 2 * x

    assert miniray.get(apply.remote(double, 21)) == 42


def test_an_actor_class_travels(engine):
    @miniray.remote
    def build(cls, value):
        return miniray.get(cls.remote(value).get.remote())

    assert miniray.get(build.remote(Cell, 19)) == 19


@pytest.mark.slow_on_ray
def test_an_actor_kills_an_actor(engine, unique):
    cell = Cell.options(name=unique).remote()
    miniray.get(cell.get.remote())
    miniray.get(Keeper.remote().end.remote(cell))
    if engine.name == "ray":  # its cluster hears of it a moment later
        eventually(lambda: dead(cell))
    with pytest.raises(miniray.errors.ActorDiedError):
        miniray.get(cell.get.remote())
    eventually(lambda: not exists(unique))


@pytest.mark.slow_on_ray
def test_an_actor_held_only_by_an_actor_lives(engine, unique):
    keeper = Keeper.remote({"cell": Cell.options(name=unique).remote(20)})
    assert miniray.get(keeper.read.remote()) == 20
    assert exists(unique)
    miniray.get(keeper.drop.remote())
    eventually(lambda: not exists(unique))


@pytest.mark.slow_on_ray
def test_an_actor_held_only_by_a_put_value_lives(engine, unique):
    ref = miniray.put({"cell": Cell.options(name=unique).remote(21)})
    assert miniray.get(miniray.get(ref)["cell"].get.remote()) == 21
    assert exists(unique)
    del ref
    eventually(lambda: not exists(unique))


@pytest.mark.slow_on_ray
def test_an_actor_held_only_by_a_call_in_flight_lives(engine):
    # The handle is gone before the task runs; the arguments hold it.
    assert miniray.get(set_cell.remote(Cell.remote(), 22)) == 22


@pytest.mark.slow_on_ray
def test_two_actors_that_know_each_other(engine):
    @miniray.remote
    class Peer:
        def meet(self, other):
            self.other = other

        def name(self):
            return "peer"

        def ask(self):
            return miniray.get(self.other[0].name.remote())

    one, other = Peer.remote(), Peer.remote()
    miniray.get([one.meet.remote([other]), other.meet.remote([one])])
    # One after the other: at once, each would wait for the other one's turn to end.
    assert miniray.get(one.ask.remote()) == "peer"
    assert miniray.get(other.ask.remote()) == "peer"


@pytest.mark.slow_on_ray
def test_a_ring_of_actors_passes_a_value_around(engine):
    @miniray.remote
    class Link:
        def __init__(self, following=None):
            self.following = following

        def send(self, value):
            if self.following is None:
                return value
            return miniray.get(self.following.send.remote(value + 1))

    link = None
    for _ in range(4):
        link = Link.remote(link)
    assert miniray.get(link.send.remote(0)) == 3
