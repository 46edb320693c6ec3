"""What the recorder costs: one update of the box, and a training step with and without it.

    python benchmarks/doctor.py [--quick] [--gpu] [--json PATH] [--markdown]

All figures are CPU time of the thread, the best of several: other work of the machine only adds.
The step is a whole one of a DDP model on gloo, with a DataLoader, an optimizer and one all_reduce.
Blocks of steps with the recorder and without it take turns in one process, so that a change of the
machine's load meets both. The steps are small ones, in which the recorder's part can be told from
the rest, and that part, with a step's share of what is written in lots, is set against a step of
5 ms. "Never attached" are steps of a process whose torch was left as it is.

With ``--gpu`` the step is one of 5 ms on the GPU, in bfloat16, DDP over NCCL. It is measured twice:
by the clock, with the GPU never waiting for the next step, and by the CPU time it takes to hand one
step over, with the GPU idle.
"""

from __future__ import annotations

import argparse
import itertools
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
#: Steps are written in lots, at most ten a second: so many of 5 ms at a time.
LOT = 20
WRITING = "writing a step and its 16 sample ids, in lots"
KINDS = ("plain", "without", "with")

#: kind (see KINDS) → figure → seconds, one for each block
Steps = dict[str, dict[str, list[float]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few repetitions")
    parser.add_argument("--gpu", action="store_true", help="a step on the GPU instead")
    parser.add_argument("--json", type=Path, metavar="PATH", help="where all samples go")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--child", choices=["attached", "plain"], help=argparse.SUPPRESS)
    parser.add_argument("--blocks", type=int, default=40, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        found = measure_steps(arguments.gpu, arguments.child == "attached", arguments.blocks)
        arguments.out.write_text(json.dumps(found))
        return

    started = common.stamp()
    updates: dict[str, list[float]] = {}
    if not arguments.gpu:
        with tempfile.TemporaryDirectory() as folder:
            updates = measure_updates(Path(folder), 3 if arguments.quick else 15)
    repetitions, blocks = (1, 10) if arguments.quick else (1, 60) if arguments.gpu else (8, 40)
    steps: Steps = {}
    for repetition in range(repetitions):
        print(f"steps, repetition {repetition + 1} of {repetitions}", flush=True)
        for child in ("attached", "plain"):
            options = ["--child", child, "--blocks", str(blocks)] + ["--gpu"] * arguments.gpu
            for kind, samples in common.run_measured(Path(__file__), options).items():
                for figure, values in samples.items():
                    steps.setdefault(kind, {}).setdefault(figure, []).extend(values)
    lines = summarise_gpu(steps) if arguments.gpu else summarise(updates, steps)
    if arguments.markdown:
        print(common.markdown_table(["figure"], lines))
    else:
        common.print_table("The recorder", ["figure"], lines)
    record = {
        "started": started,
        "finished": common.stamp(),
        "machine": {**common.machine(), "gpu": _gpu_name() if arguments.gpu else None},
        "versions": common.versions("miniray", "torch", "numpy"),
        "updates_ns": updates,
        # A figure a block of steps.
        "steps_s": steps if arguments.gpu else {kind: of["cpu"] for kind, of in steps.items()},
        "table": [vars(line) for line in lines],
    }
    name = "doctor_gpu.json" if arguments.gpu else "doctor.json"
    path = arguments.json or common.RESULTS / name
    common.write_json(path, record)
    print(f"all samples: {path}")


# -- updates --------------------------------------------------------------------------------------


def measure_updates(folder: Path, repeats: int) -> dict[str, list[float]]:
    """Nanoseconds of each kind of update, a figure a repetition."""
    from miniray import doctor
    from miniray.doctor import recorder, sites
    from miniray.doctor.box_reader import BoxReader

    current = recorder.start(folder, 0, 1)
    box = current.box
    what = box.what("collective", "all_reduce", "SUM", "default", "float32", "", (4, 8))
    site = "/code/train.py\x0080\x00main"
    batches = itertools.cycle([list(range(at, at + 16)) for at in range(0, 1 << 20, 16)])
    current.begin_pass(0, 0)

    call = current.collective("all_reduce", "SUM", "default", (4, 8), "float32", site)

    def collective() -> None:
        current.end(current.begin(call, time.monotonic_ns()))

    def cell() -> None:
        box.ints[4] = 7

    kinds: dict[str, tuple[Callable[[], Any], int]] = {
        "a number": (cell, 20000),
        "the phase": (lambda: current.set_phase("forward", site), 20000),
        "an event": (lambda: box.event(what, 5), 20000),
        "a collective, begin and end": (collective, 20000),
        "a step is over": (lambda: current.end_step(time.monotonic_ns()), 2000),
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
    found[WRITING] = []
    for _ in range(repeats):
        spent = 0
        for _ in range(100):
            for _ in range(LOT):
                current.add_samples(next(batches), 16)
                current.end_step(time.monotonic_ns())
            began = time.thread_time_ns()
            current.flush_tally()
            spent += time.thread_time_ns() - began
        found[WRITING].append(spent / 100 / LOT)
    found["reading a whole box"] = []
    with BoxReader(box.path) as reader:
        for _ in range(repeats):
            began = time.thread_time_ns()
            reader.record()
            found["reading a whole box"].append(time.thread_time_ns() - began)
    recorder.stop()
    return found


# -- steps ----------------------------------------------------------------------------------------


def measure_steps(on_gpu: bool, attached: bool, blocks: int) -> Steps:
    """Seconds of a step, a figure a block; by whether the recorder was on."""
    import doctor_training

    from miniray import doctor
    from miniray.doctor import recorder

    with tempfile.TemporaryDirectory() as folder:
        current = doctor.attach(folder, rank=0, world_size=1) if attached else None
        training = doctor_training.on_gpu if on_gpu else doctor_training.on_cpu
        run = training(Path(folder))
        found: Steps = {}
        for block in range(blocks):
            kind = "plain" if not attached else "without" if block % 2 else "with"
            recorder._current = current if kind == "with" else None
            for figure, seconds in run().items():
                found.setdefault(kind, {}).setdefault(figure, []).append(seconds)
        recorder._current = current
        doctor_training.leave()  # before the folder goes: a thread of NCCL looks into the store
        recorder.stop()
    return found


def _gpu_name() -> str:
    import torch

    return str(torch.cuda.get_device_name(0))


# -- the table ------------------------------------------------------------------------------------


def summarise(updates: dict[str, list[float]], steps: Steps) -> list[Line]:
    lines = []
    in_the_way = {"a number", "the phase", "an event"}
    for name, samples in updates.items():
        best = min(samples)
        goal = f"≤ {UPDATE_NANOSECONDS} ns" if name in in_the_way else ""
        reached = best <= UPDATE_NANOSECONDS if goal else None
        lines.append(Line(name, [common.human(best / 1e9, "s")], goal, reached))
    plain, without, recorded = (min(steps[kind]["cpu"]) for kind in KINDS)
    # The median of a block is a step in which no lot is written: its share of one comes on top.
    extra = recorded - min(plain, without) + min(updates[WRITING]) / 1e9
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


def summarise_gpu(steps: Steps) -> list[Line]:
    titles = dict(zip(KINDS, ("never attached", "recorder off", "recorder on"), strict=True))
    lines = []
    for kind, title in titles.items():
        clock, cpu = median(steps[kind]["clock"]), min(steps[kind]["cpu"])
        lines.append(Line(f"a step on the GPU, {title}", [common.human(clock, "s")]))
        lines.append(Line(f"handing it over, {title}", [common.human(cpu, "s")]))
    # Blocks with the recorder and without it took turns: each is compared with its neighbour, for
    # what handing over takes differs more from second to second than by the recorder.
    recorded, without = steps["with"], steps["without"]
    clocks = zip(recorded["clock"], without["clock"], strict=True)
    slower = 100 * median([a / b - 1 for a, b in clocks])
    extra = median([a - b for a, b in zip(recorded["cpu"], without["cpu"], strict=True)])
    percent = 100 * extra / STEP_SECONDS
    for title, cell, value in (
        ("slower by the clock", f"{slower:+.2f} %", slower),
        ("CPU time for 5 ms on the GPU", f"{percent:.2f} % ({extra * 1e6:.0f} µs)", percent),
    ):
        lines.append(Line(title, [cell], f"< {STEP_PERCENT:g} %", value < STEP_PERCENT))
    return lines


if __name__ == "__main__":
    main()
