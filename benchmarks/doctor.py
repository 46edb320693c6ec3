"""Measure the overhead of the flight recorder per update and per training step.

    python benchmarks/doctor.py [--quick] [--gpu] [--json PATH] [--markdown]

Figures are CPU time of the thread; of updates the best of several: other work of the machine only
adds. The step is a whole one of a DDP model on gloo, with a DataLoader, an optimizer and one
all_reduce. Blocks of steps with the recorder, with it switched off, and with torch's own functions
put back take turns in one process, and each is compared with its neighbours: steps of two processes
differ by more than the recorder takes, and so do those of two minutes. The steps are small ones, in
which the recorder's part can be told from the rest, and that part (the median of all turns, with a
step's share of what is written in lots) is set against a step of 5 ms.

With ``--gpu`` the step is one of 5 ms on the GPU, in bfloat16, DDP over NCCL. It is measured twice:
by the clock, with the GPU never waiting for the next step, and by the CPU time it takes to hand one
step over, with the GPU idle.
"""

from __future__ import annotations

import argparse
import contextlib
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
#: Kinds of steps: torch as it is, changed by ``doctor.attach``, and with the recorder.
TITLES = {"plain": "torch as it is", "without": "recorder off", "with": "recorder on"}
KINDS = tuple(TITLES)

#: kind (see TITLES) → figure → seconds, one for each turn
Steps = dict[str, dict[str, list[float]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few repetitions")
    parser.add_argument("--gpu", action="store_true", help="a step on the GPU instead")
    parser.add_argument("--json", type=Path, metavar="PATH", help="where all samples go")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--turns", type=int, default=0, help=argparse.SUPPRESS)  # in a child
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.turns:
        arguments.out.write_text(json.dumps(measure_steps(arguments.gpu, arguments.turns)))
        return

    started = common.stamp()
    updates: dict[str, list[float]] = {}
    if not arguments.gpu:
        with tempfile.TemporaryDirectory() as folder:
            updates = measure_updates(Path(folder), 3 if arguments.quick else 15)
    repetitions, turns = (1, 5) if arguments.quick else (1, 40) if arguments.gpu else (8, 60)
    steps: Steps = {}
    options = ["--turns", str(turns)] + ["--gpu"] * arguments.gpu
    for repetition in range(repetitions):
        print(f"steps, repetition {repetition + 1} of {repetitions}", flush=True)
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
        # A figure a turn.
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
    from miniray.doctor.reader import BoxReader

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


def measure_steps(on_gpu: bool, turns: int) -> Steps:
    """Seconds of a step, a figure a turn, of each of KINDS."""
    import doctor_training

    from miniray import doctor
    from miniray.doctor import recorder

    with tempfile.TemporaryDirectory() as folder:
        current = doctor.attach(folder, rank=0, world_size=1)
        training = doctor_training.on_gpu if on_gpu else doctor_training.on_cpu
        run = training(Path(folder))
        found: Steps = {}
        for turn in range(turns):
            for kind in KINDS if turn % 2 else reversed(KINDS):
                recorder._current = current if kind == "with" else None
                left_alone = contextlib.nullcontext if kind != "plain" else doctor_training.as_it_is
                with left_alone():
                    seconds = run()
                for figure, value in seconds.items():
                    found.setdefault(kind, {}).setdefault(figure, []).append(value)
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
    for kind, title in TITLES.items():
        lines.append(
            Line(f"a small step, {title}", [common.human(median(steps[kind]["cpu"]), "s")])
        )
    extra = extra_seconds({kind: of["cpu"] for kind, of in steps.items()}, updates)
    percent = 100 * extra / STEP_SECONDS
    lines.append(
        Line(
            "the recorder's part of a step of 5 ms",
            [f"{percent:.2f} % ({extra * 1e6:.0f} µs)"],
            f"< {STEP_PERCENT:g} %",
            percent < STEP_PERCENT,
        )
    )
    return lines


def extra_seconds(steps: dict[str, list[float]], updates: dict[str, list[float]]) -> float:
    """What the recorder adds to a step.

    A turn has the median of its steps, and in that one no lot is written: its share of one comes on
    top.
    """
    return _added(steps) + min(updates[WRITING]) / 1e9


def _added(steps: dict[str, list[float]]) -> float:
    turns = zip(steps["with"], steps["plain"], strict=True)
    return median([recorded - plain for recorded, plain in turns])


def summarise_gpu(steps: Steps) -> list[Line]:
    lines = []
    for kind, title in TITLES.items():
        clock, cpu = median(steps[kind]["clock"]), median(steps[kind]["cpu"])
        lines.append(Line(f"a step on the GPU, {title}", [common.human(clock, "s")]))
        lines.append(Line(f"handing it over, {title}", [common.human(cpu, "s")]))
    clocks = {kind: of["clock"] for kind, of in steps.items()}
    slower = 100 * _added(clocks) / median(clocks["plain"])
    extra = _added({kind: of["cpu"] for kind, of in steps.items()})
    percent = 100 * extra / STEP_SECONDS
    for title, cell, value in (
        ("slower by the clock", f"{slower:+.2f} %", slower),
        ("CPU time for 5 ms on the GPU", f"{percent:.2f} % ({extra * 1e6:.0f} µs)", percent),
    ):
        lines.append(Line(title, [cell], f"< {STEP_PERCENT:g} %", value < STEP_PERCENT))
    return lines


if __name__ == "__main__":
    main()
