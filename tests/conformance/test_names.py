"""Named actors: found by name, in a namespace, as long as they live."""

import pytest

import miniray
from tests.conformance.helpers import eventually, exists


@miniray.remote
class Store:
    def __init__(self, value=0):
        self.value = value

    def set(self, value):
        self.value = value

    def get(self):
        return self.value


@miniray.remote
class Other:
    def kind(self):
        return "other"


@miniray.remote
def set_by_name(name, value):
    miniray.get(miniray.get_actor(name).set.remote(value))


def test_an_actor_is_found_by_its_name(engine, unique):
    store = Store.options(name=unique).remote(3)
    assert miniray.get(miniray.get_actor(unique).get.remote()) == 3
    assert miniray.get_actor(unique) == store


def test_a_found_handle_knows_the_methods(engine, unique):
    store = Store.options(name=unique).remote()
    found = miniray.get_actor(unique)
    with pytest.raises(AttributeError, match="get, set"):
        found.put.remote()
    with pytest.raises(TypeError, match="set"):
        found.set.remote()
    assert store is not None  # held until here


def test_a_name_in_the_decorator(engine, unique):
    @miniray.remote(name=unique)
    class Single:
        def ping(self):
            return 1

    single = Single.remote()
    assert miniray.get_actor(unique) == single


@pytest.mark.slow_on_ray
def test_an_actor_is_found_from_a_task(engine, unique):
    store = Store.options(name=unique).remote()
    miniray.get(set_by_name.remote(unique, 8))
    assert miniray.get(store.get.remote()) == 8


@pytest.mark.slow_on_ray
def test_an_actor_is_found_from_an_actor(engine, unique):
    @miniray.remote
    class Client:
        def __init__(self, name):
            self.store = miniray.get_actor(name)

        def read(self):
            return miniray.get(self.store.get.remote())

    store = Store.options(name=unique).remote(9)
    assert miniray.get(Client.remote(unique).read.remote()) == 9
    assert store is not None  # held until here


def test_an_unknown_name_is_a_value_error(engine, unique):
    with pytest.raises(ValueError, match=unique):
        miniray.get_actor(unique)


@pytest.mark.slow_on_ray
def test_a_taken_name_is_a_value_error(engine, unique):
    store = Store.options(name=unique).remote(1)
    with pytest.raises(ValueError, match=unique):
        Store.options(name=unique).remote(2)
    assert miniray.get(store.get.remote()) == 1


def test_get_if_exists_gives_the_existing_actor(engine, unique):
    first = Store.options(name=unique).remote(1)
    second = Store.options(name=unique, get_if_exists=True).remote(2)
    assert second == first
    assert miniray.get(second.get.remote()) == 1


def test_get_if_exists_creates_when_there_is_none(engine, unique):
    store = Store.options(name=unique, get_if_exists=True).remote(4)
    assert miniray.get(store.get.remote()) == 4
    assert miniray.get_actor(unique) == store


def test_namespaces_keep_names_apart(engine, unique):
    here = Store.options(name=unique).remote(1)
    there = Store.options(name=unique, namespace=f"{unique}-space").remote(2)
    assert miniray.get(miniray.get_actor(unique).get.remote()) == 1
    found = miniray.get_actor(unique, namespace=f"{unique}-space")
    assert miniray.get(found.get.remote()) == 2
    assert here != there


def test_a_name_is_not_found_in_another_namespace(engine, unique):
    store = Store.options(name=unique).remote()
    assert not exists(unique, namespace=f"{unique}-elsewhere")
    assert exists(unique)
    assert store is not None  # held until here


@pytest.mark.slow_on_ray
def test_a_name_is_free_again_when_the_last_handle_is_gone(engine, unique):
    store = Store.options(name=unique).remote(1)
    miniray.get(store.get.remote())
    del store
    eventually(lambda: not exists(unique))
    again = Store.options(name=unique).remote(2)
    assert miniray.get(again.get.remote()) == 2


@pytest.mark.slow_on_ray
def test_a_name_is_free_again_after_kill(engine, unique):
    store = Store.options(name=unique).remote(1)
    miniray.get(store.get.remote())
    miniray.kill(store)
    eventually(lambda: not exists(unique))
    again = Other.options(name=unique).remote()
    assert miniray.get(again.kind.remote()) == "other"


def test_a_detached_actor_outlives_its_handles(engine, unique):
    store = Store.options(name=unique, lifetime="detached").remote(6)
    miniray.get(store.set.remote(7))
    del store
    found = miniray.get_actor(unique)
    assert miniray.get(found.get.remote()) == 7
    miniray.kill(found)
    eventually(lambda: not exists(unique))


@pytest.mark.slow_on_ray
def test_a_detached_actor_outlives_the_actor_that_made_it(engine, unique):
    @miniray.remote
    class Maker:
        def make(self, name):
            Store.options(name=name, lifetime="detached").remote(11)

    maker = Maker.remote()
    miniray.get(maker.make.remote(unique))
    miniray.kill(maker)
    found = miniray.get_actor(unique)
    assert miniray.get(found.get.remote()) == 11
    miniray.kill(found)
