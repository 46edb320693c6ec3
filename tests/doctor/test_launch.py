"""``miniray run`` for real, with scripts that need no torch."""

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from miniray.doctor import recorder
from miniray.doctor.diagnose import diagnose
from miniray.doctor.launch_options import Options, master_port
from miniray.doctor.launch_ranks import Rank as LaunchedRank
from miniray.doctor.launch_ranks import Ranks as LaunchedRanks
from miniray.doctor.launch_watch import Watched
from miniray.doctor.reader import read_run
from tests.doctor.helpers import Ranks, wait_until

RUN = [sys.executable, "-m", "miniray", "run"]
HEADER = """
import json, os, signal, sys, time
from pathlib import Path
from miniray import doctor
rank = int(os.environ["RANK"])
"""


@pytest.fixture
def launch(tmp_path):
    """Start ``miniray run`` with options, a script's text and arguments; everything is ended."""
    started = []

    def start(text, *options, args=()):
        script = tmp_path / "train.py"
        script.write_text(HEADER + text)
        process = subprocess.Popen(
            [*RUN, "--run-dir", "run", *options, str(script), *args],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def run(launch):
    def start(*args, **kwargs):
        process = launch(*args, **kwargs)
        output, errors = process.communicate(timeout=55)
        return process.returncode, output, errors

    return start


def pids_of(run_dir, count):
    """The ranks' process ids, once all of them are there."""

    def all_there():
        if not run_dir.is_dir():
            return None
        found = [record.pid for record in read_run(run_dir)]
        return found if len(found) == count else None

    return wait_until(all_there)


def all_gone(pids):
    wait_until(lambda: not any(_runs(pid) for pid in pids))


def _runs(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_good_run_has_torchruns_environment_labels_and_a_record(run, tmp_path):
    code, output, errors = run(
        """
names = ("LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
         "OMP_NUM_THREADS", "MINIRAY_RUN_SEED", "TORCHELASTIC_RUN_ID")
Path(f"env-{rank}.json").write_text(json.dumps({name: os.environ[name] for name in names}))
Path(f"argv-{rank}.json").write_text(json.dumps([sys.argv, __name__, __file__, sys.path[0]]))
print("started")
print(f"[Rank {rank}/2] labelled already")
print(f"[Rank {rank}/9] of a trainer")
print("to stderr", file=sys.stderr)
doctor.barrier("both")
doctor.step(loss=0.5, batch_size=8)
""",
        "--nproc", "2", args=("--epochs", "3", "--nproc", "9"),
    )  # fmt: skip
    assert code == 0, errors
    for rank in (0, 1):
        assert output.count(f"[Rank {rank}/2] started\n") == 1
        assert output.count(f"[Rank {rank}/2] labelled already\n") == 1
        assert f"[Rank {rank}/2] to stderr\n" in errors
        log = (tmp_path / "run" / "ranks" / f"{rank}.log").read_text()
        label = f"[Rank {rank}/2]"
        lines = sorted(log.splitlines())
        texts = ("labelled already", "started", "to stderr")
        assert lines == [*(f"{label} {text}" for text in texts), f"[Rank {rank}/9] of a trainer"]
        script = str(tmp_path / "train.py")
        expected = [[script, "--epochs", "3", "--nproc", "9"], "__main__", script, str(tmp_path)]
        assert json.loads((tmp_path / f"argv-{rank}.json").read_text()) == expected
    first, second = (json.loads((tmp_path / f"env-{r}.json").read_text()) for r in (0, 1))
    assert (first["LOCAL_RANK"], second["LOCAL_RANK"]) == ("0", "1")
    assert first["OMP_NUM_THREADS"] == os.environ.get("OMP_NUM_THREADS", "1")
    assert (first["WORLD_SIZE"], first["LOCAL_WORLD_SIZE"], first["GROUP_RANK"]) == ("2", "2", "0")
    assert {k: v for k, v in first.items() if k != "LOCAL_RANK"} == {
        k: v for k, v in second.items() if k != "LOCAL_RANK"
    }
    record = read_run(tmp_path / "run")
    assert record.run["state"] == "finished"
    assert record.run["world_size"] == 2
    assert record.run["seed"] == int(first["MINIRAY_RUN_SEED"])
    assert [(r.launcher, r.step, r.exit.kind) for r in record] == [
        ("miniray run", 1, "finished")
    ] * 2


def test_a_failure_is_the_runs_status_with_the_scripts_own_traceback(run, tmp_path):
    code, _, errors = run(
        """
def load(row):
    raise ValueError(f"bad row {row}")

if rank == 1:
    load(7)
doctor.barrier("start")
""",
        "--nproc", "2",
    )  # fmt: skip
    assert code == 1
    assert "ValueError: bad row 7" in errors
    assert "bootstrap" not in errors.split("[Rank 1/2] Traceback")[1].split("ValueError")[0]
    record = read_run(tmp_path / "run")
    assert record.run["state"] == "failed"
    assert "rank 1" in record.run["error"]["message"]
    assert (record.ranks[1].exit.kind, record.ranks[1].exit.code) == ("exception", 1)
    assert "bad row 7" in (tmp_path / "run" / "doctor.txt").read_text()
    assert json.loads((tmp_path / "run" / "doctor.json").read_text())


@pytest.mark.parametrize(
    ("how", "status"),
    [
        ("os.kill(os.getpid(), 9)", 137),
        pytest.param("os._exit(7)", 7, marks=pytest.mark.slow),
        pytest.param("sys.exit(5)", 5, marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_ends_badly_ends_the_others(run, tmp_path, how, status):
    code, _, errors = run(f"if rank == 0: {how}\ntime.sleep(50)\n", "--nproc", "2")
    assert code == status, errors
    record = read_run(tmp_path / "run")
    assert record.ranks[1].exit.signal in ("SIGTERM", "SIGKILL")
    assert record.ranks[1].exit.by_launcher
    assert not record.ranks[0].exit.by_launcher


def test_ranks_that_do_not_move_are_diagnosed_and_ended(run, tmp_path):
    code, _, errors = run(
        """
doctor.step(loss=1.0)
if rank == 0:
    doctor.barrier("after the loop", timeout=500)
time.sleep(500)
""",
        "--nproc", "2", "--hang-timeout", "2",
    )  # fmt: skip
    assert code == 1
    record = read_run(tmp_path / "run")
    assert record.run["state"] == "failed"
    assert f"[miniray run] {record.run['error']['message']}\n" in errors
    (finding,) = json.loads((tmp_path / "run" / "doctor.json").read_text())["findings"]
    assert (finding["severity"], finding["ranks"]) == ("stuck", [1])
    assert finding["title"][:40] in (tmp_path / "run" / "doctor.txt").read_text()
    all_gone([one.pid for one in record])


def test_work_that_takes_long_is_no_hang(run, golden):
    code, _, errors = run(
        """
def prepare():
    until = time.monotonic() + 4
    while time.monotonic() < until:
        sum(range(10000))

if rank == 0:
    with doctor.phase("prepare_data"):
        prepare()
doctor.barrier("data is there", timeout=50)
""",
        "--nproc", "2", "--hang-timeout", "2",
    )  # fmt: skip
    assert code == 0, errors
    assert max(map(len, errors.splitlines())) <= 80
    text = re.sub(r"\s+", " ", errors.replace("[miniray run]", ""))
    notice = re.search(r"rank 0 is .*?train\.py:\d+ <module>", text)[0]
    # Both lines of the loop are work, and how long it took is up to the machine.
    notice = re.sub(r"\b\d+ s\b", "N s", re.sub(r":\d+( in)? prepare", r":N\1 prepare", notice))
    golden("launch/still_working.txt", notice + "\n")


DOWNLOAD = """
import subprocess, sys
child = '''
import sys, time
with open("/dev/null", "wb", buffering=0) as file:
    print("begun", flush=True)
    while True:
        file.write(bytes(65536))
        time.sleep(0.05)
'''
subprocess.run([sys.executable, "-c", child])
"""


def test_what_a_ranks_child_reads_and_writes_is_work(tmp_path):
    """A download by another program: hardly any CPU time, and none of it the rank's own."""
    rank = subprocess.Popen([sys.executable, "-c", DOWNLOAD], stdout=subprocess.PIPE)
    try:
        rank.stdout.readline()
        watched = Watched(0, rank.pid, tmp_path / "0.box")
        watched.look(1.0)
        begun = watched.moved
        wait_until(lambda: watched.look(1.0) or watched.moved > begun)
        assert watched.working
    finally:
        for child in psutil.Process(rank.pid).children():
            child.kill()
        rank.wait(30)


def test_who_hears_of_a_killed_rank_is_not_the_first_to_fail(tmp_path):
    """The launcher looks ten times a second; by then others may have failed for it."""

    class DistBackendError(RuntimeError):
        pass

    children = Ranks()
    pid = children.start(lambda: _raise_in(tmp_path, DistBackendError("connection closed")))
    assert children.wait() == [3]
    ranks = LaunchedRanks(tmp_path / "ranks", 2, None)
    for number, process, code, ended in ((0, pid, 1, 1.0), (1, 4711, -9, time.time() + 9)):
        one = LaunchedRank(number, SimpleNamespace(pid=process), tmp_path / f"{number}.exit")
        one.code, one.ended = code, ended
        ranks.ranks.append(one)
    assert [rank.rank for rank in ranks.failed] == [1, 0]


def _raise_in(run_dir, error):
    recorder.start(run_dir, 0, 2)
    raise error


def test_a_run_that_ends_well_and_was_wrong_says_so(run, tmp_path):
    code, _, errors = run('doctor.step(loss=float("nan"), batch_size=2)\n')
    assert code == 0
    diagnosis = diagnose(tmp_path / "run")
    finding = diagnosis.findings[0]
    assert (finding.code, finding.ranks, finding.step) == ("non-finite-loss", (0,), 1)
    assert f"[miniray run] {diagnosis.verdict}\n" in errors
    assert "miniray doctor run\n" in errors


def test_an_error_that_a_script_handles_by_leaving_is_why_it_left(run, tmp_path):
    code, _, errors = run('try: int("x")\nexcept ValueError: sys.exit(3)\n')
    assert code == 3
    finding = json.loads((tmp_path / "run" / "doctor.json").read_text())["findings"][0]
    assert (finding["code"], finding["ranks"]) == ("exception", [0])
    assert "ValueError" in finding["title"]
    assert f"FAILED: {finding['title']}" in re.sub(r"\s+", " ", errors)


def test_all_ranks_are_started_again_as_often_as_allowed(run, tmp_path):
    code, _, errors = run(
        """
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print("attempt", attempt)
if attempt == 0 and rank == 1:
    sys.exit(4)
doctor.barrier("all here")
""",
        "--nproc", "2", "--max-restarts", "1",
    )  # fmt: skip
    assert code == 0, errors
    assert re.search(r"\b1 of 1\b", errors)
    record = read_run(tmp_path / "run")
    assert [r.attempt for r in record] == [1, 1]
    assert record.run["state"] == "finished"
    assert read_run(tmp_path / "run").ranks[1].exit.kind == "finished"
    kept = sorted(p.name for p in (tmp_path / "run" / "ranks" / "attempt-0").glob("*.box"))
    assert kept == ["0.box", "1.box"]


SLEEPERS = """
import subprocess
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(500)"])
Path(f"child-{rank}").write_text(str(child.pid))
try:
    time.sleep(500)
except KeyboardInterrupt:
    Path(f"interrupted-{rank}").touch()
"""


def sleepers(process, tmp_path):
    pids = pids_of(tmp_path / "run", 2)
    for rank in (0, 1):
        wait_until(lambda rank=rank: (tmp_path / f"child-{rank}").exists())
        wait_until(lambda rank=rank: (tmp_path / f"child-{rank}").read_text())
        pids.append(int((tmp_path / f"child-{rank}").read_text()))
    return pids


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_launcher_ends_every_rank_and_its_children(launch, tmp_path, number):
    before = signal.signal(number, signal.SIG_DFL)  # or it is ignored there, too, where it is here
    process = launch(SLEEPERS, "--nproc", "2")
    signal.signal(number, before)
    pids = sleepers(process, tmp_path)
    process.send_signal(number)
    assert process.wait(50) == 128 + number
    all_gone(pids)
    assert read_run(tmp_path / "run").run["state"] == "interrupted"
    if number == signal.SIGINT:
        assert (tmp_path / "interrupted-0").exists()  # the script could save what it had


def test_a_killed_launcher_takes_the_ranks_with_it(launch, tmp_path):
    process = launch(SLEEPERS, "--nproc", "2")
    pids = sleepers(process, tmp_path)
    process.kill()
    process.wait(50)
    try:
        all_gone(pids[:2])
    finally:
        for pid in pids[2:]:  # their children, which we started and nobody could end
            os.kill(pid, signal.SIGKILL)


def test_a_rank_that_computes_on_a_gpu_is_not_ended(run):
    """Its CPU says nothing, for waiting spins; but the diagnosis finds nobody stuck."""
    code, _, errors = run(
        """
from miniray.doctor.layout import Cell
from miniray.doctor.recorder import current
doctor.step(loss=1.0)
current().box.ints[Cell.GPU_PROCESS_MEMORY] = 1 << 30
until = time.monotonic() + 3
while time.monotonic() < until:
    sum(range(10000))
""",
        "--hang-timeout", "1",
    )  # fmt: skip
    assert code == 0, errors
    assert re.search(r"\b\d+ s\b.*\n.*\(HEALTHY", errors)


def test_nobody_gets_the_port_before_rank_0(run):
    code, output, errors = run(
        """
import socket, struct
port = int(os.environ["MASTER_PORT"])
def attempt(use):
    with socket.socket() as one:
        try:
            one.setsockopt(socket.IPPROTO_IP, 51, struct.pack("I", port << 16 | port))
        except OSError:  # before Linux 6.3 a socket cannot be kept to one port
            return "unknown"
        try:
            use(one)
        except OSError:
            return "refused"
        return "taken"
with socket.create_server(("127.0.0.1", 0)) as server:
    print("any port:", attempt(lambda one: one.bind(("", 0))))
    print("a connection:", attempt(lambda one: one.connect(server.getsockname())))
    print("this port:", attempt(lambda one: one.bind(("", port))))
with socket.create_server(("", port)):  # sets SO_REUSEADDR, as torch's store does
    print("rank 0:", attempt(lambda one: one.bind(("", port))))
""",
    )
    assert code == 0, errors
    assert "[Rank 0/1] rank 0: refused" in output or "unknown" in output
    for who in ("any port", "a connection", "this port"):
        assert re.search(rf"{who}: (refused|unknown)", output), output


def test_torchs_store_listens_on_the_port_that_is_kept_for_it():
    dist = pytest.importorskip("torch.distributed")
    with master_port(Options(("train.py",))) as port:
        for libuv in (True, False):
            store = dist.TCPStore("127.0.0.1", port, 1, True, use_libuv=libuv)
            store.set("a", "b")
            assert store.get("a") == b"b"
            del store


def test_a_taken_port_is_replaced_and_a_module_can_be_run(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "train.py").write_text(
        "import os, sys\nprint(__name__, sys.argv[1:], os.environ['MASTER_PORT'])\n"
    )
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            [*RUN, "--master-port", port, "-m", "package.train", "x"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=50,
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[Rank 0/1] __main__ ['x'] ")
    used = done.stdout.split()[-1]
    assert used != port
    assert re.search(rf"\b{port}\b.*\b{used}\b", done.stderr)
    (folder,) = Path(tmp_path, "runs").iterdir()
    assert read_run(folder).ranks[0].exit.kind == "finished"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("script", ["nowhere.py"]),
        ("nproc", ["--nproc", "0", "x.py"]),
        ("master", ["--nnodes", "2", "x.py"]),
        ("hang_timeout", ["--hang-timeout", "0", "x.py"]),
        ("hang_timeout_nan", ["--hang-timeout", "nan", "x.py"]),
        ("node_rank", ["--nnodes", "2", "--node-rank", "2", "x.py"]),
        ("token", ["--nnodes", "2", "--node-rank", "1", "--master-port", "29500", "x.py"]),
    ],
)
def test_bad_options_are_refused_before_anything_starts(
    tmp_path, name, options, monkeypatch, capsys, golden
):
    from miniray import cli

    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").touch()
    with pytest.raises(SystemExit) as stop:
        cli.main(["run", *options])
    assert stop.value.code != 0
    golden(f"launch/{name}.txt", capsys.readouterr().err)
    assert not (tmp_path / "runs").exists()


def find_port():
    """Return a free port, followed by a free one: launchers use both.

    Both are below the range from which the kernel gives ports to other tests' connections.
    """
    while True:
        port = random.randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as first, socket.socket() as second:
            first.bind(("", port))
            second.bind(("", port + 1))
            return port


def two_machines(tmp_path, text, *options):
    """Two launchers that are told to be two machines, each with a run directory of its own."""
    (tmp_path / "train.py").write_text(HEADER + text)
    common = [*RUN, "--nnodes", "2", "--master-port", str(find_port()), *options]
    processes = [
        subprocess.Popen(
            [*common, "--node-rank", str(node), "--run-dir", f"run-{node}", "train.py"],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "MINIRAY_RUN_TOKEN": "a token of the tests"},
        )
        for node in (1, 0)
    ]
    try:
        (_, errors_1), (_, errors_0) = (process.communicate(timeout=50) for process in processes)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return [process.returncode for process in processes], errors_0, errors_1


def test_barriers_and_seeds_reach_over_machines(tmp_path):
    codes, errors_0, errors_1 = two_machines(
        tmp_path,
        """
Path(f"seed-{rank}").write_text(os.environ["MINIRAY_RUN_SEED"])
assert "MINIRAY_RUN_TOKEN" not in os.environ
for turn in range(3):
    Path(f"came-{rank}-{turn}").touch()
    doctor.barrier(f"turn {turn}", timeout=40)
    assert Path(f"came-{1 - rank}-{turn}").exists()
""",
    )
    assert codes == [0, 0], errors_0 + errors_1
    assert (tmp_path / "seed-0").read_text() == (tmp_path / "seed-1").read_text()
    for node in (0, 1):
        record = read_run(tmp_path / f"run-{node}")
        assert [(r.rank, r.barrier.name, r.exit.kind) for r in record] == [
            (0, "turn 2", "finished"), (1, "turn 2", "finished"),
        ]  # fmt: skip
        assert record.run["state"] == "finished"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["time.sleep(500)", "raise ValueError('bad row 7')"])
def test_trouble_on_another_machine_is_diagnosed_on_machine_0(tmp_path, how):
    text = f"""
def stuck_here():
    {how}

if rank == 1:
    stuck_here()
doctor.barrier("start", timeout=300)
"""
    codes, errors_0, errors_1 = two_machines(tmp_path, text, "--hang-timeout", "3")
    assert all(codes), errors_0 + errors_1
    said = (tmp_path / "run-0" / "doctor.txt").read_text()
    assert "rank 1" in said
    assert ("stuck_here" if "sleep" in how else "bad row 7") in said
    assert not (tmp_path / "run-1" / "doctor.txt").exists()
    assert "machine 0" in errors_1


def test_a_directory_that_holds_a_run_is_refused(run, tmp_path):
    (tmp_path / "run" / "ranks").mkdir(parents=True)
    (tmp_path / "run" / "ranks" / "0.box").touch()
    code, _, errors = run("", "--nproc", "1")
    assert code == 1
    assert str(tmp_path / "run") in errors
    assert "Traceback" not in errors
    assert [path.name for path in (tmp_path / "run").rglob("*.box")] == ["0.box"]
    assert not (tmp_path / "run" / "run.json").exists()
