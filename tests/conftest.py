"""Options of the test run, and which tests run in one process when several take part."""

import pytest

import miniray

ENGINES = ("inline", "local", "ray")


def pytest_addoption(parser):
    parser.addoption(
        "--engine",
        action="append",
        choices=ENGINES,
        help="run the conformance suite on this engine only (may be given several times)",
    )


@pytest.fixture(scope="module", autouse=True)
def _ends_its_engine(request):
    """A module that leaves an engine running would fail the next one in this process."""
    yield
    if "conformance" not in request.path.parts:  # whose modules share one
        left = miniray.is_initialized()
        miniray.shutdown()  # or one leak would fail everything after it
        assert not left, f"{request.path.name} left an engine running"


@pytest.hookimpl(trylast=True)  # after the suites' own marks and order
def pytest_collection_modifyitems(config, items):
    """A file stays together, and so do all conformance tests of one engine: it is started once."""
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        engine = getattr(getattr(item, "callspec", None), "params", {}).get("backend")
        together = f"conformance on {engine}" if "conformance" in item.path.parts else item.path
        item.add_marker(pytest.mark.xdist_group(str(together)))
