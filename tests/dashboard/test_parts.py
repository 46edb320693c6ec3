"""The parts below the server: curves, timelines, logs, access."""

import dataclasses
import json
import math

import numpy as np
import pytest

from miniray.dashboard import logs
from miniray.dashboard.access import Gate, NotFoundError, ServedDirectory, is_same_origin
from miniray.dashboard.poller import Listing
from miniray.dashboard.series import Metrics
from miniray.dashboard.timelines import KINDS, Timeline, get_window
from miniray.doctor.facts import gather
from miniray.doctor.model import Phase, Steps
from tests.doctor.records import NOW, at, call, calling, rank, run

# -- curves ---------------------------------------------------------------------------------------


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def values(metrics, name, rank=None):
    series = metrics.series[name, rank]
    return list(series.x), list(series.y)


def test_incomplete_line_is_read_when_finished(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path)
    assert not metrics.read()  # the file doesn't exist yet
    write(path, {"epoch": 0, "loss": 2.0})
    assert metrics.read()
    with open(path, "a") as file:
        file.write('{"epoch": 1, "lo')
        file.flush()
        metrics.read()
        assert values(metrics, "loss") == ([0.0], [2.0])
        file.write('ss": 1.5}\n')
    assert metrics.read()
    assert values(metrics, "loss") == ([0.0, 1.0], [2.0, 1.5])
    assert not metrics.read()
    assert metrics.damaged == 0


def test_truncated_or_replaced_file_is_read_from_start(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path)
    write(path, *({"epoch": n, "loss": float(n)} for n in range(5)))
    metrics.read()
    write(path, {"epoch": 0, "loss": 9.0})  # shorter
    metrics.read()
    assert values(metrics, "loss") == ([0.0], [9.0])
    other = tmp_path / "other"
    write(other, *({"epoch": n, "accuracy": 0.5} for n in range(9)))
    other.replace(path)  # longer, and another file
    metrics.read()
    assert list(metrics.series) == [("accuracy", None)]


def test_invalid_lines_are_counted_and_skipped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step": 1, "loss": 1}\nnonsense\n[1, 2]\n1}, {"a": 2\n\n{"step": 2, "loss": 2}\n'
    )
    metrics = Metrics(path)
    metrics.read()
    assert values(metrics, "loss") == ([1.0, 2.0], [1.0, 2.0])
    assert metrics.damaged == 3


def test_axes_ranks_and_non_metrics(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(
        path,
        {"epoch": 3, "step": 30, "rank": 1, "loss": 0.5, "synced": True, "note": "x", "time": 1.0},
        {"epoch": 4, "loss": 0.25},
        {"loss": 0.125},
        {"step": "NaN", "loss": 8},
        {"step": 10**400, "loss": 4},
        {"step": 7, "loss": 10**400},  # too large for a float: skipped
        {"step": 8, "loss": 2},
        {"step": 9, "timing": {"rollout": 0.5, "range": [0, 1], "time": 1.0}},
    )
    metrics = Metrics(path)
    metrics.read()
    assert values(metrics, "timing.rollout") == ([9.0], [0.5])
    assert set(metrics.series) == {
        ("loss", 1), ("loss", None), ("timing.rollout", None), ("timing.time", None)
    }  # fmt: skip
    assert values(metrics, "loss", 1) == ([30.0], [0.5])
    assert values(metrics, "loss") == ([4.0, 3.0, 4.0, 5.0, 8.0], [0.25, 0.125, 8.0, 4.0, 2.0])
    assert metrics.series["loss", 1].axis == "step"


def test_non_finite_values_are_marked_at_last_finite_value(tmp_path):
    path = tmp_path / "metrics.jsonl"
    losses = ["NaN", 2.0, "Infinity", math.nan, 1.0, "-Infinity", "a word"]
    write(path, *({"step": n, "loss": loss} for n, loss in enumerate(losses)))
    metrics = Metrics(path)
    metrics.read()
    found = metrics.series["loss", None].to_json(2000, None, None)
    assert (found["x"], found["y"]) == ([1, 4], [2, 1])
    assert found["bad"] == 4
    assert found["marks"] == [
        (0, None, "NaN"), (2, 2.0, "Infinity"), (3, 2.0, "NaN"), (5, 1.0, "-Infinity"),
    ]  # fmt: skip


def test_part_of_axis_has_more_detail(tmp_path):
    metrics = Metrics(tmp_path)
    for step in range(10_000):
        metrics.add("loss", None, "step", step, float(step % 7))
    series = metrics.series["loss", None]
    assert len(series.to_json(100, None, None)["x"]) <= 100
    part = series.to_json(100, 5000, 5050)
    assert part["x"] == list(range(4999, 5052))
    assert part["points"] == 10_000


# -- timelines ----------------------------------------------------------------------------------


def shares(timeline, begin, end, buckets=1):
    text = timeline.shares(np.linspace(begin, end, buckets + 1))
    size = len(KINDS)
    return [
        {k: int(text[i * size + j], 36) for j, k in enumerate(KINDS) if text[i * size + j] != "0"}
        for i in range(buckets)
    ]


def look(timeline, record, **fields):
    facts = gather(run(record, **fields)).ranks[record.rank]
    return timeline.update(facts)


def test_step_time_is_divided_as_recorded():
    timeline = Timeline()
    step = Steps(1, 1, 0, NOW - 90, 10.0, 2.0, 3.0, 1.0, 0.5, 8)
    record = rank(0, attached=NOW - 100, history=(step,), phase=Phase("data", at(1), NOW - 90))
    assert look(timeline, record) == [step]
    assert look(timeline, record) == []
    # 35 is all of the time: 4 of 10 s computing, 3 backward, 2 data, 1 collective.
    assert shares(timeline, NOW - 100, NOW - 90) == [
        {"compute": 14, "backward": round(10.5), "data": 7, "sync": round(3.5)}
    ]
    assert shares(timeline, NOW - 90, NOW) == [{"data": 35}]


def test_steps_of_all_attempts_are_returned_once():
    """Also if the dashboard starts after the restart, and if it watches it."""
    first = [Steps(n, 1, 0, NOW - 90 + n, 1.0, 0.0, 0.0, 0.0, 0.5, 8) for n in (1, 2, 3)]
    second = [dataclasses.replace(s, ended=s.ended + 20, attempt=1) for s in first]
    restarted = {"pid": 7, "total": dataclasses.replace(second[-1], count=3)}
    whole = rank(0, attached=NOW - 80, history=(*first, *second), **restarted)
    late, watching = Timeline(), Timeline()
    assert look(late, whole) == [*first, *second]
    assert look(watching, rank(0, attached=NOW - 100, history=tuple(first[:2]))) == first[:2]
    assert look(watching, whole) == [first[2], *second]
    assert look(watching, whole) == []


def test_waiting_rank_is_shown_as_sync():
    timeline = Timeline()
    record = calling(0, call(0, ago=60.0, is_open=True), attached=NOW - 100)
    look(timeline, record)
    assert (
        shares(timeline, NOW - 100, NOW, 5) == [{"other": 35}, {"other": 35}] + [{"sync": 35}] * 3
    )


def test_step_records_replace_observations():
    timeline = Timeline()
    look(timeline, rank(0, attached=NOW - 10, phase=Phase("data", at(1), NOW - 10)))
    assert shares(timeline, NOW - 10, NOW) == [{"data": 35}]
    step = Steps(1, 1, 0, NOW, 5.0, 0.0, 0.0, 0.0, None, 8)
    look(timeline, rank(0, attached=NOW - 10, history=(step,), phase=Phase("data", at(1), NOW)))
    assert shares(timeline, NOW - 10, NOW, 2) == [{"data": 35}, {"compute": 35}]


def test_dropping_old_moments_keeps_shares():
    timeline = Timeline()
    every = [Steps(n, 1, 0, NOW - 10_000 + n, 1.0, 0.5, 0.0, 0.0, None, 8) for n in range(1, 9001)]
    for first in range(0, 9000, 250):
        look(timeline, rank(0, attached=NOW - 10_000, history=tuple(every[first : first + 250])))
    assert len(timeline._moments) < 5000
    assert shares(timeline, NOW - 10_000, NOW - 1000) == [{"compute": 18, "data": 18}]
    begin, end, _ = get_window([timeline], 600, 10)
    assert end - begin == pytest.approx(600)


# -- logs -----------------------------------------------------------------------------------------


def test_log_is_read_from_its_end_and_followed(tmp_path):
    path = tmp_path / "0.log"
    path.write_bytes(b"one\ntwo\nthr")
    first = logs.tail(path)
    assert (first["lines"], first["rest"], first["end"]) == (["one", "two"], "thr", 8)
    with open(path, "ab") as file:
        file.write(b"ee\nfour\n")
    then = logs.tail(path, since=first["end"])
    assert (then["lines"], then["rest"], then["restarted"]) == (["three", "four"], "", False)
    path.write_bytes(b"again\n")
    assert logs.tail(path, since=then["end"])["lines"] == ["again"]


def test_long_log_is_read_in_pieces(tmp_path):
    path = tmp_path / "0.log"
    line = "x" * 99
    path.write_text("".join(f"{line}{n:08}\n" for n in range(20_000)))
    newest = logs.tail(path)
    assert newest["lines"][-1].endswith("00019999")
    assert 1000 < len(newest["lines"]) < 1500
    older = logs.tail(path, before=newest["start"])
    assert older["end"] == newest["start"]
    assert older["lines"][-1][-8:] == f"{int(newest['lines'][0][-8:]) - 1:08}"
    assert sum(len(text) for text in newest["lines"]) < 200_000


def test_progress_bars_show_their_last_update(tmp_path):
    path = tmp_path / "0.log"
    path.write_bytes(b"10%\r50%\r100%\r\n\xff\xfe\n\x1b[1;31mred\x1b[0m \x1b]8;;x\x07link\x1b[K\n")
    assert logs.tail(path)["lines"] == ["100%", "��", "red link"]
    assert logs.search(path, "link")["found"] == ["red link"]


def test_search_returns_last_matches_and_total(tmp_path):
    path = tmp_path / "0.log"
    path.write_text(
        "".join(f"step {n} {'Warning' if n % 2 else 'fine'}\n" for n in range(2000)) + "warning"
    )
    found = logs.search(path, "WARNING")
    assert found["total"] == 1001
    assert len(found["found"]) == 300
    assert found["found"][-2:] == ["step 1999 Warning", "warning"]
    path.write_text("")
    assert logs.search(path, "a")["total"] == 0


# -- access ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "origin", "ours"),
    [
        ("127.0.0.1:8000", None, True),
        ("localhost:8000", "http://localhost:8000", True),
        ("[::1]:8000", None, True),
        ("localhost:9000", "http://localhost:8000", False),  # a page of a different program
        ("evil.example:8000", None, False),
        ("127.0.0.1.evil.example", None, False),
        ("localhost.evil.example:80", None, False),
        ("127.0.0.1:8000", "http://evil.example", False),
        ("127.0.0.1:8000", "null", False),
        ("", None, False),
        (None, None, False),
        ("[", None, False),
    ],
)
def test_is_same_origin(host, origin, ours):
    assert is_same_origin(host, origin) is ours


def test_the_token_in_the_cookie():
    gate = Gate(8080)
    assert gate.allows({"Cookie": f"a=b; {gate.cookie_name}={gate.token}"}, None)
    assert gate.allows({}, gate.token)
    for headers in ({}, {"Cookie": ""}, {"Cookie": f"{gate.cookie_name}=x"}, {"Cookie": "=;;é"}):
        assert not gate.allows(headers, None)
    assert not gate.allows({"Cookie": f"{gate.cookie_name}={gate.token}"}, "wrong")
    assert "HttpOnly" in gate.cookie()
    assert "SameSite=Strict" in gate.cookie()


def test_runs_are_sorted_across_time_zones(tmp_path):
    began = {"first": "2026-01-01T12:00:00+02:00", "second": "2026-01-01T10:30:00+00:00"}
    for name, moment in began.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(json.dumps({"started": moment}))
    listing = Listing(ServedDirectory(tmp_path))
    listing.refresh()
    assert [run["name"] for run in listing.runs] == ["second", "first"]


def test_served_directory_may_be_a_single_run(tmp_path):
    one = tmp_path / "one"
    (one / "ranks").mkdir(parents=True)
    (one / "ranks" / "0.box").touch()
    (tmp_path / "notes").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    assert ServedDirectory(tmp_path).names() == ["one"]
    alone = ServedDirectory(one)
    assert alone.names() == ["one"]
    assert alone.run("one") == one
    for name in ("two", "..", "ranks", "", "notes", "loop"):
        with pytest.raises(NotFoundError):
            alone.run(name)
        with pytest.raises(NotFoundError):
            ServedDirectory(tmp_path).run(name)
