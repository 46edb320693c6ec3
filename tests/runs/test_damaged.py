"""Damaged and hostile run directories: every tool shows them and none of them fails."""

import json
import os
import random
import resource
import subprocess
import sys

import pytest
from click.testing import CliRunner

from miniray import report
from miniray.cli import cli, top
from miniray.dashboard.access import NotFoundError, ServedDirectory
from miniray.dashboard.monitor import RunMonitor
from miniray.dashboard.poller import Listing
from miniray.doctor import reader
from miniray.doctor.diagnose import diagnose
from miniray.runs import files, listing, run_info
from tests.runs import damage


def look_at(root):
    """Read all runs with every tool."""
    found = {run.name: run for run in report.find_runs(root)}
    for command in (["runs"], ["runs", "--json"]):
        result = CliRunner().invoke(cli, [*command, "--runs-dir", str(root)])
        assert result.exit_code == 0, result
        assert "intact" in result.output
    served = ServedDirectory(root)
    listed = Listing(served)
    listed.refresh()
    assert {entry["name"] for entry in listed.runs} <= found.keys()
    for name, run in found.items():
        page = report.render(run)
        assert page.encode()
        diagnosis = diagnose(run.path, ask_for_stacks=False)
        json.dumps(diagnosis.to_json(), allow_nan=False)
        diagnosis.text(80)
        top.frame(reader.read_run(run.path), None, 80)
        try:
            watch = RunMonitor(served, name)
        except NotFoundError:  # a link that leads out of the folder
            continue
        watch.poll()
        json.dumps(watch.state)
    return found


def fuzz(tmp_path, seeds):
    damage.write_run(tmp_path / "runs" / "intact")
    for seed in seeds:
        folder = tmp_path / "runs" / f"damaged-{seed}"
        damage.write_run(folder)
        done = damage.damage(random.Random(seed), folder)
        try:
            assert look_at(tmp_path / "runs").keys() == {"intact", folder.name}
        except BaseException as error:
            error.add_note(f"seed {seed}: {done}")
            raise
        subprocess.run(["rm", "-rf", folder], check=True)


def test_an_intact_run_is_read_whole(tmp_path):
    damage.write_run(tmp_path / "x")
    (run,) = report.find_runs(tmp_path)
    assert (run.state, run.world_size, run.damaged, run.record.damaged) == ("failed", 2, {}, {})
    rank = run.record.ranks[0]
    assert rank.loaders[0].first_batch == ("ab",)
    assert rank.notes == damage.INFO["notes"]
    assert (rank.exit.kind, rank.exit.code, rank.exit.site.line) == ("exception", 1, 3)
    assert len(rank.events) == 30


@pytest.fixture
def limited_memory():
    """A reader that follows a number or a size in a damaged file fails here."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (3 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def test_random_damage_fails_no_tool(tmp_path, limited_memory):
    fuzz(tmp_path, range(25))


@pytest.mark.slow
@pytest.mark.parametrize("start", range(1000, 2000, 100))
def test_more_random_damage_fails_no_tool(tmp_path, limited_memory, start):
    fuzz(tmp_path, range(start, start + 100))


@pytest.mark.parametrize("size", [10**12, -1, "two", 2.5, True, [2], run_info.MAX_WORLD_SIZE + 1])
def test_a_world_size_that_cannot_be_is_left_out(tmp_path, size):
    (tmp_path / "run.json").write_text(json.dumps({"state": "finished", "world_size": size}))
    info, problem = run_info.read_run_info(tmp_path)
    assert info == {"state": "finished"}
    assert problem.startswith("invalid values: world_size is ")
    run = reader.read_run(tmp_path)
    assert (run.world_size, run.missing, list(run.damaged)) == (0, (), ["run.json"])


def test_a_world_size_in_a_record_that_cannot_be_damages_it(tmp_path):
    (tmp_path / "ranks").mkdir()
    damage.write_record(tmp_path / "ranks" / "0.box", {"rank": 0, "world_size": 10**12})
    damage.write_record(tmp_path / "ranks" / "1.box", {"rank": 1, "world_size": 2})
    run = reader.read_run(tmp_path)
    assert (run.world_size, list(run.ranks), list(run.damaged)) == (2, [1], ["ranks/0.box"])


@pytest.mark.parametrize("kind", ["fifo", "device", "directory", "loop", "socket"])
def test_only_regular_files_are_opened(tmp_path, kind):
    path = tmp_path / "run.json"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "socket":
        os.mknod(path, 0o140644)
    else:
        path.symlink_to("/dev/zero" if kind == "device" else path)
    with pytest.raises(OSError):
        files.open_file(path)
    found, problem = files.read_json(path)
    assert (found, bool(problem)) == ({}, True)
    assert listing.is_run(tmp_path)


def test_a_file_over_the_limit_is_not_read(tmp_path):
    path = tmp_path / "run.json"
    with open(path, "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError):
        files.read_bytes(path)
    assert files.read_json(path)[0] == {}
    with pytest.raises(OSError):
        files.read_records(path)
    assert files.read_last_lines(path, 100) == []


def test_nesting_is_limited():
    assert files.parse_json(damage.nested(files.MAX_DEPTH - 1, kind=True))
    for depth in (files.MAX_DEPTH + 1, 5000, 200_000):
        for kind in (True, False):
            with pytest.raises(ValueError):
                files.parse_json(damage.nested(depth, kind))


def test_records_are_read_around_damaged_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    long = b'{"x": "' + b"y" * files.MAX_LINE_BYTES + b'"}'
    lines = [b'{"a": "NaN"}', b"[1]", b"", long, b'{"a": 1', b'{"a": 2}', b'{"torn": ']
    path.write_bytes(b"\n".join(lines))
    found, damaged = files.read_records(path)
    assert [str(record["a"]) for record in found] == ["nan", "2"]
    assert damaged == [2, 4, 5]


def test_latest_is_the_same_run_in_every_command(tmp_path, monkeypatch):
    """The newest run has no rank records, and an older one was written to last."""
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("old", "new")):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        info = {**damage.RUN, "state": "finished", "started": f"2026-01-0{number + 1}T00:00:00"}
        (folder / "run.json").write_text(json.dumps(info))
    (tmp_path / "runs" / "old" / "ranks").mkdir()
    damage.write_record(tmp_path / "runs" / "old" / "ranks" / "0.box", damage.INFO)
    newest = str(tmp_path / "runs" / "new")
    run = CliRunner().invoke
    assert json.loads(run(cli, ["runs", "--json"]).output)[0]["path"] == newest
    assert json.loads(run(cli, ["report", "--json"]).output)["path"] == newest
    for command in (["doctor", "latest"], ["top", "--once", "latest"]):
        result = run(cli, command, standalone_mode=False)
        assert os.path.join("runs", "new") in result.output
        assert os.path.join("runs", "old") not in result.output


def test_a_damaged_run_is_one_line_of_the_list(tmp_path):
    damage.write_run(tmp_path / "intact")
    (tmp_path / "fifo").mkdir()
    os.mkfifo(tmp_path / "fifo" / "run.json")
    command = [sys.executable, "-m", "miniray", "runs", "--runs-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=True)
    states = dict(line.split()[:2] for line in done.stdout.splitlines()[1:])
    assert states == {"intact": "failed", "fifo": "unknown"}
