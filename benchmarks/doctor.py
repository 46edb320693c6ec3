"""What the recorder costs: one update of the box, and a training step with and without it.

    python benchmarks/doctor.py [--quick] [--json PATH] [--markdown]

All figures are CPU time of the thread, the best of several: other work of the machine only adds.
The step is a whole one of a DDP model on gloo, with a DataLoader, an optimizer and one all_reduce.
Blocks of steps with the recorder and without it take turns in one process, so that a change of the
machine's load meets both. The steps are small ones, in which the recorder's part can be told from
the rest, and that part is set against a step of 5 ms. "Never attached" are steps of a process whose
torch was left as it is.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
from common import Line, median

#: Wanted: nanoseconds for an update; per cent of a step of 5 ms.
UPDATE_NANOSECONDS, STEP_PERCENT = 1000, 1.0
STEP_SECONDS = 0.005
BATCH_SIZE = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few repetitions")
    parser.add_argument("--json", type=Path, default=common.RESULTS / "doctor.json", metavar="PATH")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--child", choices=["attached", "plain"], help=argparse.SUPPRESS)
    parser.add_argument("--blocks", type=int, default=40, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        found = measure_steps(arguments.child == "attached", arguments.blocks)
        arguments.out.write_text(json.dumps(found))
        return

    started = common.stamp()
    with tempfile.TemporaryDirectory() as folder:
        updates = measure_updates(Path(folder), 3 if arguments.quick else 15)
    repetitions, blocks = (1, 10) if arguments.quick else (3, 40)
    steps: dict[str, list[float]] = {"with": [], "without": [], "plain": []}
    for repetition in range(repetitions):
        print(f"steps, repetition {repetition + 1} of {repetitions}", flush=True)
        for child in ("attached", "plain"):
            options = ["--child", child, "--blocks", str(blocks)]
            for kind, samples in common.run_measured(Path(__file__), options).items():
                steps[kind] += samples
    lines = summarise(updates, steps)
    if arguments.markdown:
        print(common.markdown_table(["figure"], lines))
    else:
        common.print_table("The recorder", ["figure"], lines)
    record = {
        "started": started,
        "finished": common.stamp(),
        "machine": common.machine(),
        "versions": common.versions("miniray", "torch", "numpy"),
        "updates_ns": updates,
        "steps_s": steps,  # a median of 30 steps each
        "table": [vars(line) for line in lines],
    }
    common.write_json(arguments.json, record)
    print(f"all samples: {arguments.json}")


# -- updates --------------------------------------------------------------------------------------


def measure_updates(folder: Path, repeats: int) -> dict[str, list[float]]:
    """Nanoseconds of each kind of update, a figure a repetition."""
    from miniray import doctor
    from miniray.doctor import recorder, sites
    from miniray.doctor.reader import BoxReader

    current = recorder.start(folder, 0, 1)
    box = current.box
    what = box.what("collective", "all_reduce", "SUM", "default", "float32", "", (4, 8))
    site = "/code/train.py\x0080\x00main"
    ids = list(range(64))
    current.begin_pass(0, 0)

    def collective() -> None:
        current.end(current.collective("all_reduce", "SUM", "default", (4, 8), "float32", site))

    def cell() -> None:
        box.ints[4] = 7

    kinds: dict[str, tuple[Callable[[], Any], int]] = {
        "a number": (cell, 20000),
        "the phase": (lambda: current.set_phase("forward", site), 20000),
        "an event": (lambda: box.event(what, 5), 20000),
        "a collective, begin and end": (collective, 20000),
        "a step with its times": (current.end_step, 5000),
        "a batch of 64 sample ids": (lambda: current.add_samples(ids, 64), 1000),
        "finding the user's line": (sites.here, 20000),
        "a named barrier, one rank": (lambda: doctor.barrier("b"), 2000),
    }
    found: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(repeats):
        for name, (update, number) in kinds.items():
            began = time.thread_time_ns()
            for _ in range(number):
                update()
            found[name].append((time.thread_time_ns() - began) / number)
    found["reading a whole box"] = []
    with BoxReader(box.path) as reader:
        for _ in range(repeats):
            began = time.thread_time_ns()
            reader.record()
            found["reading a whole box"].append(time.thread_time_ns() - began)
    recorder.stop()
    return found


# -- steps ----------------------------------------------------------------------------------------


def measure_steps(attached: bool, blocks: int) -> dict[str, list[float]]:
    """CPU seconds of a step, a median a block; by whether the recorder was on."""
    from miniray import doctor
    from miniray.doctor import recorder

    with tempfile.TemporaryDirectory() as folder:
        current = doctor.attach(folder, rank=0, world_size=1) if attached else None
        run = _training(Path(folder))
        found: dict[str, list[float]] = {}
        for block in range(blocks):
            kind = "plain" if not attached else "without" if block % 2 else "with"
            recorder._current = current if kind == "with" else None
            times = run(BATCH_SIZE, 32)
            found.setdefault(kind, []).append(median(times[2:]))  # the first find cold caches
        recorder._current = current
        recorder.stop()
    return found


def _training(folder: Path) -> Callable[[int, int], list[float]]:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, TensorDataset

    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(folder / "store"), 1), rank=0, world_size=1
    )
    net = torch.nn.Sequential(
        torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256), torch.nn.ReLU(),
        torch.nn.Linear(256, 1),
    )  # fmt: skip
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def run(batch_size: int, steps: int) -> list[float]:
        data = TensorDataset(torch.randn(steps * batch_size, 64))
        loader = DataLoader(data, batch_size=batch_size, collate_fn=_first)
        times: list[float] = []
        began = time.thread_time()
        for x in loader:
            optimizer.zero_grad()
            loss = model(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            dist.all_reduce(loss.detach())
            now = time.thread_time()
            times.append(now - began)
            began = now
        return times

    return run


def _first(samples: list[Any]) -> Any:
    import torch

    return torch.stack([sample[0] for sample in samples])


# -- the table ------------------------------------------------------------------------------------


def summarise(updates: dict[str, list[float]], steps: dict[str, list[float]]) -> list[Line]:
    lines = []
    in_the_way = {"a number", "the phase", "an event"}
    for name, samples in updates.items():
        best = min(samples)
        goal = f"≤ {UPDATE_NANOSECONDS} ns" if name in in_the_way else ""
        reached = best <= UPDATE_NANOSECONDS if goal else None
        lines.append(Line(name, [common.human(best / 1e9, "s")], goal, reached))
    plain, without, recorded = (min(steps[kind]) for kind in ("plain", "without", "with"))
    extra = recorded - min(plain, without)
    percent = 100 * extra / STEP_SECONDS
    lines.append(Line("a small step, never attached", [common.human(plain, "s")]))
    lines.append(Line("a small step, recorder off", [common.human(without, "s")]))
    lines.append(Line("a small step, recorder on", [common.human(recorded, "s")]))
    lines.append(
        Line(
            "the recorder's part of a step of 5 ms",
            [f"{percent:.2f} % ({extra * 1e6:.0f} µs)"],
            f"< {STEP_PERCENT:g} %",
            percent < STEP_PERCENT,
        )
    )
    return lines


if __name__ == "__main__":
    main()
