"""Filters run once, divided among ranks, and their answers survive crashes."""

import errno
import functools
import gc
import io
import operator
import os
import re
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from miniray.data import (
    ArrowDataset,
    IndexedDataset,
    JsonlDataset,
    Mixture,
    ParquetDataset,
)
from miniray.data.filter import run as filtering
from miniray.data.filter import store as index
from miniray.data.filter import work as filter_parts
from miniray.data.filter.fingerprint import fingerprint_callable
from miniray.data.locations import Blocks
from miniray.errors import DataError, RowError
from tests.data.conftest import write_parquet

calls = []


def multiple_of_three(row):
    calls.append(row["id"])
    return row["id"] % 3 == 0


@pytest.fixture(autouse=True)
def _count(monkeypatch):
    calls.clear()
    monkeypatch.setattr(filter_parts, "_MIN_ROWS", 20)


def filtered(folder, function=multiple_of_three, **options):
    options = {"filter_id": "three", **options}  # the list of calls is part of its code
    return ParquetDataset(folder, filter=function, filter_columns=["id"], **options)


def ids(dataset):
    return [row["id"] for row in dataset]


def test_it_runs_once_and_the_second_start_only_reads(parquet_folder):
    assert ids(filtered(parquet_folder)) == list(range(0, 237, 3))
    assert sorted(calls) == list(range(237))
    assert sorted(os.listdir(parquet_folder / ".miniray")) == [
        f"filter-{fingerprint_callable(multiple_of_three, 'three', 'parquet', ['id'])}.{kind}"
        for kind in ("idx", "lock")
    ]
    calls.clear()
    parts = [filtered(parquet_folder, rank=rank, world_size=4) for rank in range(4)]
    assert sorted(functools.reduce(operator.iadd, map(ids, parts), [])) == list(range(0, 237, 3))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert calls == []


def test_max_samples_and_shuffling_come_after_it(parquet_folder):
    options = {"max_samples": 30, "seed": 4, "shuffle": True, "world_size": 3}
    parts = [filtered(parquet_folder, rank=rank, **options) for rank in range(3)]
    rows = functools.reduce(operator.iadd, map(ids, parts), [])
    assert len(rows) == len(set(rows)) == 30
    assert all(row % 3 == 0 for row in rows)
    assert [len(part) for part in parts] == [10, 10, 10]
    state = parts[0].state_dict()
    assert state["n"] == 30


@pytest.mark.parametrize("groups", ["many", "one"])
def test_ranks_at_the_same_time_split_the_work(parquet_folder, groups):
    if groups == "one":  # the default of writers
        parquet_folder = parquet_folder.parent / "one.parquet"
        write_parquet(parquet_folder, range(237), rows=237)
    slow = threading.Event()

    def one(rank):
        def function(row):
            calls.append((rank, row["id"]))
            slow.wait(0.001)
            return row["id"] % 3 == 0

        found[rank] = ids(filtered(parquet_folder, function, rank=rank, world_size=4))

    found = {}
    workers = [threading.Thread(target=one, args=(rank,)) for rank in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert sorted(functools.reduce(operator.iadd, found.values(), [])) == list(range(0, 237, 3))
    assert sorted(row for _, row in calls) == list(range(237))  # no row twice
    assert len({rank for rank, _ in calls}) == 4


@pytest.mark.parametrize("rows", [[0], [31], [237], [10, 10, 10], [64, 3, 40, 0, 5], [5] * 9])
def test_parts_have_every_row_once_and_in_order(rows):
    files = [0] * (len(rows) // 2) + [1] * (len(rows) - len(rows) // 2)
    blocks = Blocks(files, range(len(rows)), rows, rows, rows)
    parts = filter_parts.cut_work(blocks, 1)
    pieces = [piece for part in parts for piece in part.pieces]
    assert [(block, row) for block, start, stop in pieces for row in range(start, stop)] == [
        (block, row) for block, count in enumerate(rows) for row in range(count)
    ]
    assert all(files[block] == part.file for part in parts for block, _, _ in part.pieces)
    assert all(part.rows < 2 * 20 for part in parts)


def test_another_run_with_the_same_filter_in_the_same_folder_does_not_take_the_parts(tmp_path):
    """Train and val beside each other: one rank ends the one while another is at the other."""
    for name in ("train", "val"):
        write_parquet(tmp_path / f"{name}.parquet", range(100), rows=100)
    train, folder = str(tmp_path / "train.parquet"), tmp_path / ".miniray"

    def keep(row):
        if row["id"] == 50:
            assert len(ids(filtered(train))) == 34
        return row["id"] < 70

    assert ids(filtered(str(tmp_path / "val.parquet"), keep)) == list(range(70))
    assert not [name for name in os.listdir(folder) if name.endswith(".parts")]
    assert len(ids(filtered(train))) == 34
    assert len(calls) == 100  # once, and then read


def test_a_rank_that_comes_when_the_others_have_just_ended_only_reads(parquet_folder, monkeypatch):
    folder_of = index.choose_folder

    def others_end_now(beside):
        monkeypatch.setattr(index, "choose_folder", folder_of)
        filtered(parquet_folder).prepare()  # after this rank has looked, before it begins
        return folder_of(beside)

    monkeypatch.setattr(index, "choose_folder", others_end_now)
    dataset = filtered(parquet_folder).prepare()
    assert len(dataset) == sum(i % 3 == 0 for i in set(calls))
    assert len(calls) == len(set(calls))
    assert not [n for n in os.listdir(f"{parquet_folder}/.miniray") if n.endswith(".parts")]


def test_threads_of_one_rank(parquet_folder):
    assert ids(filtered(parquet_folder, filter_workers=3)) == list(range(0, 237, 3))
    assert sorted(calls) == list(range(237))


def test_a_row_that_fails_stops_the_other_threads(tmp_path):
    write_parquet(tmp_path / "x.parquet", range(2000), rows=1000)
    began = threading.Event()

    def function(row):
        if row["id"] == 0:
            began.wait(30)
            raise ValueError("bad row")
        began.set()
        calls.append(row["id"])
        time.sleep(0.01)
        return True

    with pytest.raises(RowError) as caught:
        len(filtered(tmp_path, function, filter_workers=2))
    assert caught.value.row == 0
    assert type(caught.value.__cause__) is ValueError
    assert len(calls) < 1000


def test_answers_about_data_in_memory_are_not_those_about_other_data():
    def up_to_four(row):
        return row["id"] < 5

    def numbers(name):
        return [{"id": i} for i in (range(10) if name == "up" else range(9, -1, -1))]

    for kind, made in [
        (IndexedDataset, numbers),
        (ArrowDataset, lambda name: pa.Table.from_pylist(numbers(name))),
    ]:
        assert ids(kind(made("up"), filter=up_to_four)) == [0, 1, 2, 3, 4]
        assert ids(kind(made("down"), filter=up_to_four)) == [4, 3, 2, 1, 0]


def test_shards_and_states_take_over_an_answer_that_is_there():
    rows = [{"id": i} for i in range(30)]
    whole = IndexedDataset(rows, filter=multiple_of_three, shuffle=True, seed=1).prepare()
    shards = [whole.shard(rank, 3) for rank in range(3)]
    assert sorted(i for shard in shards for i in ids(shard)) == list(range(0, 30, 3))
    shards[0].load_state_dict(whole.state_dict())
    assert len(shards[0]) == 4
    mixed = Mixture([(whole, 1)], seed=1)
    assert sum(len(mixed.shard(rank, 2)) for rank in range(2)) == 10
    assert len(calls) == 30


def test_answers_about_data_in_memory_are_shared_under_a_name():
    rows = [{"id": i} for i in range(50)]
    for rank in range(2):
        dataset = IndexedDataset(
            rows, filter=multiple_of_three, filter_id="of fifty", rank=rank, world_size=2
        )
        assert len(dataset) == 9 - rank
    assert sorted(calls) == list(range(50))


def test_a_changed_remote_file_is_noticed(tmp_path):
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    for first in (0, 10):
        memory.pipe(
            "/changed/x.jsonl", "".join(f'{{"id": {first + i:2}}}\n' for i in range(10)).encode()
        )
        dataset = JsonlDataset("memory://changed/x.jsonl", filter=multiple_of_three, filter_id="m")
        assert ids(dataset) == [i for i in range(first, first + 10) if i % 3 == 0]
    memory.rm("/changed", recursive=True)


def test_other_users_may_read_the_index(parquet_folder):
    before = os.umask(0o022)
    try:
        len(filtered(parquet_folder))
    finally:
        os.umask(before)
    (path,) = (parquet_folder / ".miniray").glob("*.idx")
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_column_that_is_not_there_is_named(parquet_folder):
    dataset = ParquetDataset(parquet_folder, filter=multiple_of_three, filter_columns=["id", "no"])
    with pytest.raises(DataError, match=r"part-0\.parquet.*'no'"):
        len(dataset)
    assert calls == []


def test_a_changed_file_is_noticed_and_only_that_is_filtered_again(parquet_folder):
    len(filtered(parquet_folder))
    calls.clear()
    write_parquet(parquet_folder / "part-2.parquet", range(1000, 1050))
    expected = [*range(0, 100, 3), *(i for i in range(1000, 1050) if i % 3 == 0)]
    assert ids(filtered(parquet_folder)) == expected + [i for i in range(153, 237) if i % 3 == 0]
    assert sorted(calls) == list(range(1000, 1050))


def test_some_of_the_files_share_the_index(parquet_folder):
    len(filtered(parquet_folder))
    calls.clear()
    assert ids(filtered(parquet_folder / "part-0.parquet")) == list(range(0, 100, 3))
    assert calls == []


def make_filter(limit):
    return lambda row: row["id"] < limit


def helper(row):
    return row["id"] > 230


def with_helper(row):
    return helper(row)


def test_a_changed_filter_is_noticed(parquet_folder, monkeypatch):
    def rows(function):
        return ids(ParquetDataset(parquet_folder, filter=function))

    assert rows(make_filter(5)) == [0, 1, 2, 3, 4]
    assert rows(make_filter(6)) == [0, 1, 2, 3, 4, 5]  # other values in the closure
    assert rows(lambda row: row["id"] < 2) == [0, 1]  # other code
    assert rows(with_helper) == list(range(231, 237))
    monkeypatch.setitem(globals(), "helper", lambda row: row["id"] > 234)
    assert rows(with_helper) == [235, 236]  # other code further down


class Below:
    most = 10

    def __init__(self, limit):
        self.limit = limit

    def __call__(self, row):
        return self.fits(row["id"])

    def fits(self, number):
        return number < min(self.limit, self.most)

    def at_all(self, row):
        return any(with_helper({"id": number}) for number in [row["id"]])


def test_what_makes_another_filter(monkeypatch):
    def identity(function):
        return fingerprint_callable(function, None)

    filters = {
        "object": lambda: Below(3),
        "method": lambda: Below(3).at_all,
        "partial": lambda: functools.partial(operator.lt, 3),
        "of a set": lambda: {"a", "b"}.__contains__,
        "pattern": lambda: re.compile("a+").match,
        "cached": lambda: functools.lru_cache(with_helper),
    }
    before = {name: identity(made()) for name, made in filters.items()}
    assert before == {name: identity(made()) for name, made in filters.items()}
    others = [
        Below(4),
        Below(4).at_all,
        functools.partial(operator.lt, 4),
        functools.partial(operator.gt, 3),
        {"a", "c"}.__contains__,
        re.compile("b+").match,
    ]
    assert len({*map(identity, others), *before.values()}) == len(others) + len(before)

    def differ():
        return [name for name, made in filters.items() if identity(made()) != before[name]]

    with monkeypatch.context() as patch:
        patch.setattr(Below, "most", 11)
        assert differ() == ["object", "method"]
    with monkeypatch.context() as patch:
        patch.setattr(Below, "fits", lambda self, number: True)
        assert differ() == ["object", "method"]
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "helper", lambda row: row["id"] > 234)
        assert differ() == ["object", "method", "cached"]  # a method of the object calls it
    assert differ() == []


def test_the_same_filter_is_the_same_in_another_process():
    code = """
        import dataclasses, re, torch
        from miniray.data.filter.fingerprint import fingerprint_callable
        words = {"a", "b", "c", "d"}
        pattern = re.compile("a+")
        def keep(row, limit=3, *, more=(1, 2.5)):
            return row["text"] in {"x", "y", "z"} or row["text"] in words or len(row) > limit
        @dataclasses.dataclass
        class Keep:
            words: dict
            def __post_init__(self):
                torch.manual_seed(0)
                self.layer = torch.nn.Linear(2, 1)
            def __call__(self, row):
                return pattern.match(row["text"]) and row["text"] in self.words
        print([fingerprint_callable(f, None, "parquet") for f in (keep, Keep({"a": words}))])
    """
    found = {
        subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=50,
        ).stdout
        for seed in "12"
    }
    assert len(found) == 1


def test_a_filter_that_cannot_be_known_asks_for_a_name(parquet_folder):
    stream = (i for i in range(3))
    with pytest.raises(DataError, match=r"generator.*filter_id="):
        len(ParquetDataset(parquet_folder, filter=lambda row: stream is not None))
    found = ParquetDataset(parquet_folder, filter=lambda row: stream is not None, filter_id="all")
    assert len(found) == 237


def test_a_row_that_makes_it_raise_is_named(parquet_folder):
    def function(row):
        return 1 / (row["id"] - 120) > 0

    with pytest.raises(RowError, match=r"part-2\.parquet") as e:
        len(filtered(parquet_folder, function))
    assert e.value.row == 20
    assert isinstance(e.value.__cause__, ZeroDivisionError)
    # Finished items are kept; a filter that does not raise does the rest.
    assert len(filtered(parquet_folder, lambda row: row["id"] != 120)) > 0


def test_filter_that_drops_all_rows_raises(parquet_folder, raises):
    def keep_none(row):
        return False

    for options in ({"filter_id": None}, {"filter_id": "none"}, {"rank": 1, "world_size": 2}):
        dataset = filtered(parquet_folder, keep_none, shuffle=True, seed=1, **options)
        with raises(DataError):
            dataset.prepare()


def test_a_folder_that_is_not_writable_falls_back_to_the_cache(parquet_folder, tmp_path, warns):
    (parquet_folder / ".miniray").write_text("a file in the way")
    with warns(RuntimeWarning):
        assert ids(filtered(parquet_folder)) == list(range(0, 237, 3))
    assert len(os.listdir(tmp_path / "cache" / "filters")) == 2
    calls.clear()
    assert len(filtered(parquet_folder)) == 79
    assert calls == []


def test_an_index_that_is_there_needs_no_right_to_write(parquet_folder, monkeypatch):
    len(filtered(parquet_folder))
    calls.clear()
    monkeypatch.setattr(index, "choose_folder", None)
    assert len(filtered(parquet_folder)) == 79
    assert calls == []


def test_it_works_on_other_sources(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text("".join(f'{{"id": {i}}}\n' for i in range(50)))
    dataset = JsonlDataset(path, filter=multiple_of_three, filter_id="three")
    assert ids(dataset) == list(range(0, 50, 3))
    calls.clear()
    assert len(JsonlDataset(path, filter=multiple_of_three, filter_id="three")) == 17
    assert calls == []


def test_progress_is_shown_on_a_terminal_of_rank_0(parquet_folder, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    len(filtered(parquet_folder))
    assert "filter: 100%" in screen.getvalue()
    assert "79 of 237 rows kept" in screen.getvalue()
    assert "rows/s" in screen.getvalue()
    other = Terminal()
    monkeypatch.setattr(sys, "stderr", other)
    len(filtered(parquet_folder, filter_id="again", rank=1, world_size=2))
    assert other.getvalue() == ""


# -- faults --------------------------------------------------------------------------------------


def test_a_torn_index_is_not_believed(parquet_folder):
    len(filtered(parquet_folder))
    (path,) = (parquet_folder / ".miniray").glob("*.idx")
    whole = path.read_bytes()
    for damaged in (b"", whole[:-1], whole[: len(whole) // 2], whole[:60] + b"!" + whole[61:]):
        path.write_bytes(damaged)
        calls.clear()
        assert ids(filtered(parquet_folder)) == list(range(0, 237, 3))
        assert len(calls) == 237


def test_a_full_disk_is_a_clear_error_and_leaves_what_was_there(tmp_path, raises):
    bits = np.packbits(np.ones(100_000, bool))
    path = tmp_path / "x.idx"
    index.write(path, {"one": ("identity", 8, bits[:1])})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with raises(DataError) as e:
            index.write(path, {"two": ("identity", 100_000, bits)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert e.value.__cause__.errno == errno.EFBIG
    assert os.listdir(tmp_path) == ["x.idx"]
    assert list(index.read(path)) == ["one"]


@pytest.fixture
def small_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(disk)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("no right to mount a file system")
    yield disk
    gc.collect()  # maps of files on it
    subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_that_is_full_while_the_filter_runs(small_disk):
    write_parquet(small_disk / "x.parquet", range(200))
    ballast = open(small_disk / "ballast", "wb", buffering=0)
    with ballast, pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        while True:
            ballast.write(b"x" * 512)
    with pytest.raises(DataError, match=os.strerror(errno.ENOSPC)):
        len(filtered(small_disk / "x.parquet"))
    (small_disk / "ballast").unlink()
    calls.clear()
    assert ids(filtered(small_disk / "x.parquet")) == list(range(0, 200, 3))
    left = os.listdir(small_disk / ".miniray")
    assert sorted(name.rsplit(".", 1)[1] for name in left) == ["idx", "lock"]


KILLED = """
import os, random, signal, sys, time
sys.path.insert(0, sys.argv[3])
from miniray.data import ParquetDataset
from miniray.data.filter import work as filter_parts
filter_parts._MIN_ROWS = 20

def keep(row):
    time.sleep(0.0002)
    return row["id"] % 3 == 0

def rank(number, world):
    dataset = ParquetDataset(sys.argv[1], filter=keep, filter_id=str(round_), rank=number,
                             world_size=world)
    return [row["id"] for row in dataset]

rng = random.Random(int(sys.argv[2]))
torn = 0
for round_ in range(3):
    for attempt in range(3):
        pids = []
        for number in range(2):
            pid = os.fork()
            if pid == 0:
                try:
                    rank(number, 2)
                finally:
                    os._exit(0)
            pids.append(pid)
        time.sleep(rng.random() * 0.08)
        for pid in pids[: 1 + attempt % 2]:
            os.kill(pid, signal.SIGKILL)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        torn += codes[0] == -signal.SIGKILL
    found = sorted(rank(0, 2) + rank(1, 2))
    assert found == list(range(0, 237, 3)), found
print(torn)
"""


def test_sigkill_at_any_moment_leaves_a_usable_index(parquet_folder):
    root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(parquet_folder), "1", root],
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0  # some were really killed at work


def test_a_slow_rank_shows_that_it_is_at_work(parquet_folder, monkeypatch):
    clock, touched = [0.0], []
    for module in (filtering, filter_parts):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(filter_parts, "_touch", touched.append)

    def slow(row):
        clock[0] += 0.1
        return True

    path = parquet_folder / "part-0.parquet"
    assert len(filtered(path, slow)) == 100
    # Items of 20 rows, with a heartbeat at each third row: after more than 0.25 s.
    assert len(touched) == 5 * 6
    run = filtering.FilterRun(filtered(path).row_set.source, slow, None, "name")
    lock = parquet_folder / "lock"
    lock.touch()
    seen = []
    for seconds in (0, 9, 2, 9):
        clock[0] += seconds
        seen.append(run._is_stuck(lock))
        if seconds == 2:
            os.utime(lock, ns=(5, 5))
    assert seen == [False, False, True, False]


def test_a_part_whose_rank_hangs_is_done_by_another(parquet_folder, monkeypatch):
    monkeypatch.setattr(filtering, "_PATIENCE", 0.2)
    go = threading.Event()
    began = threading.Event()

    def hangs(row):
        began.set()
        go.wait(30)
        return row["id"] % 3 == 0

    stuck = threading.Thread(target=lambda: len(filtered(parquet_folder, hangs)))
    stuck.start()
    began.wait(30)
    try:
        assert ids(filtered(parquet_folder, rank=1, world_size=2)) == list(range(0, 237, 3))[40:]
    finally:
        go.set()
        stuck.join()
    time.sleep(0)
    calls.clear()
    assert len(filtered(parquet_folder)) == 79
    assert calls == []
