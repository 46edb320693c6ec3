"""Every test that takes ``engine`` runs on the inline and the local engine."""

import pytest

import miniray


def pytest_generate_tests(metafunc):
    if "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", ["inline", "local"], indirect=True, scope="module")


@pytest.fixture(scope="module")
def backend(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MINIRAY_BACKEND", raising=False)
        yield request.param
        miniray.shutdown()


@pytest.fixture
def engine(backend):
    if not miniray.is_initialized():
        miniray.init(backend=backend, num_workers=1)
    return backend


@pytest.fixture
def local():
    """The local engine, for tests that need processes."""
    miniray.shutdown()
    with miniray.init(backend="local", num_workers=1) as session:
        yield session
