"""The server over HTTP: access, served files, responses, shutdown."""

import http.client
import os
import pty
import shutil
import signal
import socket
import subprocess
import sys
import threading

import pytest

from miniray.dashboard import DashboardServer, poller
from miniray.doctor import runfile
from miniray.doctor.reader import read_box
from tests.dashboard import synthetic
from tests.doctor.helpers import wait_until

PATHS = ("/", "/app.js", "/style.css", "/plotly.min.js", "/api/news", "/api/timelines?run=a")


@pytest.fixture
def run_dir(root):
    """A finished run with two ranks."""
    path = root / "a"
    synthetic.write_run(path, 2, state="finished")
    synthetic.append_metrics(path, *({"epoch": n, "loss": 1.0 / (n + 1)} for n in range(10)))
    for rank in range(2):
        synthetic.still_rank(path, rank, 2)
        (path / "ranks" / f"{rank}.log").write_text(f"rank {rank} says hello\n")
    return path


# -- access --------------------------------------------------------------------------------------


def test_requests_without_token_are_forbidden(root, run_dir, start):
    client = start(root)
    for path in PATHS:
        assert client.ask(path, cookie=False)[0] == 403
        token = f"{'&' if '?' in path else '?'}token=wrong"
        assert client.ask(path + token, cookie=True)[0] == 403
    assert client.ask("/api/stack?run=a&rank=0", "POST", cookie=False)[0] == 403
    body = client.ask("/", cookie=False)[1]
    assert b"miniray dashboard" in body  # what to do


def test_only_loopback_hosts_are_allowed(root, run_dir, start):
    client = start(root)
    assert client.ask("/", Host="evil.example")[0] == 403
    assert client.ask("/", Host=f"localhost:{client.server.port}")[0] == 200
    assert client.ask("/", Origin="http://localhost:1")[0] == 403
    assert client.ask("/api/timelines?run=a&buckets=9", Sec_Fetch_Site="same-site")[0] == 403
    assert client.ask("/api/stack?run=a&rank=0", "POST", Sec_Fetch_Site="cross-site")[0] == 403
    with pytest.raises(ValueError, match="ssh -L"):
        DashboardServer(root, host="0.0.0.0")


def test_address_sets_cookie(root, run_dir, start):
    client = start(root)
    connection = http.client.HTTPConnection("127.0.0.1", client.server.port, timeout=60)
    connection.request("GET", f"/?token={client.server.gate.token}")
    answer = connection.getresponse()
    answer.read()
    connection.close()
    assert answer.status == 200
    cookie = answer.getheader("Set-Cookie")
    assert cookie == client.server.gate.cookie()
    assert "frame-ancestors 'none'" in answer.getheader("Content-Security-Policy")
    assert client.ask("/api/stack?run=a&rank=0")[0] == 404  # GET changes nothing
    for method in ("PUT", "DELETE", "HEAD", "OPTIONS"):
        assert client.ask("/", method)[0] == 501


def test_code_is_exchanged_for_the_cookie_once(root, run_dir, start):
    client = start(root, run="a")
    gate = client.server.gate
    address = client.server.new_browser_url()
    assert gate.token not in address
    path = address.removeprefix(client.server.address.rstrip("/"))
    assert path.endswith("&run=a")

    def ask(path, **headers):
        connection = http.client.HTTPConnection("127.0.0.1", client.server.port, timeout=60)
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        answer.read()
        connection.close()
        return answer.status, answer.getheader("Set-Cookie")

    api = f"/api/timelines?run=a&buckets=9&{path.partition('?')[2]}"
    assert ask(api) == (403, None)  # works for the page only, and isn't used up
    assert ask(path, Host="evil.example") == (403, None)
    assert ask("/?code=wrong") == (403, None)
    assert ask(path) == (200, gate.cookie())
    assert ask(path) == (403, None)
    assert ask(path, Cookie=gate.cookie().partition(";")[0])[0] == 200  # a reload
    older, newer = client.server.new_browser_url(), client.server.new_browser_url()
    assert ask(f"/?{older.partition('?')[2]}")[0] == 403
    assert ask(f"/?{newer.partition('?')[2]}")[0] == 200


def test_browser_command_line_does_not_contain_the_token(root, run_dir, tmp_path):
    """``webbrowser`` passes the address as an argument, which all users can see."""
    opened = tmp_path / "opened"
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {opened}.partial\nmv {opened}.partial {opened}\n')
    browser.chmod(0o700)
    main, other = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.replace(", open_browser=False", ""), root],
        stdout=other, stderr=other, env={**os.environ, "BROWSER": f"{browser} %s"},
    )  # fmt: skip
    os.close(other)
    try:
        wait_until(opened.exists)
        assert "code=" in opened.read_text()
        printed = os.read(main, 4096).decode()
        token = printed.partition("token=")[2].split()[0]
        assert token not in opened.read_text()
    finally:
        process.kill()
        process.wait()
        os.close(main)


# -- served files --------------------------------------------------------------------------------


def test_files_outside_of_the_directory_are_not_served(root, run_dir, start, tmp_path):
    secret = tmp_path / "secret"
    shutil.copytree(run_dir, secret)
    (secret / "ranks" / "0.log").write_text("the secret\n")
    (root / "linked").symlink_to(secret)
    (run_dir / "ranks" / "1.log").unlink()
    (run_dir / "ranks" / "1.log").symlink_to(secret / "ranks" / "0.log")
    (run_dir / "ranks" / "1.box").unlink()
    (run_dir / "ranks" / "1.box").symlink_to(secret / "ranks" / "1.box")
    (run_dir / "metrics.jsonl").unlink()
    (run_dir / "metrics.jsonl").symlink_to(secret / "metrics.jsonl")
    shutil.copytree(run_dir, root / "told", symlinks=True)
    (root / "told" / "run.json").unlink()
    (root / "told" / "run.json").symlink_to(secret / "run.json")
    os.mkfifo(run_dir / "ranks" / "2.log")
    client = start(root)
    for path in (
        "/../server.py", "/static/app.js", "/app.js/../../server.py", "/%2e%2e/server.py",
        "/api/log?run=linked&rank=0", "/api/log?run=..&rank=0", "/api/log?run=../secret&rank=0",
        "/api/log?run=%2e%2e%2fsecret&rank=0", "/api/log?run=a%00&rank=0", "/api/log?run=&rank=0",
        "/api/log?run=a&rank=1", "/api/log?run=a&rank=2", "/api/search?run=a&rank=1&q=e",
        "/api/news?run=linked", "/api/news?run=told", "/api/timelines?run=linked&buckets=5",
        "/api/chart?run=x&name=l&by_rank=0",
    ):  # fmt: skip
        status, body = client.ask(path)
        assert status == 404, path
        assert b"secret" not in body
    for path in ("/api/log?run=a&rank=../0", "/api/log?run=a&rank=%2e%2e", "/api/log?run=a"):
        assert client.ask(path)[0] == 400
    assert client.json("/api/search?run=a&rank=all&q=s")["0"]["total"] == 1  # of the others nothing
    assert "1" not in client.json("/api/search?run=a&rank=all&q=s")
    state = client.state("a")
    assert [row["rank"] for row in state["ranks"]] == [0]
    assert "leads out" in state["damaged"]["ranks/1.box"]
    assert [chart["by_rank"] for chart in state["charts"]] == [True]  # the box's; not the file's
    name, runs = next(client.news())
    assert (name, [entry["name"] for entry in runs]) == ("runs", ["a"])


def test_parameters_are_checked(root, run_dir, start):
    client = start(root)
    for path in (
        "/api/timelines?run=a", "/api/timelines?run=a&buckets=0",
        "/api/timelines?run=a&buckets=1e9",
        "/api/timelines?run=a&buckets=nan", "/api/chart?run=a&run=a&name=loss&by_rank=0",
        "/api/chart?run=a&name=loss&by_rank=0&from=inf", "/api/search?run=a&rank=0&q=",
        f"/api/search?run=a&rank=0&q={'x' * 201}",
    ):  # fmt: skip
        assert client.ask(path)[0] == 400, path


# -- responses -----------------------------------------------------------------------------------


def test_state_of_finished_run(root, run_dir, start):
    client = start(root)
    state = client.state("a")
    assert state["verdict"] == "2 ranks finished at step 50"
    assert state["severity"] == "healthy"
    assert [(row["rank"], row["state"], row["step"]) for row in state["ranks"]] == [
        (0, "finished", 50), (1, "finished", 50),
    ]  # fmt: skip
    charts = {(chart["name"], chart["by_rank"]): chart["points"] for chart in state["charts"]}
    assert charts == {("loss", False): 10, ("loss", True): 100}
    curves = client.json("/api/chart?run=a&name=loss&by_rank=0")["curves"]
    assert curves[0]["y"] == [float(f"{1 / (n + 1):.6g}") for n in range(10)]
    by_rank = client.json("/api/chart?run=a&name=loss&by_rank=1")["curves"]
    assert [curve["rank"] for curve in by_rank] == [0, 1]
    timelines = client.json("/api/timelines?run=a&buckets=50")
    assert set(timelines["timelines"]) == {"0", "1"}
    assert len(timelines["timelines"]["0"]) == 50 * len(timelines["kinds"])
    assert client.json("/api/log?run=a&rank=1")["lines"] == ["rank 1 says hello"]
    assert client.json("/api/log?run=a&rank=7")["missing"] is True
    assert client.ask("/plotly.min.js")[1][:200].count(b"plotly.js") == 1


def test_losses_of_each_attempt_are_a_curve(root, run_dir, start):
    earlier = read_box(run_dir / "ranks" / "0.box").history
    synthetic.still_rank(run_dir, 0, 2, steps=20, earlier=earlier)
    client = start(root)
    client.state("a", lambda state: state.get("charts"))
    curves = client.json("/api/chart?run=a&name=loss&by_rank=1")["curves"]
    assert [(c["rank"], c["attempt"], c["points"]) for c in curves] == [
        (0, 1, 50),
        (0, 2, 20),
        (1, None, 50),
    ]


def test_losses_with_global_steps_continue_after_a_restart(root, run_dir, start):
    earlier = read_box(run_dir / "ranks" / "0.box").history
    synthetic.still_rank(run_dir, 0, 2, steps=20, earlier=earlier, offsets=[0, 45])
    client = start(root)
    state = client.state("a", lambda state: state.get("charts"))
    assert [row["step"] for row in state["ranks"]] == [65, 50]
    first, _ = client.json("/api/chart?run=a&name=loss&by_rank=1")["curves"]
    assert (first["rank"], first["attempt"]) == (0, None)
    assert first["x"] == list(range(1, 66))  # 46 to 50 were trained again
    assert first["y"][45] == 2.0


def test_curves_have_the_global_step_of_steps_and_epochs(root, start):
    path = root / "trained"
    synthetic.write_run(path, 1, state="finished", config={"trainer": "DDPTrainer"})
    epochs = [
        {"epoch": e, "step": 10 * e + 10, "loss": 9, "val_loss": 2 - e, "wer": e} for e in (0, 1)
    ]
    steps = [{"step": s, "epoch": 0, "loss": 5 / s, "lr": 0.1} for s in (1, 5, 10, 15, 20)]
    steps.insert(2, {"step": 5, "epoch": 0, "val_loss": 3.0})
    synthetic.append_metrics(path, *epochs)
    synthetic.append_metrics(path, *steps, name="steps.jsonl")
    client = start(root)
    charts = client.state("trained", lambda state: state.get("charts"))["charts"]
    assert {chart["name"] for chart in charts} == {"loss", "lr", "wer"}
    assert [chart.get("constant") for chart in charts if chart["name"] == "lr"] == [{"lr": 0.1}]
    curves = client.json("/api/chart?run=trained&name=loss&by_rank=0")["curves"]
    assert {c["metric"]: (c["axis"], c["x"]) for c in curves} == {
        "loss": ("step", [1, 5, 10, 15, 20]),  # not the means of epochs
        "val_loss": ("step", [5, 10, 20]),
    }


def test_epochs_of_a_trainer_are_numbered_from_1(root, start):
    path = root / "trained"
    synthetic.write_run(path, 1, state="finished", config={"trainer": "T", "unit": "round"})
    synthetic.append_metrics(path, *({"epoch": e, "loss": 2 - e} for e in (0, 1)))
    client = start(root)
    client.state("trained", lambda state: state.get("charts"))
    (curve,) = client.json("/api/chart?run=trained&name=loss&by_rank=0")["curves"]
    assert (curve["axis"], curve["x"]) == ("round", [1, 2])


def test_workers_killed_after_success_are_finished(root, ranks, start):
    """The trainer kills them after the run, so they record no exit."""
    path = root / "trained"
    synthetic.write_run(path, 1)
    pid = ranks.start(synthetic.train, path, 0, 1)
    wait_until((path / "metrics.jsonl").exists)
    runfile.finish_run(path, "finished")
    os.kill(pid, signal.SIGKILL)
    state = start(root).state("trained", lambda state: not state["live"])
    assert (state["severity"], state["ranks"][0]["state"]) == ("healthy", "finished")
    assert ranks.wait() == [-signal.SIGKILL]


def test_failed_rank_is_marked(root, start):
    synthetic.write_run(root / "b", 3, state="failed")
    for rank in range(2):
        synthetic.still_rank(root / "b", rank, 3)
    synthetic.still_rank(
        root / "b", 2, 3, kind="exception", type="ValueError", message="bad label",
        site=["/home/user/train.py", 33, "main"], traceback="",
    )  # fmt: skip
    state = start(root).state("b")
    assert state["severity"] == "failed"
    assert "rank 2" in state["verdict"]
    assert {row["rank"]: row["severity"] for row in state["ranks"]} == {0: "", 1: "", 2: "failed"}
    assert state["findings"][0]["ranks"] == [2]


def test_verdict_without_rank_records(root, start, golden):
    error = {"type": "ValueError", "message": "no data", "traceback": None}
    synthetic.write_run(root / "c", 2, state="failed", error=error)
    synthetic.write_run(root / "d", 2, state="finished")
    synthetic.write_run(root / "e", 2, pid=0)
    client = start(root)
    assert client.state("c")["verdict"].endswith("ValueError: no data")
    assert client.state("d")["severity"] == "none"
    assert client.state("d")["ranks"] == []  # as for `miniray demo`
    assert (client.state("e")["state"], client.state("e")["severity"]) == ("died", "failed")
    golden("verdicts.txt", "".join(f"{name}: {client.state(name)['verdict']}\n" for name in "cde"))


def test_truncated_record_is_listed_as_damaged(root, run_dir, start):
    os.truncate(run_dir / "ranks" / "1.box", 1000)
    (run_dir / "run.json").write_text('{"state": "fini')
    client = start(root)
    state = client.state("a")
    assert [row["rank"] for row in state["ranks"]] == [0]
    assert "1000 bytes" in state["damaged"]["ranks/1.box"]
    assert "run.json" in state["damaged"]
    assert client.ask("/api/stack?run=a&rank=1", "POST")[0] == 409


def test_invalid_runs_do_not_hide_others(root, run_dir, start):
    for name, text in (("deep", '{"a":' * 100_000), ("null", "null"), ("list", "[1]")):
        (root / name).mkdir()
        (root / name / "run.json").write_text(text)
    os.mkdir(os.fsencode(root) + b"/\xff")  # no UTF-8
    shutil.copy(run_dir / "run.json", os.fsencode(root) + b"/\xff/run.json")
    client = start(root)
    listed = next(value for name, value in client.news("a") if name == "runs" and value)
    assert {run["name"] for run in listed} == {"a", "deep", "null", "list", "?"}
    for name in ("deep", "null", "list"):
        assert "run.json" in client.state(name)["damaged"]


def test_incomplete_metrics_line_is_not_damage(root, run_dir, start):
    client = start(root)
    stream = client.news("a")
    points = lambda state: next(c["points"] for c in state["charts"] if not c["by_rank"])  # noqa: E731
    assert points(next(value for name, value in stream if name == "state")) == 10
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write('{"epoch": 10, "loss": 0.5')
        file.flush()
        with open(run_dir / "run.json", "r+") as run:  # another change triggers a new state
            text = run.read().replace('"finished"', '"interrupted"')
            run.seek(0)
            run.write(text)
        state = next(v for n, v in stream if n == "state" and v["state"] == "interrupted")
        assert points(state) == 10
        assert state["damaged"] == {}
        file.write("}\n")
    assert next(v for n, v in stream if n == "state" and points(v) == 11)
    stream.close()


def test_list_is_available_before_first_poll(root, run_dir, start, monkeypatch):
    monkeypatch.setattr(poller.Poller, "_loop", lambda self: None)
    assert [run["name"] for run in start(root).json("/api/news")["runs"]] == ["a"]


def test_run_deleted_while_shown(root, run_dir, start):
    client = start(root)
    stream = client.news("a")
    assert next(value for name, value in stream if name == "state")["state"] == "finished"
    # Delete it atomically, because the page would show the remaining ranks of a partly deleted run.
    shutil.rmtree(run_dir.rename(root.parent / "away"))
    seen = {}
    while seen.get("runs") != [] or seen.get("state", {}).get("state") != "deleted":
        name, value = next(stream)
        seen[name] = value
    assert len(seen["state"]["ranks"]) == 2  # the last known state remains
    stream.close()
    assert client.ask("/api/log?run=a&rank=0")[0] == 404
    assert client.ask("/api/stack?run=a&rank=0", "POST")[0] == 404


def test_stack_of_ended_rank_is_an_error(root, run_dir, start):
    client = start(root)
    status, body = client.ask("/api/stack?run=a&rank=0", "POST")
    assert status == 409
    assert b"rank 0" in body
    assert client.ask("/api/stack?run=a&rank=9", "POST")[0] == 404


def test_hang_lists_waiting_and_missing_ranks(root, ranks, start):
    path = root / "hung"
    synthetic.write_run(path, 3, limit=1.0)
    for rank in range(3):
        ranks.start(synthetic.hang, path, rank, 3, 1, 2)
    client = start(root)
    state = client.state("hung", lambda state: state["severity"] == "stuck")
    assert "rank 1" in state["verdict"]
    assert {row["rank"]: row["severity"] for row in state["ranks"]} == {0: "", 1: "stuck", 2: ""}
    (wait,) = state["waits"]
    assert wait["waiting"] == [0, 2]
    assert [missing["ranks"] for missing in wait["missing"]] == [[1]]
    assert wait["what"].startswith("all_reduce SUM (4,) float32 at train.py:16")
    found = client.json("/api/stack?run=hung&rank=1", "POST")
    functions = [frame["function"] for frame in found["threads"][0]["frames"]]
    assert "a_function_that_takes_long" in functions
    assert found["threads"][0]["main"] is True
    os.kill(ranks.pids[1], signal.SIGSTOP)
    wait_until(lambda: "kill -CONT" in client.json("/api/stack?run=hung&rank=1", "POST")["note"])
    os.kill(ranks.pids[1], signal.SIGCONT)
    synthetic.end(path, ranks)


# -- shutdown ------------------------------------------------------------------------------------


def test_close_stops_threads_with_open_connections(root, run_dir):
    before = set(threading.enumerate())
    server = DashboardServer(root, interval=0.1)
    server.start()
    silent = socket.create_connection(("127.0.0.1", server.port))  # never sends a request
    talking = socket.create_connection(("127.0.0.1", server.port))
    cookie = server.gate.cookie().partition(";")[0]
    talking.sendall(
        f"GET /api/news?run=a HTTP/1.0\r\nHost: localhost\r\nCookie: {cookie}\r\n\r\n".encode()
    )
    assert talking.recv(12) == b"HTTP/1.0 200"
    server.close()
    assert set(threading.enumerate()) == before
    server.close()
    silent.close()
    talking.close()


SCRIPT = """
import sys, threading
from pathlib import Path
from miniray.dashboard import serve
assert "torch" not in sys.modules and "plotly" not in sys.modules
serve(Path(sys.argv[1]), open_browser=False)
assert threading.enumerate() == [threading.main_thread()]
print("ended well")
"""


def test_ctrl_c_stops_the_server(root, run_dir):
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, root], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip
    try:
        first = process.stdout.readline()
        assert first.startswith("miniray dashboard: http://127.0.0.1:"), first
        assert "?token=" in first
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
        assert (process.wait(timeout=40), rest.strip()) == (0, "ended well")
    finally:
        process.kill()
        process.wait()


def test_invalid_arguments_raise(root, run_dir, monkeypatch):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        DashboardServer(root / "nowhere")
    with pytest.raises(FileNotFoundError, match="no run 'b'"):
        DashboardServer(root, run="b")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(OSError, match="in use"):
            DashboardServer(root, port=taken.getsockname()[1])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"miniray\[dashboard\]"):
        DashboardServer(root)
