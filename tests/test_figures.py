"""Figures in the documentation are those of ``benchmarks/results``: no other is let in.

``benchmarks/page.py`` writes the benchmark page and keeps every marked figure; a measured figure
without a mark fails here.
"""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"
PAGE = ROOT / "docs" / "benchmarks.md"

#: What a measured figure looks like: a factor or a rate; on pages that advertise, also a short time
#: (on the others it may be a setting).
MEASURED = re.compile(
    r"\d[\d.,]*\s?(?:"
    r"×(?!\s?\d)"  # 17.8×, but not 1600 × 1600
    r"|倍|(?:times|x|%) (?:as |faster|slower|less|more|quicker|better)"
    r"|[A-Za-z]*/s\b"
    r")"
)
SHORT_TIME = re.compile(r"\d[\d.,]*\s?(?:(?:ms|µs|us|ns)\b|毫秒|微秒)")
CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
READMES = [ROOT / "README.md", ROOT / "README.zh-CN.md"]
MARKED = [
    *READMES,
    *sorted(p for p in (ROOT / "docs").rglob("*.md") if p != PAGE),
]
SECTIONS = sorted((BENCHMARKS / "page").glob("*.md"))


@pytest.fixture(scope="module")
def page():
    """``benchmarks/page.py``. Forgotten afterwards: other tests have a ``common`` of their own."""
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module("page")
    sys.path.remove(str(BENCHMARKS))
    for name, module in list(sys.modules.items()):
        if BENCHMARKS in Path(getattr(module, "__file__", None) or "/").parents:
            del sys.modules[name]


def unmarked(page, text, *looks):
    """Measured figures that are neither code nor between marks."""
    for between_marks in (page.FIGURE, page.TABLE, page.PLACEHOLDER, CODE):
        text = between_marks.sub("", text)
    return [match[0] for look in (MEASURED, *looks) for match in look.finditer(text)]


def test_all_pages_are_what_the_results_give():
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "page.py"), "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", [*MARKED, *SECTIONS], ids=lambda path: path.name)
def test_no_figure_without_a_source(page, path):
    looks = [SHORT_TIME] if path in READMES + SECTIONS else []
    assert unmarked(page, path.read_text("utf-8"), *looks) == []


def test_a_figure_by_hand_is_found(page):
    text = "It is 17.8× quicker, 24,938 calls/s, in 142 ms; 3 times faster; 快 8 倍."
    assert len(unmarked(page, text, SHORT_TIME)) == 5
    marked = "<!-- figure: engine.call_sync.ratio -->17.8×<!-- /figure -->"
    assert unmarked(page, f"{marked} `5 ms` 1600 × 1600\n```text\n9×\n```\n", SHORT_TIME) == []


# -- the writer -----------------------------------------------------------------------------------


@pytest.fixture
def results():
    machine = {"cpu": "a CPU", "cores": 2, "memory_gib": 8.0, "python": "3.11"}
    samples = {"miniray": {"call_sync": [90.0, 100.0, 300.0]}, "ray": {"call_sync": [10.0]}}
    row = {"title": "calls", "cells": ["100", "10", "10×"], "goal": "8×", "reached": True}
    record = {"machine": machine, "versions": {"ray": "2"}, "samples": samples, "table": [row]}
    return {"engine": {**record, "finished": "2026-01-02T03:04:05Z"}}


def test_figures_are_medians_and_ratios(page, results):
    found = page.figures(results)
    assert found["engine.call_sync.miniray"] == "100 calls/s"
    assert found["engine.call_sync.ratio"] == "10.0×"


@pytest.mark.parametrize(
    ("record", "name", "text"),
    [
        ({"batch": 100, "workers": 16, "per_node": 8, "processed_row": 3e7, "encoded_row": 3e4,
          "driver_batches": 6.0, "sent_ratio": 1.0, "worker_mb": [100.0] * 15 + [200.0]},
         "memory_table.less", "20.0×"),  # 6 batches of 3 GB; the larger node has 0.9 GB
        ({"updates_ns": {"writing a step and its 16 sample ids, in lots": [3000.0, 2000.0]},
          "steps_s": {"with": [2.02e-3, 3.1e-3, 2.01e-3], "plain": [2e-3, 3e-3, 2e-3]}},
         "doctor.step_percent", "0.44 %"),  # 20 µs, the median of the turns, and 2 of 5 ms
        ({"samples": {"4 workers, 10 tensors": {
            "miniray": {"sync": [0.1, 0.2, 0.3], "server_memory": [2.0]},
            "gloo": {"sync": [0.5]}}}},
         "ps.4x10.over_gloo", "2.50×"),
        ({"samples": {"miniray-1": {"rate_whole": [10.0]}, "miniray-4": {"rate_whole": [30.0]}}},
         "scaling.miniray.4.efficiency", "75 %"),
        ({"samples": {"ratio": {"pairs": [1.0, 1.01], "median": [1.005], "interval": [1.0, 1.01]}}},
         "train_pairs.interval", "1.000 to 1.010"),
        ({"samples": {
            "recovery": {
                "miniray": {"lost": [1, 2], "seconds": [0.4, 0.2], "failed": [0, 0]},
                "torchrun": {"lost": [40], "seconds": [3.0], "failed": [1, 0]}},
            "overhead": {"miniray": [[1.0, 1.0]], "torchrun": [[1.0, 1.0]]}}},
         "recovery.seconds.over_torchrun", "10.0×"),
        ({"samples": {
            "recovery": {"miniray": {"lost": [1], "seconds": [0.4], "failed": [0]}},
            "overhead": {"miniray": [[1 + n / 1000, 1.0] for n in range(20)]}}},
         "recovery.interval.miniray", "0.50 % to 1.40 %"),  # the 6th and the 15th of 20
        ({"rows": 10, "samples": {
            "miniray_data": {"first_batch": [1.0]}, "bare_decode": {"first_batch": [0.1]},
            "mosaic": {"first_batch": [4.0]}, "hf_map": {"first_batch": [3.0]}}},
         "data.first_batch.over_best_other", "3.0×"),  # bare decode is no loader
    ],
)  # fmt: skip
def test_figures_of(page, record, name, text):
    assert page.figures({name.partition(".")[0]: record})[name] == text


def test_a_section_without_results_says_how_to_get_them(page, results, tmp_path):
    writer = page.Writer(results, tmp_path)
    head = "<!-- results: ps -->\n<!-- run: python benchmarks/ps.py -->\n"
    made = writer.section("x.md", head + "## Server\n\n{{ table: ps }}\n")
    assert made.startswith("## Server\n")
    assert "`python benchmarks/ps.py`" in made
    assert "{{" not in made


def test_the_page_is_complete_with_the_first_results_alone(page, results, tmp_path):
    text = page.Writer(results, tmp_path).page()
    assert "| calls | 100 | 10 | **10×** | 8× |" in text
    assert (
        text.count("Not measured yet") == len(SECTIONS) - 3
    )  # all but the head, the engine and the end
    assert "{{" not in text


@pytest.fixture
def everything(page):
    """The results that are there, and made-up ones of the rest."""
    row = {"title": "a row", "cells": ["1", "2", "3"], "goal": "", "reached": None}
    head = {"machine": {"cpu": "", "cores": 2, "memory_gib": 8.0, "python": "3.11"}}
    head |= {"versions": {}, "finished": "2026-01-02", "table": [row]}
    loader = {"first_batch": [1.0], "raw": [9.0], "decoded": [3.0], "uss": [50.0], "resume": [1.0]}
    loader |= {"epoch": ["exactly once"], "resume_union": ["2 missing"]}
    syncs = {"miniray": {"sync": [0.1], "server_memory": [2.0]}, "gloo": {"sync": [0.2]}}
    parts = ("layers, 1", "layers, 2", "tensor, 2")
    trained = {"rate": [10.0], "first_step": [2.0], "wall": [9.0], "memory": [500.0]}
    state = {"reward": 0.3, "acc@200km": 0.0, "acc@750km": 0.1, "acc@2500km": 0.5}
    peers = importlib.import_module("recovery").PEERS
    kills = {"lost": [9], "seconds": [0.4], "failed": [0]}
    made_up = {
        "recovery": {
            "samples": {
                "recovery": dict.fromkeys(peers, kills),
                "overhead": {name: [[1.005, 1.0]] for name in peers},
            }
        },
        "ps": {"samples": {"4 workers, 10 tensors": {**syncs, "ray": {"sync": [0.6]}}}},
        "data": {
            "rows": 20_000,
            "samples": dict.fromkeys(importlib.import_module("data").PEERS, loader),
            "columns": ["a", "b", "c"],
            "target_columns": ["a", "b", "c"],
            "targets": [row],
        },
        "memory_table": {
            "batch": 8192,
            "workers": 64,
            "per_node": 8,
            "processed_row": 3e7,
            "encoded_row": 3e4,
            "driver_batches": 6.0,
            "sent_ratio": 1.0,
            "worker_mb": [400.0] * 64,
        },
        "doctor": {
            "updates_ns": {importlib.import_module("doctor").WRITING: [500.0]},
            "steps_s": {"with": [2e-3], "without": [2e-3], "plain": [2e-3]},
        },
        "parallel": {
            "samples": {
                "bubble": {"1f1b, p=2, m=8": {"bubble": [0.12], "formula": [0.11]}},
                "overhead": {"step": [1.02], "hand": [1.0]},
                "memory": {
                    f"{part}, {width}": [1e6 * width] for part in parts for width in (8, 64)
                },
                "width": 64,
            }
        },
        "start": {"samples": {"import miniray": {"wall": [0.04], "cpu": [0.04]}}},
        "geoguessr": {
            "steps": 60,
            "runs": {
                "0": {
                    "reward": [0.1, 0.2, 0.3],
                    "likeliest": {"untrained": state, "warm-up": state, "GRPO": state},
                }
            },
        },
        "rl": {
            "training": dict.fromkeys(importlib.import_module("rl").SYSTEMS, trained),
            "driver_bytes": {
                "workers-8-33000": {"bytes": [2e3]},
                "controller-8-33000": {"bytes": [1e6]},
            },
        },
    }
    return page.load() | {name: {**head, **record} for name, record in made_up.items()}


def test_the_page_with_all_results_there_can_be(page, everything, tmp_path):
    assert set(everything) == set(page.MAKERS)
    writer = page.Writer(everything, tmp_path)
    text = writer.page()
    assert "Not measured yet" not in text
    assert "{{" not in text
    assert set(writer.plots) == set(page.PLOTS)
    for name in writer.plots:
        assert f"(images/{name}.svg)" in text
    for language in ("readme", "readme-zh", "peers", "peers-zh"):
        assert "None" not in writer.tables[language]
    assert "500×" in writer.tables["rl-bytes"]


def test_marked_figures_are_kept_and_differences_found(page, results, tmp_path):
    (tmp_path / "docs").mkdir()
    readme = tmp_path / "README.md"
    readme.write_text("So <!-- figure: engine.call_sync.ratio -->9×<!-- /figure --> it is.\n")
    writer = page.Writer(results, tmp_path)
    assert "README.md" in page.differences(writer)
    assert "README.md" in page.write(writer)
    assert "-->10.0×<!--" in readme.read_text()
    assert page.differences(page.Writer(results, tmp_path)) == ""


def test_a_figure_nobody_measured_is_refused(page, results, tmp_path):
    writer = page.Writer(results, tmp_path)
    for text in (
        "<!-- figure: engine.none -->1<!-- /figure -->",
        "<!-- table: none -->\n<!-- /table -->",
    ):
        with pytest.raises(page.UnknownFigureError, match=r"README\.md quotes"):
            writer.marked("README.md", text)


def test_plots_of_vanished_results_are_removed(page, results, tmp_path):
    images = tmp_path / "docs" / "images"
    images.mkdir(parents=True)
    (images / "bench-ps.svg").write_text("<svg/>")
    (images / "overview.svg").write_text("<svg/>")
    page.write(page.Writer(results, tmp_path))
    assert sorted(p.name for p in images.iterdir()) == ["bench-engine.svg", "overview.svg"]


def test_results_are_whole_records(page):
    for path in (BENCHMARKS / "results").glob("*.json"):
        record = json.loads(path.read_text("utf-8"))
        assert {"machine", "versions"} <= record.keys(), path.name
        assert path.stem in page.MAKERS, f"no page shows {path.name}"


# -- all benchmarks -------------------------------------------------------------------------------


@pytest.fixture
def runner(page, tmp_path, monkeypatch):
    """``benchmarks/all.py`` with three small benchmarks: a good one, a bad one, one that echoes."""
    runner = importlib.import_module("all")
    (tmp_path / "good.py").write_text(
        "import sys, pathlib; pathlib.Path(sys.argv[2]).write_text(' '.join(sys.argv[3:]))"
    )
    (tmp_path / "bad.py").write_text("raise SystemExit(3)")
    monkeypatch.setattr(runner, "HERE", tmp_path)
    monkeypatch.setattr(runner, "PEERS", tmp_path / "peers")
    benchmarks = {
        "first": runner.Benchmark("bad.py"),
        "second": runner.Benchmark("good.py"),
        "third": runner.Benchmark("good.py", needs_gpu=True),
        "fourth": runner.Benchmark("good.py", needs_cores=10**6),
    }
    monkeypatch.setattr(runner, "BENCHMARKS", benchmarks)
    monkeypatch.setattr(runner, "PEER_PACKAGES", {"second": ["torch=={torch}", "bad", "a b"]})
    monkeypatch.setattr(runner, "has_gpu", lambda: False)
    return runner


def test_a_benchmark_that_fails_is_named_and_the_others_run(runner, tmp_path, capfd):
    results = tmp_path / "results"
    assert runner.main(["--results", str(results)]) == 1
    said = capfd.readouterr().out
    assert "first: FAILED with status 3" in said
    assert "third: left out, there is no GPU" in said
    assert "fourth: left out, it needs 1000000 cores" in said
    assert said.endswith("1 of 2 benchmarks failed: first\n")
    assert (results / "second.json").read_text() == ""


def test_options_reach_the_benchmarks(runner, tmp_path):
    python = tmp_path / "peers" / "second" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    results = tmp_path / "results"
    assert runner.main(["--quick", "--only", "second", "--results", str(results)]) == 0
    assert (results / "second.json").read_text() == f"--quick --peer-python {python}"


def test_the_list_says_what_would_run_and_runs_nothing(runner, tmp_path, capsys):
    results = tmp_path / "results"
    assert runner.main(["--list", "--peers", "--results", str(results)]) == 0
    first, second, third, fourth = capsys.readouterr().out.splitlines()
    assert first.endswith(f"bad.py --json {results / 'first.json'}")
    assert second.endswith(f"--peer-python {tmp_path / 'peers/second/bin/python'}")
    assert "left out, there is no GPU" in third
    assert "left out, it needs" in fourth
    assert not results.exists()
    assert not (tmp_path / "peers").exists()


def test_peers_that_train_get_the_torch_that_is_here(runner, tmp_path, monkeypatch, capfd):
    python = tmp_path / "peers" / "second" / "bin" / "python"
    python.parent.mkdir(parents=True)
    # Not pip, but its words are those that pip would get; the second cannot be installed.
    python.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/said\n[ "$5" != bad ]\n')
    python.chmod(0o755)
    monkeypatch.setattr(runner.common, "versions", lambda name: {name: "2.9.1+cpu"})
    runner.make_peers("second")
    pip = "-m pip install --quiet"
    said = (tmp_path / "said").read_text().splitlines()
    assert said == [f"{pip} torch==2.9.1", f"{pip} bad", f"{pip} a b"]
    assert "without bad: it cannot be installed here" in capfd.readouterr().out


def test_every_script_that_all_runs_is_there(page):
    runner = importlib.import_module("all")
    assert set(page.MAKERS) == set(runner.BENCHMARKS)
    for benchmark in runner.BENCHMARKS.values():
        assert (BENCHMARKS / benchmark.script).exists()
