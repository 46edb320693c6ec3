"""Records of ranks made by hand, for the doctor to reason on."""

import dataclasses
from pathlib import Path

from miniray.doctor.model import (
    COLLECTIVE,
    Barrier,
    Event,
    Exit,
    Loader,
    Model,
    Phase,
    Process,
    RankRecord,
    RunRecord,
    SamplePass,
    Site,
    Steps,
)

NOW = 1_000_000.0
NOWHERE = Site("", 0, "")
LIMIT = 60.0
ALIVE = Process(True, "S", 1.0, 0, 3, 0)


def at(line, file="train.py", function="main"):
    return Site(f"/home/user/{file}", line, function)


def rank(number, world=2, **fields):
    """A healthy rank in the middle of training, with what is given changed."""
    record = RankRecord(
        path=Path(f"/runs/x/ranks/{number}.box"),
        rank=number,
        local_rank=number,
        world_size=world,
        local_world_size=world,
        pid=100 + number,
        host="here",
        launcher="tests",
        command="python train.py",
        attached=NOW - 500,
        attempt=0,
        distributed_available=True,
        initialised=True,
        backend="gloo",
        group_rank=number,
        group_size=world,
        phase=Phase("compute", at(1), NOW - 0.01),
        section=None,
        waiting=None,
        events=(),
        event_count=0,
        step=10,
        epoch=0,
        batch_size=8,
        batches=10,
        batches_in_epoch=10,
        backwards=10,
        history=(),
        total=Steps(10, 10, 0, NOW, 1.0, 0.1, 0.1, 0.1, 0.5, 8),
        loss=0.5,
        loss_step=10,
        nonfinite=0,
        first_nonfinite=None,
        samples=80,
        passes=(),
        loaders=(),
        models=(),
        barrier=None,
        rss=100_000_000,
        peak_rss=120_000_000,
        gpu=None,
        cpu_seconds=1.0,
        heartbeat=NOW - 0.5,
        heartbeat_interval=1.0,
        exit=None,
        process=ALIVE,
        notes={},
    )
    return dataclasses.replace(record, **fields)


def call(sequence, name="all_reduce", line=80, ago=300.0, *, is_open=False, **fields):
    """A collective; it took a millisecond unless it is open."""
    event = Event(
        number=sequence,
        kind=COLLECTIVE,
        name=name,
        op="SUM" if name == "all_reduce" else "",
        group="default",
        sequence=sequence,
        shape=(4,) if name == "all_reduce" else (),
        dtype="float32" if name == "all_reduce" else "",
        site=at(line),
        step=sequence,
        at=NOW - ago,
        ended=None if is_open else NOW - ago + 0.001,
        blocking=True,
    )
    return dataclasses.replace(event, **fields)


def calling(number, *events, world=2, **fields):
    """A rank that made these calls: waiting in the last if that is open, idle if there is none."""
    last = events[-1] if events else None
    waiting = last if last is not None and last.is_open else None
    since = NOW - 400 if last is None else last.at if waiting else NOW - 0.01
    return rank(
        number,
        world,
        events=events,
        event_count=len(events),
        waiting=waiting,
        phase=Phase("compute", at(1), since),
        **fields,
    )


def groups(name, *ranks):
    """Notes of a rank that has seen this group."""
    return {"groups": [[name, r, r + 1, 1] for r in ranks]}


def run(*records, world=None, duplicates=(), **fields):
    world = world or max(r.world_size for r in records)
    whole = {"world_size": world, "config": {"hang_timeout": LIMIT}, **fields}
    return RunRecord(
        Path("/runs/x"), NOW, whole, {r.rank: r for r in records}, tuple(duplicates), {}
    )


def loader(**fields):
    made = Loader(
        index=0,
        dataset="TensorDataset",
        length=32,
        batches=4,
        batch_size=8,
        num_workers=0,
        drop_last=False,
        persistent_workers=False,
        sampler="DistributedSampler",
        replicas=2,
        sampler_rank=0,
        shuffle=True,
        seed=0,
        set_epoch_calls=1,
        passes=1,
        finished=0,
        last_batches=0,
        empty_batches=0,
        trained=True,
        first_batch=(),
        site=at(20),
    )
    return dataclasses.replace(made, **fields)


def samples(ids, epoch=0, index=0):
    return SamplePass(index, epoch, len(ids), tuple(ids[:4096]))


def model(**fields):
    made = Model(
        name="Net",
        parameters=2,
        elements=20,
        digest="aa",
        names=("0.weight (4, 4) float32", "0.bias (4,) float32"),
        buffers=0,
        find_unused=False,
        static_graph=False,
        device="cpu",
        site=at(9),
        unused=(),
        unused_step=-1,
    )
    return dataclasses.replace(made, **fields)


def ended(kind="exception", **fields):
    made = Exit(
        kind=kind,
        code=1,
        signal="",
        type="ValueError" if kind == "exception" else "",
        message="bad label" if kind == "exception" else "",
        site=at(33) if kind == "exception" else NOWHERE,
        traceback="",
        at=NOW - 10,
    )
    return dataclasses.replace(made, **fields)


FINISHED = ended("finished", code=0)
GONE = Process(False, "", None, None, None, None)


def barrier(number, name="save", passed=False, ago=300.0, line=9):
    return Barrier(number, name, at(line), NOW - ago, 600.0, passed, False)


def wording(finding):
    """Return all that is shown of a finding, for golden files."""
    head = f"{finding.severity.word} {finding.code} ranks {list(finding.ranks)} {finding.site}"
    parts = [head, finding.title, *finding.evidence, finding.cause, finding.fix]
    return "\n".join(parts) + "\n"


def steps(times, data=0.0, first=1):
    """Steps that took ``times`` seconds of the rank's own, each followed by a backward of 1 ms."""
    return tuple(
        Steps(first + i, 1, 0, NOW, own + 0.001, own if data else 0.0, 0.001, 0.0, 1.0, 8)
        for i, own in enumerate(times)
    )
