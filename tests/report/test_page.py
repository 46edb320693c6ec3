"""Reports of finished, failed, killed and running runs, and the escaping of their content."""

import dataclasses
import html.parser
import json
import os
import re
import signal
import socket
import threading
from pathlib import Path

import numpy as np
import pytest

import miniray
from miniray import doctor, report
from miniray.doctor import recorder
from miniray.doctor.loader_observer import note_row_cache
from miniray.doctor.model import Phase
from miniray.report import render
from miniray.report.ranks import get_phase_seconds
from miniray.report.storage import measure_storage
from miniray.train import DataParallelTrainer
from tests.doctor import records
from tests.doctor.helpers import wait_until
from tests.doctor.records import NOW, at, call, calling, ended
from tests.report.conftest import FETCHES
from tests.train.workers_for_tests import Counter

_VOID = {"meta", "br", "hr", "img", "input", "path", "circle", "polyline"}


class Checker(html.parser.HTMLParser):
    """Check that all tags are closed in order, and collect the text of the page.

    ``sections`` has the text of each section by id, ``classes`` its CSS classes, and ``headings``
    the text of h1 and h2 elements.
    """

    def __init__(self):
        super().__init__()
        self.open, self.text, self.headings = [], [], []
        self.sections, self.classes = {}, {}
        self._section = ""

    def handle_starttag(self, tag, attrs):
        if tag == "section":
            self._section = dict(attrs)["id"]
            assert self._section not in self.sections  # also: one verdict
            self.sections[self._section] = []
            self.classes[self._section] = (dict(attrs).get("class") or "").split()
        if tag not in _VOID or (tag == "path" and not self.get_starttag_text().endswith("/>")):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        if tag == "section":
            self._section = ""

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.text.append(data)
            if self._section:
                self.sections[self._section].append(data)
            if self.open[-1] in ("h1", "h2"):
                self.headings.append(data)


def parse(page):
    """Check that the page is well-formed and loads nothing, and return its parts."""
    checker = Checker()
    checker.feed(page.replace("<wbr>", ""))  # allows a line break inside a name
    assert checker.open == []
    assert not FETCHES.search(page.replace("data:image", ""))
    checker.text = join(checker.text)
    checker.sections = {name: join(parts) for name, parts in checker.sections.items()}
    return checker


def join(parts):
    return " ".join(" ".join(parts).split())


def write_page(folder):
    return parse(report.write_report(folder).read_text("utf-8"))


# -- real runs ------------------------------------------------------------------------------------


class CounterTrainer(DataParallelTrainer):
    def create_worker(self, worker_id, **kwargs):
        return Counter.remote(worker_id)


def test_training_run_writes_report(tmp_path):
    with CounterTrainer(2, run_dir=tmp_path / "run", progress=False, seed=3) as trainer:
        trainer.train(epochs=3)
    page = parse((tmp_path / "run" / "report.html").read_text("utf-8"))
    assert list(page.sections)[:2] == ["verdict", "curves"]
    assert {"sync", "memory", "ranks", "epochs", "environment"} <= set(page.sections)
    assert "CounterTrainer · 2 workers · local engine" in page.text
    assert page.classes["verdict"] == ["alert", "good"]
    # Losses are 1/(epoch+1) + worker id: 1.5, 1.0, 0.8333 on average.
    assert "loss 0.8333 best, epoch 3" in page.text
    assert "strategy average" in page.sections["sync"]
    assert "syncs 3" in page.sections["sync"]
    assert f"miniray {miniray.__version__}" in page.text
    # Write it again from the files, after the workers have exited.
    page = write_page(tmp_path / "run")
    assert page.classes["verdict"] == ["alert", "good"]
    assert "rank 1 finished" in page.sections["ranks"]


@miniray.remote
class Broken(Counter.__wrapped__):
    def train_epoch(self, epoch):
        if epoch == 1:
            raise ValueError("row 4711 <script>alert(1)</script> & cannot be decoded")
        return super().train_epoch(epoch)


def test_failed_run_report_shows_the_error(tmp_path):
    with (
        pytest.raises(ValueError, match="row 4711"),
        DataParallelTrainer(1, worker=Broken, run_dir=tmp_path / "run", progress=False,
                            backend="inline") as trainer,
    ):  # fmt: skip
        trainer.train(epochs=3)
    text = (tmp_path / "run" / "report.html").read_text("utf-8")
    page = parse(text)
    assert page.classes["verdict"] == ["alert", "bad"]
    assert page.headings[1].startswith("ValueError: row 4711 <script>")  # text, not a tag
    assert "<script" not in text
    assert "worker 0" in page.sections["verdict"]


def test_report_write_error_does_not_fail_the_run(tmp_path, capfd):
    (tmp_path / "run" / "report.html").mkdir(parents=True)
    with DataParallelTrainer(1, worker=Counter, run_dir=tmp_path / "run", progress=False,
                             backend="inline") as trainer:  # fmt: skip
        result = trainer.train(epochs=1)
    assert result.epochs == 1
    (said,) = [line for line in capfd.readouterr().err.splitlines() if "report" in line]
    assert said.startswith(f"no report of {tmp_path / 'run'}: ")


def train_forever(folder):
    with DataParallelTrainer(1, worker=Counter, run_dir=folder, progress=False,
                             backend="inline") as trainer:  # fmt: skip
        trainer.train(epochs=10**6)


def test_duration_of_killed_run_ends_at_last_heartbeat(make_run, ranks):
    folder = make_run(state="running", started="2026-01-01T10:00:00+00:00", pid=2**22 + 7,
                      process_started=1.0, host=socket.gethostname())  # fmt: skip
    ranks.start(one_rank, folder, 0)
    ranks.wait()
    for path in (*folder.glob("*"), *folder.glob("ranks/*")):
        os.utime(path, (1, 1))
    run = report.read(folder)
    assert run.state == "died"
    assert run.seconds == pytest.approx(run.record.ranks[0].heartbeat - run.started)


def test_killed_run_report(tmp_path, ranks):
    folder = tmp_path / "run"
    pid = ranks.start(train_forever, folder)
    wait_until(lambda: report.run.is_run(folder) and report.read(folder).last_metrics())
    assert report.read(folder).state == "running"
    assert report.read(folder).living == f"process {pid}"
    os.kill(pid, signal.SIGKILL)
    ranks.wait()
    page = write_page(folder)
    assert page.classes["verdict"] == ["alert", "bad"]
    assert "curves" in page.sections
    assert report.read(folder).living == ""


def one_rank(folder, rank):
    doctor.attach(folder, rank=rank, world_size=2, instrumented=False)
    for step in range(4):
        ids = [8 * step + 2 * i + rank for i in range(4)]
        doctor.step(loss=1.0 / (step + 1) if (rank, step) != (1, 2) else float("nan"),
                    sample_ids=ids, epoch=0)  # fmt: skip


def test_run_without_run_json_has_rank_sections(tmp_path, ranks):
    folder = tmp_path / "foreign"
    for rank in range(2):
        ranks.start(one_rank, folder, rank)
    assert ranks.wait() == [0, 0]
    (folder / "run.json").unlink(missing_ok=True)
    page = write_page(folder)
    assert "finished" in page.text
    assert "loss by rank" in page.sections["curves"]
    assert page.classes["verdict"] == ["alert", "warn"]  # the loss was NaN
    assert "32 samples, 32 distinct" in page.sections["data"]
    assert "0%" in page.sections["data"]  # the ranks share nothing
    assert {"verdict", "time", "data", "memory", "ranks"} <= set(page.sections)


def test_overlapping_samples_are_shown(tmp_path, ranks):
    folder = tmp_path / "foreign"
    ranks.start(one_rank, folder, 0)
    ranks.wait()
    ranks.start(share_rows, folder)
    ranks.wait()
    data = write_page(folder).sections["data"]
    # Ids 0, 2, …, 30 on rank 0; 0, 1, …, 15 on rank 1: 8 of 16 are the same.
    assert "32 samples, 24 distinct, 8 " in data
    assert "50%" in data


def share_rows(folder):
    doctor.attach(folder, rank=1, world_size=2, instrumented=False)
    for step in range(4):
        doctor.step(loss=1.0, sample_ids=range(4 * step, 4 * step + 4), epoch=0)


# -- tiles --------------------------------------------------------------------------------------


def test_tiles_show_held_out_scores_first(make_run):
    lines = [
        {"epoch": e, "loss": -0.1 * e, "reward": 0.1 * e, "val_reward": 0.2 * e, "kept": 7,
         "timing": {"reward": 0.5 - 0.1 * e}}
        for e in range(3)
    ]  # fmt: skip
    page = report.write_report(make_run(metrics=lines)).read_text("utf-8")
    tiles = re.findall(r'<div class="tile"><span>(.*?)</span><b>(.*?)</b>', page)
    assert tiles == [("epochs", "3"), ("val_reward", "0.4"), ("loss", "-0.2")]
    assert "<b>3</b><span>0 to 2" in page  # what "best, epoch 2" counts from


def test_tiles_show_last_value_of_unknown_metrics(make_run):
    lines = [{"step": i, "pi": value} for i, value in enumerate((3.2, 3.0, 3.14))]
    page = report.write_report(make_run(metrics=lines)).read_text("utf-8")
    tiles = re.findall(r'<div class="tile"><span>(.*?)</span><b>(.*?)</b><span>(.*?)</span>', page)
    assert tiles[-1][:2] == ("pi", "3.14")


def test_constant_metrics_are_listed_without_chart(make_run):
    lines = [{"epoch": e, "loss": 1 / (e + 1), "places": 4, "rate": 2.5} for e in range(3)]
    page = report.write_report(make_run(metrics=lines)).read_text("utf-8")
    assert "places 4, rate 2.5" in parse(page).sections["curves"]
    assert re.findall('aria-label="(.*?)"', page) == ["loss by epoch"]


def test_curves_of_a_trainer_show_steps_and_number_epochs_from_1(make_run):
    epochs = [{"epoch": e, "step": 10 * e + 10, "loss": 9.0, "val_loss": 2.0 - e} for e in (0, 1)]
    steps = [{"step": s, "epoch": 0, "loss": 5 / s, "lr": 0.1} for s in (1, 5, 10, 15, 20)]
    folder = make_run(metrics=epochs, steps=steps, config={"trainer": "DDPTrainer"},
                      events=[{"event": "stopped", "epoch": 1, "reason": "why"}])  # fmt: skip
    page = write_page(folder)
    text = (folder / "report.html").read_text("utf-8")
    assert re.findall('aria-label="(.*?)"', text) == ["loss by step"]
    assert "val_loss 1 best, step 20" in page.text
    assert "Constant: lr 0.1" in page.sections["curves"]
    assert "stopped 2 why" in page.sections["failures"]
    assert "epochs 2 " in page.text
    assert "1 to 2" not in page.text


def test_steps_of_reinforcement_learning_are_not_called_epochs(make_run, ranks):
    lines = [{"epoch": e, "step": e + 1, "reward": e / 4} for e in range(3)]
    folder = make_run(metrics=lines, config={"trainer": "GRPOTrainer", "unit": "step"})
    ranks.start(one_rank, folder, 0)
    ranks.wait()
    page = write_page(folder)
    assert "steps 3" in page.text
    assert "reward 0.5 best, step 3" in page.text
    assert page.sections["epochs"].startswith("Steps step reward 1 0 2 0.25 3 0.5")
    assert "epoch" not in page.sections["ranks"].partition("rank 0")[0]


def test_single_values_are_text(make_run):
    lines = [{"epoch": e, "loss": 1.0 + e} for e in range(3)]
    lines[1]["restarts"] = 1
    page = write_page(make_run(metrics=lines, config={"trainer": "T"}))
    assert "Recorded once: restarts 1 (epoch 2)" in page.sections["curves"]


def test_storage_is_listed(make_run, ranks):
    events = [
        {"event": "snapshots_started", "bytes": 8_000_000, "every": 3},
        {"event": "checkpoint_memory_reserved", "bytes": 4_000_000},
    ]
    folder = make_run(metrics=[{"epoch": 0, "loss": 1.0}], events=events)
    for name in ("epoch-00000001", "epoch-00000002"):
        (folder / "checkpoints" / name).mkdir(parents=True)
        (folder / "checkpoints" / name / "weights").write_bytes(bytes(250_000))
    for rank in range(2):  # both measure the same store and use the same cache
        ranks.start(rank_with_storage, folder, rank)
    ranks.wait()
    found = measure_storage(report.read(folder).record, report.read(folder).events)
    assert [(use.part, use.place, use.nbytes) for use in found] == [
        ("snapshots", "shared memory", 8_000_000),
        ("copies for checkpoints", "shared memory", 4_000_000),
        ("object store", "shared memory", 7_000_000),
        ("object store", "disk", 1_000_000),
        ("checkpoints", "disk", 500_000),
        ("row cache", "disk", 3_000_000),
    ]
    shown = write_page(folder).sections["memory"]
    assert "checkpoints disk 500 kB 2 saved" in shown
    events += [{"event": "snapshots_disabled", "bytes": 1}]  # after a resume
    (folder / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    assert "snapshots shared" not in write_page(folder).sections["memory"]


def rank_with_storage(folder, rank):
    box = recorder.start(folder, rank, 2)
    box.gauges["object_store"] = lambda: (7_000_000, 9_000_000, 20_000_000, 1_000_000)
    note_row_cache("/cache/rows/a.arrow", 2_000_000)
    note_row_cache("/cache/rows/b.arrow", 1_000_000)
    wait_until(lambda: "object_store" in box.info["notes"])
    recorder.stop()


# -- colors ---------------------------------------------------------------------------------------


def luminance(colour):
    """Return the relative luminance of ``#rrggbb`` as WCAG defines it."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("sheet", ["report/style.css", "dashboard/static/style.css"])
def test_text_on_colored_background_has_contrast(sheet):
    text = (Path(miniray.__file__).parent / sheet).read_text("utf-8")
    for block in re.findall(r":root \{(.*?)\}", text, re.DOTALL):
        known = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})\b", block))
        grounds = {n: f for n in known if n != (f := re.sub("-back$|bg$", "", n)) and f in known}
        for ground, front in grounds.items():
            dark, light = sorted(map(luminance, (known[ground], known[front])))
            assert (light + 0.05) / (dark + 0.05) >= 4.5, (front, ground)


# -- runs written by hand -------------------------------------------------------------------------


def test_directory_without_run_raises(tmp_path):
    with pytest.raises(FileNotFoundError):
        report.write_report(tmp_path)
    with pytest.raises(FileNotFoundError):
        report.write_report(tmp_path / "nowhere")
    assert list(tmp_path.iterdir()) == []


def test_text_from_run_is_escaped(make_run):
    evil = "\"'><script>alert(1)</script><img src=x onerror=alert(1)>\x07\ud800"
    folder = make_run(
        metrics=[{"epoch": 0, evil: 1.0, "loss": evil}, {"epoch": 1, evil: 2.0}],
        events=[{"event": evil, "reason": evil, "worker": evil, "time": evil}],
        config={evil: evil, "trainer": evil, "backend": evil, "sync_strategy": evil},
        versions={"miniray": "0", evil: evil},
        host=evil, platform=evil, command=evil, stop_reason=evil, seed=evil,
        error={"type": evil, "message": evil + "\n" + evil, "traceback": evil},
        attempts=[{"state": evil, "started": evil, "error": {"type": evil, "message": evil}}],
        sync={"num_syncs": 1, "last_error": evil, "skipped": {evil: 1}},
    )  # fmt: skip
    (folder / "doctor.txt").write_text("<script>alert(2)</script>")
    page = report.write_report(folder).read_text("utf-8")
    tags = {tag for tag in ("<script", "<img") if tag in page}
    assert tags == set()
    checker = Checker()
    checker.feed(page.replace("<wbr>", ""))  # allows a line break inside a name
    assert checker.open == []
    assert "\x07" not in page


def test_damaged_files_are_listed_and_the_rest_is_shown(make_run):
    folder = make_run(metrics=[{"epoch": 0, "loss": 2.0}, {"epoch": 1, "loss": 1.0}])
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text(
        "\n".join([lines[0], "{torn", lines[1], '{"epoch": 2, "l'])
    )
    (folder / "run.json").write_text('{"state": "fini')
    (folder / "ranks").mkdir()
    (folder / "ranks" / "0.box").write_bytes(b"no box")
    page = write_page(folder)
    assert "loss 1 best, epoch 1" in page.text
    for file in ("metrics.jsonl : can't read line 2", "run.json", "ranks/0.box"):
        assert file in page.sections["damaged"]


def test_nan_in_metrics_is_marked(make_run):
    folder = make_run(
        metrics=[{"epoch": e, "loss": "NaN" if e == 2 else 1.0 / (e + 1)} for e in range(5)]
    )
    page = report.write_report(folder).read_text("utf-8")
    assert page.count('class="x"') == 1
    assert "loss: nan at epoch 2" in page
    assert "loss 0.2 best, epoch 4" in parse(page).text


def test_nan_in_metrics_is_not_healthy(make_run, ranks, golden):
    """Without losses in the rank records, NaN is only in metrics.jsonl."""
    losses = (1.0, "NaN", "Infinity", 0.5)
    folder = make_run(metrics=[{"epoch": e, "loss": loss} for e, loss in enumerate(losses)])
    ranks.start(rank_without_steps, folder)
    ranks.wait()
    page = write_page(folder)
    assert page.classes["verdict"] == ["alert", "warn"]
    golden("nan_in_metrics.txt", page.sections["verdict"] + "\n")


def rank_without_steps(folder):
    doctor.attach(folder, rank=0, world_size=1, instrumented=False)


def test_ranks_without_steps_have_no_phase_bars(make_run, ranks):
    folder = make_run(metrics=[{"epoch": e, "seconds": 1.0 + e, "loss": 1.0} for e in range(3)])
    ranks.start(rank_without_steps, folder)
    ranks.wait()
    page = report.write_report(folder).read_text("utf-8")
    assert "time" in parse(page).sections
    assert 'aria-label="seconds by epoch"' in page
    assert "p-start" not in page.partition("</style>")[2]


def test_report_of_ten_thousand_lines_is_small(make_run):
    random = np.random.default_rng(0)
    lines = [{"step": i, "loss": float(x), "lr": 1e-3} for i, x in enumerate(random.random(10_000))]
    page = render(report.read(make_run(metrics=lines)))
    assert len(page) < 120_000
    assert "200 of 10,000 lines" in page


def test_short_sync_times_are_shown_in_milliseconds(make_run):
    spent = {"collect": 0.0123, "combine": 12.0, "distribute": 0.5}
    folder = make_run("run", metrics=[{"epoch": 0}], sync={"num_syncs": 3, "seconds": spent})
    text = write_page(folder).sections["sync"]
    assert re.findall(r"[\d.]+ m?s\b", text) == ["12.3 ms", "12 s", "500 ms"]


def test_events_and_attempts_are_listed(make_run):
    folder = make_run(
        started="2026-01-01T10:00:00+00:00", ended="2026-01-01T10:01:00+00:00",
        events=[{"time": "2026-01-01T10:00:30+00:00", "event": "worker_failed", "worker": 2,
                 "epoch": 7, "reason": "killed by SIGKILL\nmore"},
                {"time": "2026-01-01T10:00:31+00:00", "event": "worker_replaced", "worker": 2}],
        attempts=[{"state": "died", "started": "2025-12-31T09:00:00+00:00", "world_size": 4}],
        metrics=[{"epoch": e, "loss": 1.0} for e in range(3)],
    )  # fmt: skip
    page = write_page(folder)
    assert "30 s worker failed 2 7 killed by SIGKILL" in page.sections["failures"]
    assert "1 2025-12-31 09:00:00 died 4" in page.sections["failures"]
    assert "epochs 3 0 to 2" in page.text


def test_time_after_the_end_of_the_run_is_excluded(make_run, ranks):
    folder = make_run()
    ranks.start(one_rank, folder, 0)
    ranks.wait()
    (rank,) = report.read(folder).record
    spent = get_phase_seconds(rank, rank.attached)
    assert sum(spent.values()) == pytest.approx(rank.total.ended - rank.attached, abs=0.05)
    assert sum(get_phase_seconds(rank, None).values()) >= sum(spent.values())


def test_unfinished_wait_counts_as_collective_time():
    last = dataclasses.replace(calling(0).total, ended=NOW - 300)
    working = calling(0, history=(last,), total=last)
    waiting = calling(0, call(0, ago=300, is_open=True), history=(last,), total=last)
    before, after = (get_phase_seconds(rank, NOW) for rank in (working, waiting))
    assert after["collective"] == pytest.approx(before["collective"] + 300, abs=1)
    assert after["other"] == pytest.approx(before["other"] - 300, abs=1)
    assert sum(after.values()) == pytest.approx(sum(before.values()))


@pytest.mark.parametrize(
    ("phase", "kind"),
    [("compute", "compute"), ("optimizer", "compute"), ("data", "data"), ("epoch end", "other")],
)
def test_unfinished_step_counts_for_its_phase(phase, kind):
    last = dataclasses.replace(calling(0).total, ended=NOW - 300)
    since = Phase(phase, at(1), NOW - 300.5)
    idle = records.rank(0, 2, history=(last,), total=last, phase=since)
    killed = ended("signal", at=idle.heartbeat)
    # One that lives is idle once its run is over; one that was ended, was ended in its step.
    before = get_phase_seconds(idle, NOW)
    after = get_phase_seconds(dataclasses.replace(idle, exit=killed), NOW)
    grown = {name: round(after[name] - before[name]) for name in after if name != "other"}
    expected = {"start": 0, "data": 0, "compute": 0, "backward": 0, "collective": 0}
    assert grown == (expected if kind == "other" else {**expected, kind: 300})
    assert sum(after.values()) == pytest.approx(sum(before.values()))


def test_saved_diagnosis_takes_precedence(make_run, ranks):
    folder = make_run(state="failed", config={"launcher": "miniray run"})
    ranks.start(one_rank, folder, 0)
    ranks.wait()
    finding = {"code": "x", "severity": "stuck", "title": "rank 0 is blocked at train.py:28"}
    finding |= {"evidence": ["rank 0: step 0"], "cause": "A lock.", "fix": "look at its stack"}
    (folder / "doctor.json").write_text(json.dumps({"findings": [finding], "notes": []}))
    (folder / "doctor.txt").write_text("STUCK: rank 0\n  train.py:28 train\n")
    (folder / "ranks" / "0.log").write_bytes(b"1%\r99%\n\x1b[31mlast words\x1b[0m\n")
    page = write_page(folder)
    assert page.sections["ranks"].endswith("99% last words")
    assert page.headings[1] == "STUCK: rank 0 is blocked at train.py:28"
    assert page.classes["verdict"] == ["alert", "bad"]
    assert "train.py:28 train" in page.sections["verdict"]


TRACE = "Traceback (most recent call last):\n  File 'a.py'\nKeyError: 'the row'"


@pytest.mark.parametrize(
    ("error", "heading"),
    [
        (
            {
                "type": "TaskError(KeyError)",
                "message": f"f\n{TRACE}",
                "remote_traceback": TRACE,
            },
            "KeyError: 'the row'",
        ),
        # Text of the user that looks like the traceback of a worker.
        ({"type": "ValueError", "message": f"bad output\n{TRACE}"}, "ValueError: bad output"),
    ],
)
def test_error_is_shown_as_the_user_raised_it(make_run, error, heading):
    page = write_page(make_run(state="failed", error=error))
    assert heading in page.headings
    assert "File 'a.py'" in page.sections["verdict"]


def test_interrupted_run_has_only_a_warning(make_run):
    error = {"type": "KeyboardInterrupt", "message": "", "traceback": "Traceback ..."}
    page = write_page(make_run(state="interrupted", error=error))
    assert page.classes["verdict"] == ["alert", "warn"]
    assert list(page.sections) == ["verdict", "environment"]


def test_verdict_wording(make_run, ranks, golden):
    """The verdict of a run that failed, died, was interrupted, or hung and was diagnosed."""
    error = {"type": "ValueError", "message": "no data"}
    interrupted = {"type": "KeyboardInterrupt", "message": ""}
    gone = {"pid": 2**22 + 5, "process_started": 1.0, "host": socket.gethostname()}
    folders = [
        make_run("failed", state="failed", error=error),
        make_run("interrupted", state="interrupted", error=interrupted),
        make_run("died", state="running", **gone),
        make_run("hung", state="failed", error=error),
    ]
    finding = {"code": "x", "severity": "stuck", "title": "Rank 0 is blocked in `main`"}
    finding |= {"evidence": ["rank 0: step 0"], "cause": "A lock.", "fix": "Release the `lock`."}
    (folders[3] / "doctor.json").write_text(json.dumps({"findings": [finding], "notes": []}))
    (folders[3] / "doctor.txt").write_text("STUCK: Rank 0 is blocked\n")
    for name, losses in (("healthy", [1.0, 0.5]), ("nan", [1.0, "NaN"])):
        folders.append(make_run(name, metrics=[{"loss": x} for x in losses]))
        ranks.start(rank_without_steps, folders[-1])
        ranks.wait()
    lines = [f"{folder.name}: {write_page(folder).sections['verdict']}" for folder in folders]
    golden("verdicts.txt", "\n".join(lines) + "\n")


def test_back_quotes_in_findings_become_code(make_run):
    finding = {"code": "x", "severity": "stuck", "title": "`a<b>` hangs", "evidence": ["in `c`"]}
    finding |= {"cause": "`x` and a lone `", "fix": "call `d()`"}
    folder = make_run(state="failed")
    (folder / "doctor.json").write_text(json.dumps({"findings": [finding], "notes": []}))
    page = report.write_report(folder).read_text("utf-8")
    parse(page)
    codes = re.findall("<code>(.*?)</code>", page)
    assert codes == ["a&lt;b&gt;", "c", "x", "d()"]


def test_foreign_report_html_is_not_overwritten(make_run, tmp_path):
    folder = make_run()
    (folder / "report.html").write_text("<p>mine</p>")
    with pytest.raises(FileExistsError):
        report.write_report(folder)
    assert (folder / "report.html").read_text() == "<p>mine</p>"
    assert report.write_report(folder, tmp_path / "deep" / "r.html").is_file()
    (folder / "report.html").unlink()
    report.write_report(folder)
    report.write_report(folder)  # over its own


def test_pipes_and_links_are_written_to_and_not_replaced(make_run, tmp_path):
    folder, pipe, seen = make_run(), tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: seen.append(pipe.read_text("utf-8")))
    reader.start()
    assert report.write_report(folder, pipe) == pipe
    reader.join()
    assert pipe.is_fifo()
    parse(seen[0])
    (tmp_path / "link.html").symlink_to("page.html")
    report.write_report(folder, tmp_path / "link.html")
    assert (tmp_path / "link.html").is_symlink()
    assert (tmp_path / "page.html").is_file()


@pytest.mark.parametrize("text", ["null", "[1]", '"x"', '{"a":' * 100_000])
def test_invalid_run_json_is_listed_as_damaged(make_run, tmp_path, text):
    folder = make_run(metrics=[{"epoch": 0, "loss": 1.0}])
    (folder / "run.json").write_text(text)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write("[" * 100_000 + "\n")
    damaged = write_page(folder).sections["damaged"]
    assert "run.json" in damaged
    assert "metrics.jsonl : can't read line 2" in damaged
    (run,) = report.find_runs(tmp_path / "runs")
    assert (run.state, run.world_size, report.run.is_created_by_miniray(folder)) == (
        "unknown",
        0,
        False,
    )


def test_report_of_many_ranks_is_small(make_run):
    lines = [
        {"step": s, "rank": r, "loss": (s * 7 + r) % 11} for s in range(400) for r in range(64)
    ]
    page = render(report.read(make_run(metrics=lines, world_size=64)))
    assert "loss by rank" in page
    assert len(page) < 200_000


def test_find_runs_returns_states_newest_first(make_run, tmp_path):
    make_run("old", started="2026-01-01T00:00:00+00:00")
    make_run("new", started="2026-02-01T00:00:00+00:00", state="interrupted")
    make_run("dead", started="2026-01-15T00:00:00+00:00", state="running", pid=2**22 + 5,
             process_started=1.0, host=socket.gethostname())  # fmt: skip
    (tmp_path / "runs" / "no-run").mkdir()
    found = report.find_runs(tmp_path / "runs")
    assert [(run.name, run.state) for run in found] == [
        ("new", "interrupted"),
        ("dead", "died"),
        ("old", "finished"),
    ]
    assert report.find_runs(tmp_path / "nowhere") == []


def test_last_metrics_skips_incomplete_line(make_run):
    folder = make_run(metrics=[{"epoch": i, "loss": 1.0, "x": "y" * 100} for i in range(2000)])
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"epoch": 2000, "lo')
    assert report.read(folder).last_metrics()["epoch"] == 1999


def test_counts_of_distinct_rows_are_exact_or_lower_bounds(golden):
    """Each sample once, some twice, and 20,000 samples on two ranks."""
    passes = [
        [records.samples(range(10)), records.samples(range(10, 20))],
        [records.samples(range(10)), records.samples(range(5, 15))],
        [records.samples(range(10_000)), records.samples(range(10_000, 20_000))],
    ]
    lines = [
        report.ranks.format_coverage(given, length) for given in passes for length in (None, 20_000)
    ]
    golden("coverage.txt", "\n".join(lines) + "\n")
