"""One suite, every engine: each test that takes ``engine`` runs on inline, local and ray.

An engine is started once and shared by all its tests; a test that shuts it down (``no_engine``)
costs the next one a new start. Test modules are ordinary modules of the ``tests`` package, so
workers can import them; what is decorated with ``@miniray.remote`` travels by value.
"""

import itertools
from pathlib import Path

import pytest

import miniray
from miniray.core import session
from tests.conftest import ENGINES

#: What every engine is told to have, whatever the machine has.
SIZE = {"num_workers": 4, "num_cpus": 8, "num_gpus": 2}

HERE = Path(__file__).parent

_serial = itertools.count()


def pytest_generate_tests(metafunc):
    if "backend" in metafunc.fixturenames:
        chosen = metafunc.config.getoption("engine") or ENGINES
        # With package scope pytest runs all tests of one engine before those of the next.
        metafunc.parametrize("backend", chosen, indirect=True, scope="package")


def pytest_collection_modifyitems(items):
    """Run tests that shut their engine down after all others: Ray takes seconds to start again."""
    places = [place for place, item in enumerate(items) if item.path.parent == HERE]
    ours = sorted((items[p] for p in places), key=lambda item: "no_engine" in item.fixturenames)
    for place, item in zip(places, ours, strict=True):
        items[place] = item


@pytest.fixture(scope="package")
def backend(request):
    if request.param == "ray":
        pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MINIRAY_BACKEND", raising=False)
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        yield request.param
        miniray.shutdown()


@pytest.fixture
def engine(backend):
    """The running engine, started if need be."""
    if not miniray.is_initialized():
        miniray.init(backend=backend, **SIZE)
    return session.engine()


@pytest.fixture
def no_engine(backend):
    """The name of the engine, which is not running; nor is it afterwards."""
    miniray.shutdown()
    yield backend
    miniray.shutdown()


@pytest.fixture
def unique():
    """A name nobody else in this run has: a failed test may leave its actors behind."""
    return f"actor-{next(_serial)}"
