"""Options of the test run, and which tests run in one process when several take part."""

import os
import shutil
import tempfile
from contextlib import contextmanager

import hypothesis
import pytest

import miniray
from miniray.core.machine import gpu_ids
from tests.messages import format_message, read_messages, update_messages
from tests.mother import Mother

ENGINES = ("inline", "local", "ray")
#: Where engines start as a user's do: their own tests, and runs that must not have even the order
#: of a set from the process before them.
STARTED_AFRESH = {"core", "faults", "test_reproducible.py"}
#: Files of which much is on Ray, beside the conformance tests.
ON_RAY = ("core/test_ray_cluster.py", "train/test_every_engine.py")
#: Groups that take half a minute and more, the longest first.
LONGEST = (
    "ray",
    "test_docs.py",
    "test_examples.py",
    "faults/test_leaks.py",
    "doctor/test_launch.py",
    "doctor/test_catalogue.py",
    "train/test_ddp_failures.py",
    "dashboard/test_page.py",
    "parallel/test_numbers.py",
)


def pytest_addoption(parser):
    parser.addoption(
        "--engine",
        action="append",
        choices=ENGINES,
        help="run the conformance suite on this engine only (may be given several times)",
    )
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write the golden files of the tests that run instead of comparing with them",
    )


def pytest_configure(config):
    """Hide GPUs unless GPU tests are selected, because trainers reserve them.

    Hypothesis measures no times: on a busy machine, any input takes long.
    """
    unhurried = [hypothesis.HealthCheck.too_slow]
    hypothesis.settings.register_profile("busy", deadline=None, suppress_health_check=unhurried)
    hypothesis.settings.load_profile("busy")
    selects_gpu = "gpu" in config.option.markexpr.replace("not gpu", "")
    if gpu_ids() and not selects_gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.fixture(scope="session", autouse=True)
def _no_running_ray():
    """Hide a Ray cluster that runs on this machine: sessions on Ray would join it."""
    with pytest.MonkeyPatch.context() as patch:
        # Not tmp_path: the path of a Unix socket has room for about a hundred characters.
        folder = tempfile.mkdtemp(prefix="mr-")
        patch.setenv("RAY_TMPDIR", folder)
        patch.delenv("RAY_ADDRESS", raising=False)
        yield
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def golden(request):
    """Compare text with ``golden/<name>`` beside the test file: ``golden("verdict.txt", text)``.

    Wording lives in these files. All other assertions use types, codes and fields.
    """

    def compare(name, text):
        path = request.path.parent / "golden" / name
        if request.config.getoption("update_golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        expected = path.read_text(encoding="utf-8") if path.exists() else ""
        assert text == expected, f"{path} differs: check the text, then run with --update-golden"

    return compare


@pytest.fixture
def check_message(request, tmp_path_factory):
    """Compare an error, or a text, with the next entry of the test in ``golden/messages.txt``."""
    path = request.path.parent / "golden" / "messages.txt"
    test = f"{request.path.name}::{request.node.name}"
    expected, messages = read_messages(path), {}
    is_updating = request.config.getoption("update_golden")

    def check(error):
        name = f"{test} ({len(messages) + 1})" if messages else test
        text = messages[name] = format_message(error, tmp_path_factory.getbasetemp())
        if not is_updating:
            wanted = expected.get(name, "")
            assert text == wanted, f"[{name}] in {path} differs: check the text, then update it"

    yield check
    if is_updating:
        update_messages(path, test, messages)


@pytest.fixture
def raises(check_message):
    """Like ``pytest.raises``, and the message is the one in ``golden/messages.txt``.

    Use it for errors that have no field for what they report.
    """

    @contextmanager
    def check(kind):
        with pytest.raises(kind) as caught:
            yield caught
        check_message(caught.value)

    return check


@pytest.fixture
def warns(check_message):
    """Like ``pytest.warns``, and the messages are those in ``golden/messages.txt``."""

    @contextmanager
    def check(kind):
        with pytest.warns(kind) as caught:
            yield caught
        messages = {str(w.message): w.message for w in caught if w.category is kind}
        assert messages
        for message in messages.values():
            check_message(message)

    return check


@pytest.fixture(scope="module", autouse=True)
def _ends_its_engine(request):
    """A module that leaves an engine running would fail the next one in this process."""
    yield
    if "conformance" not in request.path.parts:  # whose modules share one
        left = miniray.is_initialized()
        miniray.shutdown()  # or one leak would fail everything after it
        assert not left, f"{request.path.name} left an engine running"


@pytest.fixture(scope="module")
def browser():
    """For pages that are looked at as people do."""
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("no Chromium for tests of pages: `apt-get install chromium` as root")
    api = pytest.importorskip(
        "playwright.sync_api", reason="no playwright for tests of pages: pip install it"
    )
    options = ["--disable-gpu", "--disable-background-networking", "--disable-component-update"]
    options += ["--disable-sync", "--no-first-run", "--disable-dev-shm-usage"]
    if os.getuid() == 0:
        options.append("--no-sandbox")
    with api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=found, args=options)
        yield started
        started.close()


@pytest.fixture(scope="session")
def _mother():
    mother = Mother()
    yield mother
    mother.close()


@pytest.fixture(scope="module", autouse=True)
def _starts_quickly(request, _mother):
    """Elsewhere a local engine starts without an interpreter that loads torch for its workers."""
    if STARTED_AFRESH & {request.path.parent.name, request.path.name}:
        yield
    else:
        with _mother.forking():
            yield


@pytest.fixture(scope="session")
def run_script(_mother):
    """``run_script(script, *arguments, cwd=, env=, timeout=)``: as a process with torch loaded."""
    return _mother.run


def pytest_itemcollected(item):
    """Mark the Ray variant of tests with ``slow_on_ray`` as slow.

    An actor on Ray takes about a second to start. ``make test`` runs on Ray what passes through
    the code of our Ray engine: options, names, errors, refs, streams. ``make test-slow`` and
    ``--engine ray`` run everything.
    """
    if item.get_closest_marker("slow_on_ray") and not item.config.getoption("engine"):
        params = getattr(item, "callspec", None) and item.callspec.params
        if params and "ray" in (params.get("backend"), params.get("engine")):
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(trylast=True)  # after the suites' own marks and order
def pytest_collection_modifyitems(config, items):
    """Keep a file in one process, and all tests on Ray in one process, so that one Ray runs.

    With several processes, the longest groups come first, because the last one to start ends last.
    """
    if not config.pluginmanager.hasplugin("xdist"):
        return
    groups = {}
    for item in items:
        group = _group(item)
        item.add_marker(pytest.mark.xdist_group(group))
        groups.setdefault(group, []).append(item)
    if hasattr(config, "workerinput"):
        rank = {group: -len(tests) for group, tests in groups.items()}
        rank.update((group, -(10**6) + place) for place, group in enumerate(LONGEST))
        items[:] = [item for group in sorted(groups, key=rank.get) for item in groups[group]]


def _group(item):
    path = item.nodeid.partition("::")[0].removeprefix("tests/")
    if not path.startswith("conformance/"):
        return "ray" if path in ON_RAY else path
    engine = getattr(getattr(item, "callspec", None), "params", {}).get("backend")
    return "ray" if engine == "ray" else f"conformance on {engine}"
