"""What a person reads: short, 80 columns, the verdict first; and what a program reads."""

import dataclasses
import json
import re

from miniray.doctor import render
from miniray.doctor.diagnose import examine
from miniray.doctor.facts import gather
from miniray.doctor.findings import named, numbers, plural, seconds, size
from miniray.doctor.model import Gpu, Phase, Site, ThreadStack
from tests.doctor.records import NOW, at, call, calling, ended, loader, model, rank, run, samples


def stuck(world=2, **fields):
    waiting = [calling(n, call(0, is_open=True), world=world) for n in range(world - 1)]
    return run(*waiting, calling(world - 1, world=world, **fields))


def test_the_verdict_is_the_first_line():
    diagnosis = examine(stuck())
    (finding,) = diagnosis.findings
    assert (finding.code, finding.severity.word, finding.ranks) == ("blocked", "STUCK", (1,))
    assert diagnosis.verdict == f"STUCK: {finding.title}"
    assert diagnosis.text().replace("\n  ", " ").startswith(f"{diagnosis.verdict}\n")


def test_a_run_that_has_ended_reads_the_same_an_hour_later():
    dead = dataclasses.replace(rank(1), exit=ended(kind="exception", at=NOW))
    now, later = (
        gather(dataclasses.replace(run(rank(0), dead), read_at=NOW + wait)) for wait in (1, 3600)
    )
    assert later.ranks[1].idle == now.ranks[1].idle < 1
    assert later.ranks[0].idle > 3000


def test_a_table_line_is_what_the_debugging_guide_prints(golden):
    shown = examine(run(*(rank(n, 4, step=100) for n in range(4)))).text()
    golden("render/running.txt", shown + "\n")


def test_no_line_is_wider_than_the_terminal():
    long = "/home/user/" + "a_very_long_name_of_a_script_that_somebody_chose" * 3 + ".py"
    wide = rank(
        1,
        step=123456789,
        batch_size=100_000,
        samples=10**12,
        rss=123_456_000_000,
        loss=-1.2345678e-12,
        exit=ended(message="x" * 500, site=Site(long, 33, "f")),
    )
    for width in (80, 60):
        shown = examine(run(rank(0), wide)).text(width)
        assert max(map(len, shown.splitlines())) <= width, shown


def test_a_narrow_terminal_loses_whole_columns_and_none_is_cut():
    wide = [
        rank(
            n, 16, step=123_456, batch_size=1024, samples=123_456, rss=12_345_000_000, loss=-1.5e-9
        )
        for n in range(16)
    ]
    case = gather(run(*wide))
    for width, lost in ((100, ""), (80, "samples"), (70, "since")):
        shown = render.rank_table(case, width)
        heads = [column.header for column in shown.columns]
        assert heads[0] == "rank"
        assert heads[-1] == "memory"
        assert lost not in heads
        assert next(str(cell) for cell in shown.columns[-1].cells) == "12.3 GB"
    missing = gather(run(rank(0, 3), world=3))
    assert "never started" in [str(cell) for cell in render.rank_table(missing).columns[2].cells]


def test_many_ranks_are_not_all_listed_but_those_in_trouble_are():
    ranks = [rank(n, 64) for n in range(64)]
    ranks[37] = rank(
        37, 64, exit=ended(), process=dataclasses.replace(rank(0).process, alive=False)
    )
    shown = examine(run(*ranks)).text()
    listed = re.findall(r"^\[Rank (\d+)/64\]", shown, re.MULTILINE)
    assert len(listed) == 16
    assert "37" in listed
    assert f"{64 - 16} ranks" in shown
    assert len(shown.splitlines()) < 40


def test_findings_come_with_evidence_cause_and_fix(golden):
    golden("render/stuck.txt", examine(stuck()).text() + "\n")


def test_a_second_finding_has_its_title():
    same = {"sampler": "SequentialSampler", "replicas": None, "first_batch": ("aa",)}
    ranks = [
        rank(n, passes=(samples(range(32)),), loaders=(loader(**same),), models=(model(),))
        for n in range(2)
    ]
    ranks[0] = dataclasses.replace(ranks[0], exit=ended())
    diagnosis = examine(run(*ranks))
    first, second = diagnosis.findings
    assert (first.code, first.ranks) == ("exception", (0,))
    assert (second.code, second.ranks) == ("same-data", (0, 1))
    shown = diagnosis.text()
    assert shown.startswith(f"FAILED: {first.title}")
    assert f"\nWRONG: {second.title}\n" in shown


def test_equal_stacks_are_shown_once_the_guilty_ones_first(golden):
    torch = Site("/x/site-packages/torch/distributed/distributed_c10d.py", 9, "all_reduce")
    waiting = ThreadStack("0x1", "", True, (torch, at(80)))
    other = ThreadStack("0x1", "", True, (at(44, function="save"), at(50)))
    shown = {0: (waiting,), 1: (waiting,), 2: (other,)}
    text = examine(stuck(3), None, shown).text()
    golden("render/equal_stacks.txt", text + "\n")


def test_a_healthy_run_shows_no_stacks():
    thread = ThreadStack("0x1", "", True, (at(80),))
    assert "stack" not in examine(run(rank(0), rank(1)), None, {0: (thread,)}).text()


def test_is_ddp_initialised(golden):
    def line(**fields):
        return render.facts_line(gather(run(rank(0, 1, **fields))))

    without = {"initialised": False, "group_size": -1}
    launchers = gather(run(rank(0, launcher="none"), rank(1, launcher="lightning")))
    lines = {
        "initialized": line(group_size=1),
        "rank 0 without a launcher": render.facts_line(launchers),
        "single process": line(launcher="", **without),
        "not loaded": line(distributed_available=None, **without),
        "not available": line(distributed_available=False, **without),
    }
    golden("render/distributed.txt", "\n".join(f"{k}:\n{text}\n" for k, text in lines.items()))


def test_a_stage_and_its_microbatch_are_in_the_table():
    stage = Phase("stage 0 bwd mb 12", at(1), NOW - 6)
    shown = examine(run(*(rank(n, 16, step=1234, section=stage) for n in range(2)))).text()
    assert shown.count(" stage 0 bwd mb 12 ") == 2


def test_gpus_with_their_ranks():
    card = Gpu(0, "H200", "GPU-0", 10**9, 10**11, 10**9, 80, 400.0, 700.0)
    case = gather(run(rank(0, gpu=card), rank(1, gpu=card)))
    assert list(render.gpu_lines(case)) == [
        "GPU 0 (H200): 80 % used, 1.0 GB of 100.0 GB, 400 W, ranks 0 and 1"
    ]


def test_json_is_plain_data():
    diagnosis = examine(stuck(loss=float("nan")))
    said = json.loads(json.dumps(diagnosis.to_json(), allow_nan=False))
    assert said["healthy"] is False
    assert said["findings"][0]["ranks"] == [1]
    assert said["ranks"][0]["waiting_for"] == "all_reduce SUM (4,) float32 at train.py:80"
    assert said["ranks"][1]["loss"] == "NaN"
    assert said["ranks"][1]["line"] == "[Rank 1/2] Step 10, Batch size: 8"


def test_words():
    assert numbers([3]) == "3"
    assert numbers([1, 2]) == "1 and 2"
    assert numbers([0, 1, 2, 3, 7, 9]) == "0–3, 7 and 9"
    assert named([]) == "no rank"
    assert [plural(1, "batch"), plural(2, "batch"), plural(0, "rank")] == [
        "1 batch",
        "2 batches",
        "0 ranks",
    ]
    assert [seconds(s) for s in (0.44, 12, 200, 7500)] == [
        "0.4 s",
        "12 s",
        "3 min 20 s",
        "2 h 5 min",
    ]
    assert [size(n) for n in (5e8, 15e8)] == ["500 MB", "1.5 GB"]
