"""Who gets which samples, told before anything is trained."""

import json
import random

import pytest

from miniray import doctor
from miniray.doctor import data_probe, dataset_check, dataset_shares
from tests.doctor.records import wording


class Numbers:
    def __init__(self, length, **held):
        self.length = length
        self.__dict__.update(held)

    def __len__(self):
        return self.length


def ids(report):
    return [list(share.given.ids) for share in report.shares]


def codes(report):
    return sorted(finding.code for finding in [*report.findings, *report.notes])


def test_samples_are_dealt_as_torch_deals_them(golden):
    report = doctor.check_dataset(Numbers(10), world_size=4, batch_size=2)
    assert ids(report) == [[0, 4, 8], [1, 5, 9], [2, 6, 0], [3, 7, 1]]
    assert [(s.samples, s.batches, s.last_batch) for s in report.shares] == [(3, 2, 1)] * 4
    assert codes(report) == ["repeated-samples"]
    golden("check_dataset/repeated.txt", report.text() + "\n")
    assert report.exit_code == 0


@pytest.mark.parametrize(("length", "world"), [(1, 3), (7, 2), (12, 4), (13, 5), (100, 7)])
def test_that_is_what_torch_does(length, world):
    data = pytest.importorskip("torch.utils.data")
    for rank in range(world):
        sampler = data.DistributedSampler(
            Numbers(length), num_replicas=world, rank=rank, shuffle=False
        )
        assert list(dataset_shares.dealt(length, world, rank)) == list(sampler)


def test_one_rank_of_interest():
    report = doctor.check_dataset(Numbers(12), rank=1, world_size=4, batch_size=4)
    assert [share.line() for share in report.shares] == ["rank 1: 3 samples, 1 batch: 1, 5, 9"]


def test_what_drop_last_costs(golden):
    report = doctor.check_dataset(Numbers(20), world_size=2, batch_size=4, drop_last=True)
    assert [(s.samples, s.batches) for s in report.shares] == [(8, 2), (8, 2)]
    assert codes(report) == ["dropped-samples"]
    golden("check_dataset/drop_last.txt", wording(report.notes[0]))


def test_a_rank_without_a_batch_is_told_before_it_hangs():
    report = doctor.check_dataset(Numbers(6), world_size=2, batch_size=4, drop_last=True)
    assert (report.findings[0].code, report.findings[0].ranks) == ("no-batches", (0, 1))
    assert report.exit_code == 1


def test_open_handles_are_named(tmp_path):
    path = tmp_path / "data.bin"
    path.write_bytes(b"x")
    with open(path, "rb") as file:
        report = doctor.check_dataset(Numbers(8, file=file), world_size=2, num_workers=2)
        assert "dataset.file" in report.findings[0].title
        harmless = doctor.check_dataset(Numbers(8, file=file), world_size=2)
    assert harmless.findings == ()
    assert harmless.notes[0].code == report.findings[0].code
    assert "num_workers=0" in harmless.notes[0].cause


def test_a_loader_is_asked_for_itself():
    torch = pytest.importorskip("torch")
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    data = TensorDataset(torch.arange(8))
    good = DataLoader(
        data, 2, sampler=DistributedSampler(data, num_replicas=2, rank=0, shuffle=False)
    )
    report = doctor.check_dataset(good)
    assert ids(report) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert report.findings == ()
    plain = doctor.check_dataset(DataLoader(data, 2), world_size=2)
    assert [f.code for f in plain.findings] == ["no-distributed-sampler"]
    assert ids(plain) == [list(range(8))] * 2


def share(rank, ids, batch_size):
    return dataset_shares.share_of(rank, dataset_shares.Taken(ids, len(ids)), batch_size, False)


def test_uneven_shares_will_hang():
    shares = [share(rank, range(count), 2) for rank, count in enumerate((8, 6))]
    setup = dataset_shares.Setup(14, 2, 2)
    found = list(dataset_check.judge(setup, shares, []))
    assert "uneven-batches" in [finding.code for finding in found]


def test_a_long_epoch_is_compared_by_its_first_ids():
    setup = dataset_shares.Setup(40_000, 2, 8, sampler="Mine")
    same = [share(rank, range(20_000), 8) for rank in range(2)]
    apart = [share(rank, range(rank * 20_000, (rank + 1) * 20_000), 8) for rank in range(2)]
    assert [f.code for f in dataset_check.judge(setup, same, [])] == ["same-data"]
    assert list(dataset_check.judge(setup, apart, [])) == []


def test_an_epoch_of_any_length_is_dealt_at_once():
    """One more than divides, so that samples are repeated: 3 × 100,000,000,001 in all."""
    report = doctor.check_dataset(Numbers(300_000_000_001), world_size=3, batch_size=64)
    assert [(s.samples, s.batches, s.last_batch) for s in report.shares] == [
        (100_000_000_001, 1_562_500_001, 1)
    ] * 3
    assert codes(report) == []


def test_a_long_epoch_of_a_loader_is_counted_whole(monkeypatch):
    data = pytest.importorskip("torch.utils.data")
    monkeypatch.setattr(dataset_shares, "MOST_IDS", 10)
    report = doctor.check_dataset(data.DataLoader(Numbers(25), 4), world_size=1)
    assert [(s.samples, s.batches, s.last_batch) for s in report.shares] == [(25, 7, 1)]


def test_batches_of_a_batch_samplers_own():
    data = pytest.importorskip("torch.utils.data")
    mine = data.DataLoader(Numbers(5), batch_sampler=[[0, 1, 2], [3], [4]])
    (one,) = doctor.check_dataset(mine, world_size=1).shares
    assert one.line() == "rank 0: 5 samples, 3 batches: 0, 1, 2, 3, 4"
    inner = data.BatchSampler(data.SequentialSampler(Numbers(5)), 2, drop_last=True)
    (one,) = doctor.check_dataset(data.DataLoader(Numbers(5), batch_sampler=inner)).shares
    assert (one.samples, one.batches, one.dropped) == (4, 2, 1)
    by_name = data.DataLoader(Numbers(5), sampler=["a", "b"])
    with pytest.raises(TypeError):
        doctor.check_dataset(by_name)


def test_bad_questions_are_refused():
    with pytest.raises(ValueError):
        doctor.check_dataset(Numbers(4), world_size=2, batch_size=0)
    with pytest.raises(ValueError):
        doctor.check_dataset(Numbers(4), rank=2, world_size=2)
    with pytest.raises(TypeError):
        doctor.check_dataset(iter([]), world_size=2)


def test_the_world_size_of_the_environment(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert len(doctor.check_dataset(Numbers(9)).shares) == 3


def test_the_report_is_for_programs_too():
    report = doctor.check_dataset(Numbers(4), world_size=2, batch_size=2).to_json()
    assert [rank["first"] for rank in report["ranks"]] == [[0, 2], [1, 3]]


def left_by(rank, ids, **fields):
    return {
        "iterated": True,
        "site": ["/home/user/train.py", 20, "main"],
        "length": 16,
        "batch_size": 4,
        "drop_last": False,
        "num_workers": 0,
        "sampler": "DistributedSampler",
        "distributed": True,
        "shuffle": True,
        "epoch_set": True,
        "count": len(ids),
        "batches": None,
        "ids": list(ids),
        "handles": [],
        "whole": [16, ""],
        **fields,
    }


def test_what_the_ranks_of_a_script_left_is_put_together(tmp_path):
    (tmp_path / "ranks").mkdir()
    for rank, ids in enumerate([range(0, 16, 2), range(1, 13, 2)]):
        path = data_probe.probe_file(tmp_path, rank)
        path.write_text(json.dumps([left_by(rank, ids, epoch_set=False)]))
    (report,) = data_probe.read(tmp_path, 2)
    assert [(share.samples, share.batches) for share in report.shares] == [(8, 2), (6, 2)]
    assert codes(report) == ["set-epoch-forgotten"]
    assert report.setup.where.endswith("train.py:20")
    assert data_probe.read(tmp_path / "nothing", 2) == []


def test_an_iterable_dataset_is_not_judged_by_its_samples(tmp_path):
    """It has no sampler and no length: that is no rank without a batch."""
    (tmp_path / "ranks").mkdir()
    for rank in range(2):
        left = left_by(rank, [], sampler="", distributed=False, length=None, shuffle=None)
        data_probe.probe_file(tmp_path, rank).write_text(json.dumps([left]))
    (report,) = data_probe.read(tmp_path, 2)
    assert codes(report) == ["iterable-dataset"]
    assert (report.exit_code, report.shares) == (0, ())


def probed(tmp_path, loader_of):
    """The report on two ranks' loaders, each looked at as in its own process."""
    (tmp_path / "ranks").mkdir()
    for rank in range(2):
        left = data_probe.describe_all([loader_of(rank)], "/home/user/train.py\0009\0main")
        data_probe.probe_file(tmp_path, rank).write_text(json.dumps(left))
    (report,) = data_probe.read(tmp_path, 2)
    return report


class Noisy(Numbers):
    """Samples of a fixed content with chance in it, as an augmentation has."""

    def __getitem__(self, index):
        import torch

        return index + torch.rand(1)


class OwnChance(Numbers):
    """The same samples on every rank, augmented by a generator of the rank's own."""

    def __init__(self, length, seed):
        super().__init__(length)
        self.chance = random.Random(seed)

    def __getitem__(self, index):
        return index + self.chance.random()


class Named(Numbers):
    """A part of the data, with the numbers that its samples have in the whole."""

    def __init__(self, length, first):
        super().__init__(length)
        self.first = first

    def miniray_sample_ids(self, indices):
        return [self.first + index for index in indices]


def lengthy_stream(length):
    from torch.utils.data import IterableDataset

    class Stream(IterableDataset):
        def __len__(self):
            return length

        def __iter__(self):
            return iter(range(length))

    return Stream()


def loaders(kind):
    torch = pytest.importorskip("torch")
    from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

    whole = TensorDataset(torch.arange(8))
    of_rank = {
        "everything": lambda rank: DataLoader(Noisy(8), 2, shuffle=True),
        "own chance": lambda rank: DataLoader(OwnChance(8, rank), 2),
        "named parts": lambda rank: DataLoader(Named(8 + rank, 8 * rank), 2, drop_last=True),
        "named alike": lambda rank: DataLoader(Named(8, 0), 2),
        "streams": lambda rank: DataLoader(lengthy_stream(8 + rank), 2),
        "own tensors": lambda rank: DataLoader(TensorDataset(torch.arange(4) + 4 * rank), 2),
        "own lengths": lambda rank: DataLoader(Numbers(8 + rank), 2),
        "subsets": lambda rank: DataLoader(Subset(whole, range(rank, 8, 2)), 2),
        "one subset": lambda rank: DataLoader(Subset(whole, [6, 7]), 2),
        "dealt twice": lambda rank: DataLoader(
            data := TensorDataset(torch.arange(4) + 4 * rank),
            sampler=DistributedSampler(data, num_replicas=2, rank=rank),
        ),
    }
    return of_rank[kind]


@pytest.mark.parametrize(
    ("kind", "found", "notes"),
    [
        ("everything", ["no-distributed-sampler"], []),
        ("own chance", ["no-distributed-sampler"], []),
        ("named parts", [], ["dropped-samples"]),
        ("named alike", ["no-distributed-sampler"], []),
        ("streams", [], ["iterable-dataset"]),
        ("own tensors", [], ["own-datasets"]),
        ("own lengths", ["uneven-batches"], ["own-datasets"]),
        ("subsets", [], []),
        ("one subset", ["no-distributed-sampler"], []),
        ("dealt twice", ["set-epoch-forgotten"], ["own-datasets"]),
    ],
)
def test_parts_made_by_hand_are_told_from_everything_on_every_rank(tmp_path, kind, found, notes):
    report = probed(tmp_path, loaders(kind))
    assert [[f.code for f in findings] for findings in (report.findings, report.notes)] == [
        found,
        notes,
    ]
    if kind == "subsets":
        assert ids(report) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    if kind == "own chance":
        assert "taken for granted" in report.findings[0].cause
    if kind == "dealt twice":
        assert "DistributedSampler" in report.notes[0].cause


class OpensLate(Numbers):
    """As is advised: the file is opened on first use, in each process."""

    file = None

    def __getitem__(self, index):
        if self.file is None:
            self.file = open(__file__, "rb")
        return index


def test_to_compare_sample_0_changes_nothing_that_is_reported():
    """Files it opens are no handles of the dataset; samplers draw by the script's own seeds."""
    torch = pytest.importorskip("torch")
    from torch.utils.data import DataLoader, RandomSampler

    def described():
        torch.manual_seed(7)
        data = OpensLate(1000)
        sampler = RandomSampler(data, replacement=True, num_samples=8)
        found = data_probe.describe_all([DataLoader(data), DataLoader(data, sampler=sampler)], "")
        if data.file is not None:
            data.file.close()
        return found

    torch.manual_seed(7)
    drawn = list(RandomSampler(range(1000), replacement=True, num_samples=8))
    first, second = described()
    assert (first["handles"], second["handles"]) == ([], [])
    assert second["ids"] == drawn
    assert first["whole"] == second["whole"]
    assert first["whole"][1]


def test_what_is_taken_for_granted_is_said(tmp_path):
    """Where sample 0 cannot be had, only numbers are compared."""
    torch = pytest.importorskip("torch")
    report = probed(tmp_path, lambda rank: torch.utils.data.DataLoader(Numbers(8), 2))
    assert codes(report) == ["no-distributed-sampler"]
    assert "taken for granted" in report.findings[0].cause


def test_a_look_at_the_first_batch_is_not_the_loop(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("shape = next(iter(loader))[0].shape\nfor batch in loader:\n    pass\n")
    looks = [data_probe._only_looks(f"{script}\0{line}\0<module>") for line in (1, 2)]
    assert looks == [True, False]
