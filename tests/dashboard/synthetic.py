"""Runs for the dashboard: ranks that train in forked processes, and records of ended ranks."""

import json
import os
import random
import time
from pathlib import Path

from miniray.doctor import recorder, runfile
from miniray.doctor.box import Box
from miniray.doctor.recorder import Recorder
from tests.doctor.helpers import wait_until

TRAIN = "/home/user/train.py"


def site(line, function="main"):
    return f"{TRAIN}\0{line}\0{function}"


def write_run(run_dir, world_size, state="running", **fields):
    """Write ``run.json`` as the launcher does, with this process as the driver."""
    run_dir.mkdir(parents=True, exist_ok=True)
    runfile.write_run(run_dir, world_size, "miniray run", hang_timeout=fields.pop("limit", 60.0))
    runfile.change_run(run_dir, state=state, **fields)


def append_metrics(run_dir, *records, name="metrics.jsonl"):
    with open(run_dir / name, "a") as file:
        for record in records:
            file.write(json.dumps(record) + "\n")


def begin(box):
    call = box.collective("all_reduce", "SUM", "default", (4,), "float32", site(16))
    return box.begin(call, time.monotonic_ns())


def one_step(box, rank, step, pace=0.02, loss=None):
    """Run one step of a data-parallel loop: data, compute, backward, a collective."""
    box.set_phase("data", site(10))
    time.sleep(pace * 0.2)
    box.data_ns += int(pace * 0.2e9)
    box.set_phase("compute", site(12))
    time.sleep(pace * 0.5)
    box.set_phase("backward", site(14))
    time.sleep(pace * 0.2)
    box.backward_ns += int(pace * 0.2e9)
    number = begin(box)
    time.sleep(pace * 0.1)
    box.collective_ns += int(pace * 0.1e9)
    box.end(number)
    box.set_loss(2.0 / (1 + step / 20) if loss is None else loss, site(13))
    box.add_samples(None, 8)
    box.end_step(time.monotonic_ns())


def train(run_dir, rank, world_size, pace=0.02):
    """Train until the file ``enough`` exists. Rank 0 writes the metrics."""
    box = recorder.start(run_dir, rank, world_size, heartbeat_interval=0.2)
    box.begin_steps()
    with open(run_dir / "ranks" / f"{rank}.log", "a", buffering=1) as log:
        step = 0
        while not (run_dir / "enough").exists():
            step += 1
            one_step(box, rank, step, pace)
            print(f"[Rank {rank}/{world_size}] step {step} done", file=log)
            if rank == 0 and step % 5 == 0:
                append_metrics(run_dir, {"epoch": step // 5, "loss": 2.0 / (1 + step / 20)})


def a_function_that_takes_long(run_dir):
    while not (run_dir / "enough").exists():
        time.sleep(0.01)


def hang(run_dir, rank, world_size, culprit, steps=10):
    """Wait in a collective on all ranks except ``culprit``, which loops in a function."""
    box = recorder.start(run_dir, rank, world_size, heartbeat_interval=0.2)
    box.begin_steps()
    log = open(run_dir / "ranks" / f"{rank}.log", "a", buffering=1)
    for step in range(1, steps + 1):
        one_step(box, rank, step, 0.02)
        print(f"[Rank {rank}/{world_size}] step {step} done", file=log)
    if rank == culprit:
        print(f"[Rank {rank}/{world_size}] looking for the vocabulary", file=log)
        box.set_phase("compute", site(12))
        a_function_that_takes_long(run_dir)
    else:
        box.set_phase("backward", site(14))
        number = begin(box)
        wait_until((run_dir / "enough").exists, limit=600)
        box.end(number)


def still_rank(
    run_dir, rank, world_size, steps=50, losses=None, kind="finished", earlier=(), offsets=(),
    **exit_fields,
):  # fmt: skip
    """Write the record of a rank that has ended.

    ``earlier`` is the history before a restart, and ``offsets`` are the global steps before each
    attempt, if the rank knows them.
    """
    folder = run_dir / "ranks"
    folder.mkdir(parents=True, exist_ok=True)
    info = {
        "rank": rank,
        "local_rank": rank,
        "world_size": world_size,
        "local_world_size": world_size,
        "pid": 0,
        "host": "elsewhere",
        "launcher": "miniray run",
        "box": str((folder / f"{rank}.box").absolute()),
        "heartbeat_interval": 1.0,
        "notes": {"step_offsets": list(enumerate(offsets))},
    }
    made = Recorder(Box.create(folder / f"{rank}.box"), info)
    began = time.monotonic_ns() - steps * 100_000_000
    made.history.begin_attempt(earlier)
    made.begin_steps(began)
    for step in range(1, steps + 1):
        value = losses[step - 1] if losses else 2.0 / step + 0.01 * rank
        made.set_loss(value, site(13))
        made.data_ns += 10_000_000
        made.backward_ns += 30_000_000
        made.collective_ns += 20_000_000
        made.end_step(began + step * 100_000_000)
    if not steps:  # a worker without torch, whose trainer counts epochs
        made.tell_epoch(3, site(9))
    made.box.ints[16] = 300_000_000 + rank * 1_000_000
    made.record_exit(kind, **exit_fields)
    made.close()


SPIKE = 1234.5


def many_points(path: Path, ranks=64, steps=977, names=16):
    """Write a million points with one spike in the loss: one line per rank and step."""
    draw = random.Random(0)
    noise = [round(draw.random(), 5) for _ in range(997)]
    words = ["loss", *(f"layer_{number}" for number in range(1, names))]
    with open(path, "w") as file:
        for step in range(steps):
            for rank in range(ranks):
                loss = SPIKE if (step, rank) == (steps // 2, 17) else noise[(step + rank) % 997]
                values = [loss] + [noise[(step * 7 + rank * 13 + k) % 997] for k in range(1, names)]
                texts = [f'"{name}": {value}' for name, value in zip(words, values, strict=True)]
                file.write(f'{{"step": {step}, "rank": {rank}, {", ".join(texts)}}}\n')
    return ranks * steps * names


def end(run_dir, ranks):
    """Stop the ranks of ``train`` or ``hang``, and check that they exit."""
    Path(run_dir, "enough").touch()
    assert set(ranks.wait()) == {0}
    assert not any(os.path.exists(f"/proc/{pid}") for pid in ranks.pids)
