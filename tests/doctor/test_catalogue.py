"""The fault catalogue: every cause as real processes, and what the doctor must say about it.

Each scenario is a script in ``scripts``, run on two to four ranks that are forked with torch
loaded. The scenarios that were selected run side by side, a few at a time, for most of their time
is waiting; each test then looks at its own.
"""

import re
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.doctor.forking import Nursery, diagnosed
from tests.doctor.scenarios import CONTROLS, FAULTS, Scenario

pytest.importorskip("torch")

AT_ONCE = 5


#: Scenarios that docs/doctor.md shows with their output.
ON_THE_PAGE = (
    "fewer_batches",
    "no_batch",
    "validation_on_rank_0",
    "collective_on_rank_0",
    "early_stop",
    "nan_skipped",
    "unused_parameters",
    "exception",
    "lock",
    "same_data",
)


class Catalogue:
    """Runs the selected scenarios, a few at a time, from the first time one is asked for."""

    def __init__(self, names, folder):
        self._folder = folder
        self._nursery = Nursery()
        self._pool = ThreadPoolExecutor(AT_ONCE)
        self._closing = threading.Event()
        self._results = {name: self._pool.submit(self._run, name) for name in names}

    def _run(self, name):
        if self._closing.is_set():
            return None
        scenario = FAULTS.get(name) or Scenario("", (), None, "", ())
        ranks = scenario.ranks
        if isinstance(ranks, int):
            ranks = [(rank, rank, ranks) for rank in range(ranks)]
        return diagnosed(
            self._nursery,
            scenario.script or name,
            self._folder / name,
            ranks,
            scenario.still,
            scenario.computes,
        )

    def result(self, name):
        return self._results[name].result()

    def close(self):
        self._closing.set()
        self._pool.shutdown(cancel_futures=True)
        self._nursery.close()


@pytest.fixture(scope="module")
def catalogue(request, tmp_path_factory):
    here = [item for item in request.session.items if item.path == Path(__file__)]
    names = [item.callspec.params["name"] for item in here if "catalogue" in item.fixturenames]
    folder = tmp_path_factory.mktemp("catalogue")
    running = Catalogue(names, folder)
    yield running
    running.close()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.timeout(180)  # the first one waits for its neighbours, too
@pytest.mark.parametrize("name", FAULTS)
def test_the_cause_is_named(catalogue, name, golden):
    expected = FAULTS[name]
    diagnosis, took = catalogue.result(name)
    shown = diagnosis.text()
    print(f"{shown}\n\n{name}: verdict {took:.1f} s after the last movement")
    assert diagnosis.findings, shown
    finding = diagnosis.findings[0]
    assert (finding.code, finding.ranks) == (expected.code, expected.guilty), shown
    site = str(finding.site) if finding.site.file else ""
    assert (finding.step, site) == (expected.step, expected.site), shown
    assert [fact for fact in expected.facts if fact not in finding.title] == [], shown
    if name in ON_THE_PAGE:
        golden(f"catalogue/{name}.txt", mask_seconds(diagnosis.verdict) + "\n")
    assert finding.cause, shown
    assert finding.fix, shown
    assert diagnosis.exit_code == 1
    # One cause, said shortly: what follows from it is not listed beside it.
    assert len(diagnosis.findings) == 1, shown
    assert len(shown.splitlines()) <= 50, shown
    assert max(map(len, shown.splitlines())) <= 80, shown
    assert took < 30 + expected.still


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", CONTROLS)
def test_a_healthy_run_gives_no_finding(catalogue, name):
    diagnosis, _ = catalogue.result(name)
    shown = diagnosis.text()
    assert diagnosis.findings == (), shown
    assert [facts.state for facts in diagnosis.case] == ["finished"] * CONTROLS[name][0], shown
    assert {facts.record.step for facts in diagnosis.case} == CONTROLS[name][1], shown
    assert diagnosis.exit_code == 0


@pytest.mark.parametrize("name", ON_THE_PAGE)
def test_the_page_shows_what_the_doctor_says(name):
    """The page has the verdict that the test of the cause compares with the same file."""
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text("utf-8")
    verdict = (Path(__file__).parent / "golden" / "catalogue" / f"{name}.txt").read_text("utf-8")
    assert verdict.strip() in mask_seconds(re.sub(r"\n +", " ", page))


def mask_seconds(text):
    return re.sub(r"\b\d+(\.\d)? s\b", "N s", text)
