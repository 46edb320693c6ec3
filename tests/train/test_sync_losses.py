"""Workers lost one after the other while a failed sync is being made good."""

import pytest

import miniray
from miniray.errors import SyncError, WorkerLostError
from miniray.train.workers.sync.repair import sync


@pytest.fixture(autouse=True)
def engine():
    with miniray.init(backend="inline"):
        yield


@miniray.remote
def fail(workers, error):
    raise error("lost", workers, "distribute")


class Server:
    """Server whose syncs fail with ``failures`` in turn, then succeed."""

    def __init__(self, *failures):
        self.failures = list(failures)
        self.sync_from_workers = self

    def remote(self, handles):
        return fail.remote(*self.failures.pop(0)) if self.failures else miniray.put("synced")


class Group:
    """Group of workers that replaces the next entry of ``found`` at each call."""

    unit = "epoch"

    def __init__(self, count, *found):
        self.handles = [object() for _ in range(count)]
        self.found = list(found)

    def format_epoch(self, epoch):
        return f"{self.unit} {epoch}"

    def call(self, method, args, kwargs, epoch):
        for worker in self.found.pop(0):
            self.handles[worker] = object()


def test_one_that_is_lost_after_it_was_asked_is_made_good_too():
    """It answered the driver, and died before it took the weights from the server."""
    group = Group(2, [0], [1])
    before = list(group.handles)
    assert sync(group, Server(((0, 1), WorkerLostError)), 5.0, 3) == ("synced", False)
    assert all(new is not old for new, old in zip(group.handles, before, strict=True))


def test_one_that_lives_and_raises_is_the_error_of_the_run():
    with pytest.raises(SyncError) as caught:
        sync(Group(2, [0], []), Server(((0, 1), SyncError)), 5.0, 3)
    assert caught.value.workers == (0, 1)
