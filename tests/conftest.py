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
def _no_engine_from_before(request):
    """A module begins without an engine, whatever the one before it in this process left behind."""
    if "conformance" not in request.path.parts:  # where the modules share one
        miniray.shutdown()


@pytest.hookimpl(trylast=True)  # after the suites' own marks and order
def pytest_collection_modifyitems(config, items):
    """A file stays together, and so do all conformance tests of one engine: it is started once."""
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        engine = getattr(getattr(item, "callspec", None), "params", {}).get("backend")
        together = f"conformance on {engine}" if "conformance" in item.path.parts else item.path
        item.add_marker(pytest.mark.xdist_group(str(together)))
