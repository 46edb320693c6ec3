"""``data=`` of ``miniray.data``: every worker reads its own rows of the files."""

import json
from collections import Counter

import pytest

pytest.importorskip("torch")
pytest.importorskip("pyarrow")

import pyarrow as pa
import pyarrow.parquet as pq

from miniray.data import DataLoader, IndexedDataset, ParquetDataset
from miniray.data.sources.parquet import ParquetSource
from miniray.rl import GRPOConfig
from tests.rl.models_for_tests import Momentum, rows
from tests.rl.trainers_for_tests import make

COUNT = 24

pytestmark = pytest.mark.filterwarnings("ignore:resuming a run of")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """24 prompts in 3 files, in row groups of 4."""
    monkeypatch.setenv("MINIRAY_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "prompts"
    folder.mkdir()
    table = pa.Table.from_pylist([{**row, "id": i} for i, row in enumerate(rows(COUNT))])
    for number, (start, stop) in enumerate([(0, 10), (10, 11), (11, COUNT)]):
        part = table.slice(start, stop - start)
        pq.write_table(part, folder / f"{number}.parquet", row_group_size=4)
    return folder


def train(tmp_path, data, steps, num_workers, prompts=4, **options):
    """Train and return the ids of the prompts of each step, by worker."""
    log = tmp_path / "log"
    log.write_text("")

    def reward(row, text):
        with open(log, "a") as file:
            print(json.dumps(int(row["id"])), file=file)
        return 0.0

    config = GRPOConfig(prompts_per_step=prompts, rollouts=1)
    settings = {"data": data, "reward": reward, "config": config, "num_workers": num_workers}
    if num_workers > 1:
        settings["sync"] = "weights"
    with make(**{**settings, **options}) as trainer:
        trainer.train(steps=steps)
        trainer.save_checkpoint()
    return [json.loads(line) for line in log.read_text().splitlines()]


@pytest.mark.parametrize(("num_workers", "prompts"), [(1, 4), (2, 4), (3, 3)])
@pytest.mark.parametrize("shuffle", [True, "global"])
def test_each_prompt_of_files_comes_once_per_pass(folder, tmp_path, num_workers, prompts, shuffle):
    data = ParquetDataset(folder, shuffle=shuffle, seed=1)
    assert data.split == "contiguous"
    seen = train(tmp_path, data, COUNT // prompts, num_workers, prompts)
    assert sorted(seen) == list(range(COUNT))
    assert seen != sorted(seen)


def test_workers_read_only_their_rows_of_files(folder, tmp_path, monkeypatch):
    read = Counter()
    read_block = ParquetSource.read_block

    def count(self, block, columns=None):
        read[block] += 1
        return read_block(self, block, columns)

    monkeypatch.setattr(ParquetSource, "read_block", count)
    train(tmp_path, ParquetDataset(folder), 6, 2)
    assert len(read) == 8  # row groups of 4, 4, 2; 1; 4, 4, 4, 1
    assert sum(read.values()) <= 9  # the shards share one


@pytest.mark.parametrize("split", ["contiguous", "interleaved"])
@pytest.mark.parametrize("workers", [(2, 3), (3, 2)])
def test_other_number_of_workers_continues_with_the_rest(folder, tmp_path, split, workers):
    shuffle = True if split == "contiguous" else "global"
    data = ParquetDataset(folder, shuffle=shuffle, seed=1, split=split)
    options = {"run_dir": tmp_path / "run"}
    first = train(tmp_path, data, 2, workers[0], 6, **options)
    rest = train(tmp_path, data, 4, workers[1], 6, resume=True, **options)
    assert len(first) == len(rest) == 12
    assert sorted(first + rest) == list(range(COUNT))


def test_workers_with_different_numbers_of_prompts_continue_with_the_rest(folder, tmp_path):
    """5 prompts per step: 3 for one worker and 2 for the other, which needs a step more."""
    options = {"run_dir": tmp_path / "run", "backend": "local", "sync": "grad"}
    data = ParquetDataset(folder, shuffle=True, seed=1)
    first = train(tmp_path, data, 2, 2, 5, **options)
    assert len(first) == 10
    rest = train(tmp_path, data, 6, 2, 5, resume=True, **options)
    assert sorted(first + rest) == list(range(COUNT))


def test_loader_and_data_in_memory(folder, tmp_path):
    memory = IndexedDataset([{**row, "id": i} for i, row in enumerate(rows(8))])
    assert train(tmp_path, memory, 2, 1) == list(range(8))
    loader = DataLoader(ParquetDataset(folder), 12, collate_fn=list)
    assert train(tmp_path, loader, 1, 2, prompts=None) == list(range(COUNT))


def test_held_out_rows_are_evaluated_once_on_any_number_of_workers(folder, tmp_path):
    """They have the same numbers, and so the same responses."""
    held_out = ParquetDataset(folder, shuffle=True, seed=3)
    log = tmp_path / "log"

    def reward(row, text):
        if "id" in row:
            with open(log, "a") as file:
                print(json.dumps([row["id"], text]), file=file)
        return 0.0

    found = []
    for num_workers in (1, 2):
        options = {"num_workers": num_workers, "sync": "weights", "eval_data": held_out}
        with make(reward=reward, optimizer=create_optimizer, **options) as trainer:
            trainer.train(steps=1)
            trainer.evaluate()
        found.append(sorted(map(json.loads, log.read_text().splitlines())))
        log.unlink()
    assert [number for number, _ in found[0]] == list(range(COUNT))
    assert found[0] == found[1]


def create_optimizer(parameters):
    """Return an optimizer that changes nothing."""
    return Momentum(parameters, lr=0)


def test_sharded_data_raises(folder, raises):
    with raises(ValueError):
        make(data=ParquetDataset(folder, rank=0, world_size=2))
