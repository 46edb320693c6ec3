"""What torch tells the recorder, with real process groups of forked ranks."""

import importlib
import math
import os
import re
import warnings

import pytest

from miniray import doctor
from miniray.doctor import model
from miniray.doctor.reader import read_run
from tests.doctor.helpers import Ranks

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset  # noqa: E402
from torch.utils.data.distributed import DistributedSampler  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module", autouse=True)
def _compiler():
    """DDP and optimizers import it, which takes seconds: done once here for all forked ranks."""
    importlib.import_module("torch._dynamo")


@pytest.fixture
def ranks(tmp_path):
    """Start ranks that each run ``function(rank)`` in a gloo group, and give the run's record."""
    started = Ranks()

    def run(function, world_size=2, statuses=None, group=True):
        def body(rank):
            torch.set_num_threads(1)
            doctor.attach(tmp_path / "run", rank=rank, world_size=world_size)
            if group:
                store = dist.FileStore(str(tmp_path / "store"), world_size)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
            function(rank)
            if group:
                dist.destroy_process_group()

        for rank in range(world_size):
            started.start(body, rank)
        assert started.wait() == (statuses or [0] * world_size)
        return read_run(tmp_path / "run")

    yield run
    started.end()


def line_of(text):
    """The number of the line of this file that holds ``text``, followed by a mark."""
    for number, line in enumerate(open(__file__), start=1):
        if f"# {text}" in line:
            return number
    raise AssertionError(text)


def calls(record, group="default"):
    return [(e.name, e.op, e.shape, e.dtype) for e in record.collectives(group)]


def test_every_collective_is_recorded_in_order_with_its_line(ranks):
    def body(rank):
        tensor = torch.ones(2, 3)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)  # first collective
        dist.broadcast(tensor, src=1)
        work = dist.all_reduce(torch.ones(4, dtype=torch.int64), async_op=True)
        work.wait()
        gathered = [torch.empty(2) for _ in range(2)]
        dist.all_gather(gathered, torch.ones(2))
        dist.all_gather_into_tensor(torch.empty(4), torch.ones(2))
        dist.reduce_scatter_tensor(torch.empty(2), torch.ones(4))
        dist.reduce(tensor, dst=0)
        dist.all_gather_object([None, None], {"rank": rank})
        dist.broadcast_object_list([rank], src=0)
        group = dist.new_group([0, 1])
        dist.barrier(group=group)
        dist.barrier()
        if rank == 0:
            dist.send(torch.ones(5), dst=1)
        else:
            dist.recv(torch.empty(5), src=0)
        alone = dist.new_group([1])  # rank 0 is not in it: its call does nothing
        dist.all_reduce(torch.ones(1), group=alone)
        if rank == 0:  # nobody else need come to this
            dist.new_group([0], use_local_synchronization=True)

    run = ranks(body)
    for record in run:
        assert calls(record) == [
            ("all_reduce", "MAX", (2, 3), "float32"),
            ("broadcast", "src=1", (2, 3), "float32"),
            ("all_reduce", "SUM", (4,), "int64"),
            ("all_gather", "", (2,), "float32"),
            ("all_gather_into_tensor", "", (2,), "float32"),
            ("reduce_scatter_tensor", "SUM", (2,), "float32"),
            ("reduce", "SUM dst=0", (2, 3), "float32"),
            ("all_gather_object", "", (), ""),
            ("broadcast_object_list", "src=0", (), ""),
            ("new_group", "ranks=[0, 1]", (), ""),
            ("barrier", "", (), ""),
            ("new_group", "ranks=[1]", (), ""),
        ]
        assert [e.sequence for e in record.collectives("default")] == list(range(12))
        assert not record.open_events
        assert record.waiting is None
        first = record.collectives("default")[0]
        assert (first.site.file, first.site.line) == (__file__, line_of("first collective"))
        (other,) = [e.group for e in record.collectives() if e.group.startswith("ranks 0,1 (#")]
        assert [e.name for e in record.collectives(other)] == ["barrier"]
        assert [other, 0, 2, 1] in record.notes["groups"]
        assert (record.backend, record.group_rank, record.group_size) == ("gloo", record.rank, 2)
        assert record.distributed_available
    sent, received = ([e for e in r.events if e.kind == model.POINT_TO_POINT] for r in run)
    assert [(e.name, e.op, e.shape) for e in sent] == [("send", "dst=1", (5,))]
    assert [(e.name, e.op, e.shape) for e in received] == [("recv", "src=0", (5,))]
    in_alone = [[e.name for e in r.collectives() if e.group.startswith("ranks 1 (#")] for r in run]
    assert in_alone == [[], ["all_reduce"]]


def test_a_group_for_each_kind_of_device_is_named_by_its_backends(ranks, tmp_path):
    """``init_process_group()`` asks for no backend: torch itself calls that one "undefined"."""

    def body(rank):
        store = dist.FileStore(str(tmp_path / "store"), 1)
        dist.init_process_group(store=store, rank=0, world_size=1)

    (record,) = ranks(body, world_size=1, group=False)
    assert "cpu:gloo" in record.backend


def test_functional_collectives_are_recorded_until_they_are_waited_for(ranks):
    """By these DTensor and compiled code communicate; what only traces them calls nothing."""

    def body(rank):
        import torch.distributed._functional_collectives as functional
        from torch.distributed.tensor.debug import CommDebugMode

        group, ones = dist.group.WORLD, torch.ones(2, 3)
        functional.all_reduce(ones, "sum", group)  # nobody waits for this one
        functional.all_gather_single(ones, 0, group).wait()  # functional gather
        functional.reduce_scatter_single(torch.ones(4), "max", 0, group) + 1
        with CommDebugMode():  # it calls the operator a second time
            functional.broadcast(ones, 1, group).wait()
        functional.all_reduce_coalesced([ones, ones], "sum", group)[1].wait()

        @torch.compile(backend="aot_eager")
        def compiled(tensor):
            return functional.all_reduce(tensor * 2, "sum", group) + 1

        assert compiled(torch.ones(4)).tolist() == [5.0] * 4
        weight = torch.ones(2, requires_grad=True)
        functional.all_gather_single_autograd(weight, 0, group).sum().backward()
        assert weight.grad.tolist() == [2.0, 2.0]
        operators = torch.ops._c10d_functional
        name = group.group_name
        operators.wait_tensor(operators.all_reduce(ones, reduce_op="sum", group_name=name))
        operators.wait_tensor(operators.broadcast(input=ones, src=1, group_name=name))
        part = dist.new_group([0, 1])
        functional.all_reduce(ones, "sum", part).wait()

    for record in ranks(body):
        assert calls(record) == [
            ("all_reduce", "SUM", (2, 3), "float32"),
            ("all_gather_into_tensor", "", (2, 3), "float32"),
            ("reduce_scatter_tensor", "MAX", (2,), "float32"),
            ("broadcast", "src=1", (2, 3), "float32"),
            ("all_reduce_coalesced", "SUM", (2, 3), "float32"),
            ("all_reduce", "SUM", (4,), "float32"),
            ("all_gather_into_tensor", "", (2,), "float32"),
            ("reduce_scatter_tensor", "SUM", (2,), "float32"),
            ("all_reduce", "SUM", (2, 3), "float32"),
            ("broadcast", "src=1", (2, 3), "float32"),
            ("new_group", "ranks=[0, 1]", (), ""),
        ]
        assert [e.sequence for e in record.open_events] == [0]
        assert {e.functional for e in record.collectives("default")[:-1]} == {True}
        assert record.waiting is None
        second = record.collectives("default")[1]
        assert (second.site.file, second.site.line) == (__file__, line_of("functional gather"))
        (other,) = [e.group for e in record.collectives() if e.group.startswith("ranks 0,1 (#")]
        assert calls(record, other) == [("all_reduce", "SUM", (2, 3), "float32")]


def test_the_same_line_again_is_recorded_like_the_first_time(ranks):
    """Three rounds of the ring: a record must hold nothing of the one whose place it takes."""
    shapes = [(2, 3), (), (5,), (), (1, 2, 3), ()]
    rounds = 256

    def body(rank):
        for turn in range(rounds):
            for shape in shapes:
                dist.all_reduce(torch.ones(shape))  # again and again
            if turn % 2:
                dist.all_reduce(torch.ones(7))  # now and then

    for record in ranks(body):
        found = record.collectives("default")
        expected = [
            (shape, line)
            for turn in range(rounds)
            for shape, line in [(shape, "again and again") for shape in shapes]
            + [((7,), "now and then")] * (turn % 2)
        ]
        assert len(found) == 510  # the group's end and the process's have the other two places
        assert [(e.shape, e.site.line) for e in found] == [
            (shape, line_of(line)) for shape, line in expected[-len(found) :]
        ]
        assert [e.sequence for e in found] == list(range(len(expected)))[-len(found) :]
        assert not record.open_events


def test_a_loss_is_seen_however_backward_is_called(ranks):
    seen = []

    def body(rank):
        weight = torch.nn.Parameter(torch.tensor([1.0]))
        record = doctor.recorder.current()
        for _ in range(2):  # the second time all lines are known
            for call in (
                lambda: (weight * 2).sum().backward(),
                lambda: (weight * 3).backward(),
                lambda: torch.autograd.backward((weight * 4).sum()),
                lambda: torch.autograd.backward([(weight * 5).sum()]),
                lambda: torch.autograd.backward(tensors=(weight * 6).sum()),
                lambda: (weight * torch.ones(2)).backward(torch.ones(2)),  # no loss
                lambda: (weight * 7).sum().backward(torch.tensor(1.0)),
            ):
                call()
                seen.append(record.loss)
        assert seen == [2.0, 3.0, 4.0, 5.0, 6.0, 6.0, 7.0] * 2

    record = ranks(body, world_size=1, group=False).ranks[0]
    assert record.loss == 7.0
    assert not [e for e in record.events if e.kind == model.NOTE]


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used = torch.nn.Linear(3, 1)
        self.norm = torch.nn.BatchNorm1d(3)
        self.spare = torch.nn.Linear(3, 1)

    def forward(self, x):
        return self.used(self.norm(x))


def test_a_training_loop_is_recorded_from_its_loader_to_its_optimizer(ranks):
    data = TensorDataset(torch.randn(22, 3), torch.randn(22, 1))

    def body(rank):
        torch.manual_seed(0)
        net = DistributedDataParallel(Net(), find_unused_parameters=True)
        sampler = DistributedSampler(data, shuffle=False)
        loader = DataLoader(data, batch_size=4, sampler=sampler)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for x, y in loader:
                optimizer.zero_grad()
                loss = ((net(x) - y) ** 2).mean()
                loss.backward()
                optimizer.step()
            with torch.no_grad():
                for x, _ in loader:
                    net.module(x)
        if rank == 0:
            doctor.recorder.current().note(loss=loss.item())

    run = ranks(body)
    for record in run:
        # 22 samples for 2 ranks are 11 each: batches of 4, 4 and 3.
        assert (record.step, record.epoch, record.backwards, record.batches) == (6, 1, 6, 12)
        assert (record.batch_size, record.samples) == (3, 22)
        assert [(p.loader, p.epoch, p.ids) for p in record.passes] == [
            (0, 0, tuple(range(record.rank, 22, 2))),
            (0, 1, tuple(range(record.rank, 22, 2))),
        ]
        (loader,) = record.loaders
        assert (loader.length, loader.batches, loader.batch_size) == (22, 3, 4)
        assert (loader.sampler, loader.replicas, loader.sampler_rank) == (
            "DistributedSampler", 2, record.rank,
        )  # fmt: skip
        assert (loader.shuffle, loader.set_epoch_calls, loader.passes) == (False, 2, 4)
        assert (loader.finished, loader.last_batches, loader.trained) == (4, 3, True)
        (net,) = record.models
        assert (net.name, net.parameters, net.elements) == ("Net", 6, 14)
        assert net.unused == ("spare.weight", "spare.bias")
        assert net.find_unused
        assert [s.step for s in record.steps] == [1, 2, 3, 4, 5, 6]
        assert all(s.seconds >= s.data + s.backward > 0 for s in record.steps)
        names = [e.name for e in record.collectives()]
        assert names == ["DDP.__init__"] + ["DDP.forward", "DDP.backward"] * 6
        assert math.isfinite(record.loss)
    first, second = run
    assert first.loss == pytest.approx(first.notes["loss"])
    assert first.models[0].digest == second.models[0].digest
    assert first.loaders[0].first_batch != second.loaders[0].first_batch


class Numbered(Dataset):
    """A part of the data that is numbered from 0 on every rank, but knows its samples' names."""

    def __init__(self, start):
        self.start = start

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return torch.tensor([float(self.start + index)])

    def miniray_sample_ids(self, indices):
        return [self.start + index for index in indices]


def test_samples_are_known_by_their_own_names_through_workers_and_subsets(ranks):
    def body(rank):
        for dataset in (Numbered(100), Subset(Numbered(0), [5, 4, 3])):
            for workers in (0, 2):
                loader = DataLoader(dataset, batch_size=2, num_workers=workers)
                assert len(list(loader)) == len(loader)

    record = ranks(body, world_size=1, group=False).ranks[0]
    hundreds, subset = (100, 101, 102, 103, 104, 105), (5, 4, 3)
    assert [p.ids for p in record.passes] == [hundreds, hundreds, subset, subset]
    assert record.exit.kind == "finished"
    assert [loader.num_workers for loader in record.loaders] == [0, 2, 0, 2]
    assert not record.initialised
    assert record.group_size == -1


def test_bad_losses_empty_batches_and_bars_are_noted(ranks):
    from tqdm import tqdm

    def body(rank):
        weight = torch.nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight], lr=0.0)
        for value in (1.0, math.inf, math.nan):
            (weight * value).backward()
            optimizer.step()
        collate = lambda samples: torch.empty(0, 3)  # noqa: E731
        list(DataLoader(range(4), batch_size=2, collate_fn=collate))
        tqdm(range(3), disable=True)
        with open(os.devnull, "w") as nowhere:
            tqdm(range(3), file=nowhere).close()  # the bar

    record = ranks(body, world_size=1, group=False).ranks[0]
    assert record.nonfinite == 2
    assert (record.first_nonfinite.step, record.first_nonfinite.value) == (2, math.inf)
    assert math.isnan(record.loss)
    assert record.loaders[0].empty_batches == 2
    assert record.batch_size == 0
    (bar,) = [e for e in record.events if e.kind == model.BAR]
    assert (bar.op, bar.site.line) == ("total=3", line_of("the bar"))


def test_the_loss_before_the_gradient_scaler_is_the_one_recorded(ranks):
    def body(rank):
        weight = torch.nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight], lr=0.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
        scaler.scale((weight * 0.5).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    record = ranks(body, world_size=1, group=False).ranks[0]
    assert record.loss == 0.5
    assert record.step == 1


def test_models_that_differ_and_the_error_of_a_rank_are_recorded(ranks):
    def body(rank):
        DistributedDataParallel(torch.nn.Linear(2, 2 + rank))

    run = ranks(body, statuses=[3, 3])
    first, second = (record.models[0] for record in run)
    assert first.digest != second.digest
    assert first.names == ("weight (2, 2) float32", "bias (2,) float32")
    assert second.names == ("weight (3, 2) float32", "bias (3,) float32")
    for record in run:
        assert record.exit.kind == "exception"
        assert record.exit.site.function == "body"


def test_an_observer_that_fails_says_so_once_and_leaves_training_alone(ranks):
    def body(rank):
        class Broken(torch.Tensor):
            def item(self):
                raise KeyError("not in this version")

        weight = torch.nn.Parameter(torch.ones(1))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                (weight * 2).sum().as_subclass(Broken).backward()
        assert weight.grad.item() == 6.0
        assert len(caught) == 1
        assert re.search(r"\blosses\b.*KeyError", str(caught[0].message))

    record = ranks(body, world_size=1, group=False).ranks[0]
    assert [e.name for e in record.events if e.kind == model.NOTE] == [
        "the recorder of losses failed"
    ]
    assert record.backwards == 3


def test_reported_loss_takes_precedence_over_backward(ranks):
    def work(rank):
        weight = torch.zeros(1, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for loss in (1.0, math.nan):
            for _ in range(4):
                ((weight.sum() + loss) / 4).backward()
            optimizer.step()
            doctor.step(loss=loss)
        (weight.sum() / 4).backward()  # of a step that isn't finished

    for record in ranks(work, group=False).ranks.values():
        assert [(step.step, repr(step.loss)) for step in record.steps] == [(1, "1.0"), (2, "nan")]
        assert (record.step, record.nonfinite, record.loss_step) == (2, 1, 2)
        assert math.isnan(record.loss)
