"""The fault catalogue: every cause as real processes, and what the doctor must say about it.

Each scenario is a script in ``scripts``, run on two to four ranks that are forked with torch
loaded. The scenarios that were selected run side by side, a few at a time, for most of their time
is waiting; each test then looks at its own.
"""

import dataclasses
import re
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.doctor.forking import Nursery, diagnosed

pytest.importorskip("torch")

AT_ONCE = 5


@dataclasses.dataclass(frozen=True)
class Scenario:
    """``ranks`` are (number, RANK, WORLD_SIZE) of each process; ``code`` "" is a healthy run."""

    code: str
    guilty: tuple
    title: str
    ranks: int | list = 2
    script: str = ""
    still: float = 2.5
    computes: bool = False


FAULTS = {
    "fewer_batches": Scenario(
        "ran-out-of-data",
        (1,),
        r"rank 1 ran out of data at step 3; rank 0 has 4 batches, rank 1 3",
    ),
    "no_batch": Scenario(
        "no-batches", (3,), r"rank 3 has 0 batches \(3 samples < 4 ranks\)", ranks=4
    ),
    "validation_on_rank_0": Scenario(
        "collectives-parted",
        (0,),
        r"rank 0 is in DDP forward \(validation_on_rank_0.py:\d+\), ranks 1 and 2 are in barrier",
        ranks=3,
    ),
    "barrier_in_branch": Scenario(
        "collectives-parted",
        (0,),
        r"waiting in barrier \(barrier_in_branch.py:\d+\); ranks 1 and 2 are in all_reduce",
        ranks=3,
    ),
    "named_barrier_in_branch": Scenario(
        "collectives-parted",
        (0,),
        r"waiting in barrier 'save' \(.*:\d+\); ranks 1 and 2 are in all_reduce",
        ranks=3,
    ),
    "collective_on_rank_0": Scenario(
        "collectives-parted", (0,), r"all_gather \(.*:\d+\) called by 1 of 3 ranks", ranks=3
    ),
    "full_tensor_in_branch": Scenario(
        "collectives-parted",
        (1,),
        r"all_reduce \(.*:12\) called by 1 of 3 ranks \(rank 1\); ranks 0 and 2 are in "
        r"all_gather_into_tensor \(full_tensor_in_branch.py:11\)",
        ranks=3,
    ),
    "early_stop": Scenario(
        "left-the-loop", (1,), r"rank 1 left the loop at step 2 \(batch 2 of 8\)"
    ),
    "nan_skipped": Scenario(
        "skipped-backward", (1,), r"rank 1 skipped backward at step 2 \(loss NaN\)"
    ),
    "nan_poisons": Scenario(
        "non-finite-loss",
        (1,),
        r"first non-finite loss: rank 1, step 7 \(NaN\), samples 25, 27",
    ),
    "unused_parameters": Scenario("unused-parameters", (1,), r"unused on rank 1: b.weight, b.bias"),
    "exception": Scenario(
        "exception", (1,), r"rank 1 raised ValueError: label 17 out of range at exception.py:\d+"
    ),
    "exception_in_finally": Scenario(
        "exception",
        (1,),
        r"rank 1 raised KeyError: 17 at .*:\d+, and since then waits in barrier .*:\d+; rank 0",
    ),
    "long_preparation": Scenario(
        "slow-section",
        (0,),
        r"rank 0 is still in prepare_data \(\d.*s\), alive.*; ranks 1 and 2 wait in barrier",
        ranks=3,
    ),
    "world_of_one": Scenario(
        "separate-worlds",
        (0, 0),
        r"2 processes, each with world_size 1: not launched together",
        ranks=[(0, 0, 1), (1, 0, 1)],
    ),
    "missing_rank": Scenario(
        "missing-rank",
        (2,),
        r"rank 2 never started; ranks 0 and 1 wait in init_process_group",
        ranks=[(0, 0, 3), (1, 1, 3)],
        script="only_start",
    ),
    "duplicate_rank": Scenario(
        "duplicate-rank",
        (0, 1),
        r"two processes claim rank 0; rank 1 never started",
        ranks=[(0, 0, 2), (1, 0, 2)],
        script="only_start",
    ),
    "same_data": Scenario("same-data", (0, 1), r"ranks 0 and 1 share 100% of their samples"),
    "set_epoch_forgotten": Scenario(
        "set-epoch-forgotten", (0, 1), r"epoch 1 has epoch 0's order on ranks 0 and 1"
    ),
    "models_differ": Scenario(
        "models-differ", (1,), r"rank 1 has 4 parameters, rank 0 has 2: models differ"
    ),
    "slow_rank": Scenario(
        "straggler",
        (2,),
        r"rank 2 is \d\.\d× slower than the median since step \d+ \(data loading\)",
        ranks=3,
    ),
    # Causes that nobody listed.
    "swapped": Scenario(
        "collectives-swapped",
        (0, 1),
        r"called collectives in another order at step 0: rank 0 .*:9; rank 1 .*:13",
    ),
    "sizes_differ": Scenario(
        "mismatch",
        (0, 1),
        r"collectives do not match at step 0: rank 0 .* \(8,\) .*; rank 1 .* \(5,\)",
    ),
    "no_sync_on_one_rank": Scenario(
        "no-exchange", (1,), r"rank 1 did a backward without averaging gradients at step 3"
    ),
    "world_size_fixed": Scenario(
        "world-size", (0, 1), r"init_process_group waits for 4 ranks, and 2 ranks started"
    ),
    "stopped": Scenario("stopped", (1,), r"rank 1 is stopped \(SIGSTOP or a debugger\)", ranks=3),
    "holds_gil": Scenario(
        "holds-gil",
        (1,),
        r"rank 1 is stuck in C code that holds Python's lock at holds_gil.py:\d+",
        still=4.5,
    ),
    "killed": Scenario("killed", (1,), r"rank 1 was killed by SIGKILL at step 3 \(\d+ MB resident"),
    "segfault": Scenario("killed", (1,), r"rank 1 crashed with SIGSEGV at step 3"),
    "memory_limit": Scenario(
        "out-of-memory", (1,), r"rank 1 ran out of memory at memory_limit.py:\d+ \(\d+ MB resident"
    ),
    "endless_loop": Scenario(
        "busy",
        (1,),
        r"rank 1 is busy at endless_loop.py:\d+ in search .*rank 0 waits in barrier",
        computes=True,
        still=6.0,
    ),
    "lock": Scenario("blocked", (1,), r"rank 1 is blocked at lock.py:\d+ in log .*lock.acquire"),
    "wrong_group": Scenario(
        "collectives-parted",
        (0, 1),
        r"rank 0 is in all_reduce \(.*\) of group ranks 0,1 .*of group default",
        ranks=3,
    ),
    "barrier_timeout": Scenario(
        "blocked",
        (1,),
        r"rank 1 is blocked at .* in write_checkpoint .*; rank 0 wait(s|ed) in barrier 'epoch end'",
    ),
    "bar_between_barriers": Scenario(
        "bar-between-barriers",
        (0,),
        r"rank 0 is stuck at its progress bar \(bar_between_barriers.py:\d+\)",
    ),
    "drifted": Scenario(
        "parameters-drifted", (1,), r"parameters of rank 1 differ from rank 0's since step 4"
    ),
}

CONTROLS = {
    "healthy": Scenario("", (), r"HEALTHY: 2 ranks finished at step 20"),
    "slow_start": Scenario("", (), r"HEALTHY: 2 ranks finished at step 6"),
    "slow_but_moving": Scenario("", (), r"HEALTHY: 2 ranks finished at step 12"),
    "joined": Scenario("", (), r"HEALTHY: 2 ranks finished at steps 10–14"),
}


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
        scenario = FAULTS.get(name) or CONTROLS[name]
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
def test_the_cause_is_named(catalogue, name):
    expected = FAULTS[name]
    diagnosis, took = catalogue.result(name)
    shown = diagnosis.text()
    print(f"{shown}\n\n{name}: verdict {took:.1f} s after the last movement")
    assert diagnosis.findings, shown
    finding = diagnosis.findings[0]
    assert (finding.code, finding.ranks) == (expected.code, expected.guilty), shown
    assert re.search(expected.title, finding.title), shown
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
    assert re.match(CONTROLS[name].title, diagnosis.verdict), shown
    assert diagnosis.exit_code == 0


@pytest.mark.parametrize("name", ON_THE_PAGE)
def test_the_page_shows_what_the_doctor_says(name):
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text("utf-8")
    assert re.search(FAULTS[name].title, re.sub(r"\n +", " ", page))
