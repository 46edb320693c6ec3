"""Measure pipeline bubbles, memory per worker and overhead of model parallelism.

    python benchmarks/parallel.py [--overhead] [--memory] [--quick] [--out PATH]
    python benchmarks/parallel.py --bubble [--quick] [--out PATH]

Without a choice overhead and memory are measured. Workers have one thread each; pipelines of more
workers than the machine has cores are left out, because there a stage that computes takes the time
of another: the bubble is for a machine of 4 cores and more, and has a file of results of its own.

Bubble: equal stages and microbatches of equal size, every step of an epoch after the first. Stages
take long enough that the schedule is measured, not the sending.
Overhead: the steps of an epoch in the trainer's ranks over those of two processes that make the
same calls of torch.distributed.pipelining by hand; both pairs are alive and take turns, and each
measures its own loop, from the first batch to the last optimizer step, on its slower rank. The
trainer's loop also records, checks and sends the targets; by hand both ranks load the batch. Three
times with fresh processes: two pairs by hand, too, differ by up to 3 %.
Memory: the largest worker's resident memory less that of a worker with next to no model.
"""

from __future__ import annotations

import argparse
import atexit
import json
import multiprocessing
import os
import shutil
import socket
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import common
from common import Line, median

from miniray.limits import cpu_count

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")
#: Wanted: a step of the trainer over the same calls by hand; the bubble above the formula's.
OVERHEAD, ABOVE = 1.03, 0.05
LAYERS = 8
#: Width of a layer and rows of a microbatch, of a step a trainer would take and of a long one.
USUAL, LONG = (384, 96), (768, 128)


# -- the model and its data ------------------------------------------------------------------------


def make_block(width: int) -> Any:
    import torch
    from torch import nn

    torch.set_num_threads(1)  # every worker makes its layers before it trains
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


def make_data(rows: int, batches: int, width: int) -> Any:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    x = torch.randn(rows * batches, width, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, x.roll(1, 1)), batch_size=rows)


def scratch() -> Path:
    """A folder that is gone when this process ends."""
    folder = tempfile.mkdtemp(prefix="miniray-bench-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def pipeline(case: dict[str, Any], kind: Any = None) -> Any:
    import torch
    from torch import nn

    from miniray.train import PipelineParallelTrainer

    width, rows = case["size"]
    stages = case["workers"] * (2 if case["schedule"] in ("interleaved", "zero_bubble") else 1)
    return (kind or PipelineParallelTrainer)(
        case["workers"],
        model=[partial(make_block, width)] * LAYERS,
        loss=nn.functional.mse_loss,
        optimizer=partial(torch.optim.Adam, lr=1e-4),
        data=partial(make_data, rows * case["microbatches"], case["steps"], width),
        schedule=case["schedule"],
        microbatches=case["microbatches"],
        layers_per_stage=[LAYERS // stages] * stages,
        progress=False,
        seed=0,
        run_dir=scratch() / "run",
    )


# -- the bubble ------------------------------------------------------------------------------------


def bubble_case(case: dict[str, Any]) -> dict[str, Any]:
    """For each schedule and number of microbatches: the bubble of each epoch after the first."""
    import miniray

    found = {}
    miniray.init(backend="local", num_workers=case["workers"])
    for microbatches in case["microbatches"]:
        for schedule in case["schedules"]:
            settings = {**case, "schedule": schedule, "microbatches": microbatches}
            with pipeline(settings) as trainer:
                result = trainer.train(case["epochs"])
            found[f"{schedule}, p={case['workers']}, m={microbatches}"] = {
                "bubble": [record["bubble"] for record in result.history[1:]],
                "formula": [result.bubble_formula],
                "peak_activations": [max(result.peak_activation_bytes)],
            }
    miniray.shutdown()
    return found


def measure_bubble(quick: bool, say: Any) -> dict[str, Any]:
    cores = cpu_count()
    found: dict[str, Any] = {}
    for workers in (2, 4):
        if workers > cores:
            say(f"{workers} workers are left out on {cores} cores")
            continue
        say(f"bubble of {workers} workers")
        found |= run_case(
            "bubble",
            workers=workers,
            microbatches=(4, 8) if quick else (4, 8, 16),
            schedules=("gpipe", "1f1b") if quick else SCHEDULES,
            epochs=2 if quick else 3,
            steps=4,
            size=USUAL if quick else LONG,
        )
    return found


def bubble_lines(found: dict[str, Any]) -> list[Line]:
    lines = []
    for name, samples in found.items():
        mine, formula = median(samples["bubble"]), samples["formula"][0]
        # The formula of zero_bubble is for weights' gradients as long as the inputs': a limit.
        goal = None if name.startswith("zero") else formula + ABOVE
        cells = [f"{100 * mine:.1f} %", f"{100 * formula:.1f} %", f"{100 * (mine - formula):+.1f}"]
        wanted = "" if goal is None else f"< +{100 * ABOVE:.0f}"
        lines.append(Line(name, cells, wanted, None if goal is None else mine <= goal))
    return lines


# -- the overhead ----------------------------------------------------------------------------------


def overhead_case(case: dict[str, Any]) -> dict[str, Any]:
    """Seconds a step, in turn: an epoch of the trainer, an epoch by hand, the other way round."""
    from miniray.train import PipelineParallelTrainer

    class Measured(PipelineParallelTrainer):
        def _summary(self, results: list[dict[str, Any]]) -> dict[str, Any]:
            self.step_seconds = max(r["seconds"] for r in results) / case["steps"]
            return super()._summary(results)

    found: dict[str, Any] = {"step": [], "hand": []}
    # Forked before this process has threads.
    with ByHand(case) as hand, pipeline(case, Measured) as trainer:

        def trainers() -> float:
            trainer.train(1)
            return float(trainer.step_seconds)

        turns = {"step": trainers, "hand": hand.epoch}
        for turn in turns.values():
            turn()  # connections, buffers, shapes
        for number in range(case["epochs"]):
            for kind in turns if number % 2 == 0 else reversed(turns):
                found[kind].append(turns[kind]())
    return found


class ByHand:
    """Two processes with torch alone that train an epoch whenever they are told to."""

    def __init__(self, case: dict[str, Any]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        fork = multiprocessing.get_context("fork")
        self._pipes, self._processes = [], []
        for rank in range(2):
            ours, theirs = fork.Pipe()
            process = fork.Process(target=_hand_rank, args=(rank, case, port, theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> ByHand:
        return self

    def epoch(self) -> float:
        """Seconds a step on the slower rank."""
        for pipe in self._pipes:
            pipe.send("epoch")
        return float(max(pipe.recv() for pipe in self._pipes))

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.send("end")
        for process in self._processes:
            process.join(30)
            process.kill()


def _hand_rank(rank: int, case: dict[str, Any], port: int, pipe: Any) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    width, rows = case["size"]
    module = nn.Sequential(*(make_block(width) for _ in range(LAYERS // 2)))
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, case["microbatches"], loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-4)
    loader = make_data(rows * case["microbatches"], case["steps"], width)
    while pipe.recv() == "epoch":
        dist.barrier()
        began = time.perf_counter()
        for x, y in loader:
            optimizer.zero_grad(set_to_none=True)
            if rank == 0:
                schedule.step(x, return_outputs=False)
            else:
                losses: list[Any] = []
                schedule.step(target=y, losses=losses, return_outputs=False)
                torch.stack([loss.detach() for loss in losses]).mean().item()
            optimizer.step()
        pipe.send((time.perf_counter() - began) / case["steps"])
    dist.destroy_process_group()


def measure_overhead(quick: bool, say: Any) -> dict[str, Any]:
    say("overhead")
    case = {"workers": 2, "microbatches": 8, "schedule": "1f1b", "size": USUAL}
    found: dict[str, Any] = {"step": [], "hand": []}
    for _ in range(1 if quick else 3):
        got = run_case("overhead", **case, epochs=4, steps=4 if quick else 8)
        for kind, seconds in got.items():
            found[kind] += seconds
    return found


def overhead_lines(found: dict[str, Any]) -> list[Line]:
    mine, hand = median(found["step"]), median(found["hand"])
    # Turn by turn: what slows the machine down for a while slows both.
    ratio = median([a / b for a, b in zip(found["step"], found["hand"], strict=True)])
    cells = [common.human(mine, "s"), common.human(hand, "s"), f"{ratio:.3f}×"]
    title = "a step, against the same calls by hand"
    return [Line(title, cells, f"< {OVERHEAD:g}×", ratio < OVERHEAD)]


# -- memory ----------------------------------------------------------------------------------------


def memory_case(case: dict[str, Any]) -> dict[str, Any]:
    """Bytes of the largest worker's resident memory after an epoch."""
    import torch
    from torch import nn

    from miniray.doctor import read_box
    from miniray.train import ModelParallelTrainer

    width = case["width"]
    with ModelParallelTrainer(
        case["workers"],
        model=[partial(make_block, width)] * LAYERS,
        split=case["split"],
        loss=nn.functional.mse_loss,
        optimizer=partial(torch.optim.Adam, lr=1e-4),
        data=partial(make_data, 16, 3, width),
        progress=False,
        run_dir=scratch() / "run",
    ) as trainer:
        trainer.train(2)
        time.sleep(1.5)  # the black boxes note memory once a second
        boxes = [trainer.run.path / "ranks" / f"{r}.box" for r in range(case["workers"])]
        return {"bytes": [max(read_box(box).rss for box in boxes)]}


def measure_memory(quick: bool, say: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for split, workers in (("layers", 1), ("layers", 2), ("tensor", 2)):
        for width in (8, 512 if quick else 1024):
            say(f"memory: {split}, {workers} workers, width {width}")
            got = run_case("memory", split=split, workers=workers, width=width)
            found[f"{split}, {workers}, {width}"] = got["bytes"]
    return found


def memory_lines(found: dict[str, Any]) -> list[Line]:
    width = max(int(name.rpartition(" ")[2]) for name in found)

    def own(split: str, workers: int) -> float:
        names = [f"{split}, {workers}, {size}" for size in (width, 8)]
        return float(found[names[0]][0] - found[names[1]][0])

    lines, whole = [], own("layers", 1)
    for split, words in (("layers", "layers dealt out"), ("tensor", "layers cut")):
        part = own(split, 2)
        cells = [f"{part / 1e6:.0f} MB", f"{whole / 1e6:.0f} MB", f"{part / whole:.2f}×"]
        lines.append(
            Line(f"memory of 1 of 2 workers, {words}", cells, "< 0.6×", part < 0.6 * whole)
        )
    return lines


# -- all -------------------------------------------------------------------------------------------

CASES = {"bubble": bubble_case, "overhead": overhead_case, "memory": memory_case}
SECTIONS = {
    "bubble": (measure_bubble, bubble_lines),
    "overhead": (measure_overhead, overhead_lines),
    "memory": (measure_memory, memory_lines),
}


def run_case(kind: str, **case: Any) -> dict[str, Any]:
    return common.run_measured(Path(__file__), ["--case", kind, "--with", json.dumps(case)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in SECTIONS:
        parser.add_argument(f"--{name}", action="store_true", help=f"measure the {name} only")
    parser.add_argument("--quick", action="store_true", help="fewer cases, fewer epochs")
    parser.add_argument("--out", "--json", type=Path, metavar="PATH", help="where results go")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--with", dest="settings", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        arguments.out.write_text(json.dumps(CASES[arguments.case](arguments.settings)))
        return

    chosen = [name for name in SECTIONS if getattr(arguments, name)] or ["overhead", "memory"]
    # Half of the page's figures must not take the place of all of them.
    kept = {"bubble": "bubble.json", "overhead, memory": "parallel.json"}.get(", ".join(chosen))
    out = arguments.out or (common.RESULTS / kept if kept else None)
    started, samples = common.stamp(), {}
    for name in chosen:
        samples[name] = SECTIONS[name][0](arguments.quick, lambda text: print(text, flush=True))
    if "memory" in chosen:
        samples["width"] = 512 if arguments.quick else 1024
    lines = [line for name in chosen for line in SECTIONS[name][1](samples[name])]
    record = {
        "started": started,
        "finished": common.stamp(),
        "machine": common.machine(),
        "versions": common.versions("miniray", "torch", "numpy"),
        "quick": arguments.quick,
        "samples": samples,
        "table": [vars(line) for line in lines],
    }
    columns = ["miniray", "against", "difference"]
    if arguments.markdown:
        print(common.markdown_table(columns, lines))
    else:
        common.print_table("Models split over workers", columns, lines)
    if out is not None:
        common.write_json(out, record)
        print(f"all samples: {out}")


if __name__ == "__main__":
    main()
