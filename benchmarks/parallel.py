"""Models split over workers: bubble against the formula, memory a worker, the trainer's overhead.

    python benchmarks/parallel.py [--quick] [--json PATH] [--markdown]

Every case runs in a fresh process with one thread a worker; pipelines of more workers than the
machine has cores are left out, because there a stage that computes takes the time of another.
The bubble is that of equal stages and microbatches of equal size. Memory is the largest worker's
resident memory less that of a worker with a model of next to nothing. The overhead is the time of
a step over that of the same calls of torch.distributed.pipelining written by hand, in turn.
"""

from __future__ import annotations

import argparse
import atexit
import json
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

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")
#: Wanted: a step of the trainer over the same calls by hand; the bubble above the formula's.
OVERHEAD, ABOVE = 1.03, 0.05
WIDTH, ROWS = 384, 96  # of a layer, and of a microbatch


# -- one case, in a process of its own -------------------------------------------------------------


def make_block(width: int) -> Any:
    from torch import nn

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


def bubble_case(case: dict[str, Any]) -> dict[str, Any]:
    """The bubble of each epoch after the first, measured and by the formula."""
    with _trainer(case, layers=8) as trainer:
        result = trainer.train(case["epochs"])
    return {
        "bubble": [record["bubble"] for record in result.history[1:]],
        "formula": [result.bubble_formula],
        "peak_activations": [max(result.peak_activation_bytes)],
    }


def _trainer(case: dict[str, Any], layers: int, width: int = WIDTH) -> Any:
    import torch
    from torch import nn

    from miniray.train import PipelineParallelTrainer

    rows = ROWS * case["microbatches"]
    return PipelineParallelTrainer(
        case["workers"],
        model=[partial(make_block, width)] * layers,
        loss=nn.functional.mse_loss,
        optimizer=partial(torch.optim.Adam, lr=1e-4),
        data=partial(make_data, rows, case["steps"], width),
        schedule=case["schedule"],
        microbatches=case["microbatches"],
        layers_per_stage=case.get("layers_per_stage"),
        progress=False,
        seed=0,
        run_dir=scratch() / "run",
    )


def step_case(case: dict[str, Any]) -> dict[str, Any]:
    """Seconds a step of the trainer, an epoch each, the first left out."""
    with _trainer({**case, "layers_per_stage": [4, 4]}, layers=8) as trainer:
        result = trainer.train(case["epochs"])
    return {"seconds": [record["seconds"] / case["steps"] for record in result.history[1:]]}


def hand_case(case: dict[str, Any]) -> dict[str, Any]:
    """The same with torch alone: two processes, PipelineStage, Schedule1F1B, Adam."""
    import torch.multiprocessing as mp

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "seconds.json"
        arguments = (case, port, str(out))
        mp.start_processes(_hand_rank, arguments, nprocs=2, start_method="fork")
        return {"seconds": json.loads(out.read_text())[1:]}


def _hand_rank(rank: int, case: dict[str, Any], port: int, out: str) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    module = nn.Sequential(*(make_block(WIDTH) for _ in range(4)))
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, case["microbatches"], loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-4)
    loader = make_data(ROWS * case["microbatches"], case["steps"], WIDTH)
    seconds = []
    for _ in range(case["epochs"]):
        dist.barrier()
        began = time.perf_counter()
        for x, y in loader:
            optimizer.zero_grad(set_to_none=True)
            if rank == 0:
                schedule.step(x)
            else:
                losses: list[Any] = []
                schedule.step(target=y, losses=losses)
                torch.stack(losses).mean().item()
            optimizer.step()
        dist.barrier()
        seconds.append((time.perf_counter() - began) / case["steps"])
    if rank == 0:
        Path(out).write_text(json.dumps(seconds))
    dist.destroy_process_group()


def memory_case(case: dict[str, Any]) -> dict[str, Any]:
    """Bytes of the largest worker's resident memory after an epoch."""
    import torch
    from torch import nn

    from miniray.doctor import read_box
    from miniray.train import ModelParallelTrainer

    width = case["width"]
    common_parts: dict[str, Any] = {
        "loss": nn.functional.mse_loss,
        "optimizer": partial(torch.optim.Adam, lr=1e-4),
        "data": partial(make_data, 16, 3, width),
        "progress": False,
        "run_dir": scratch() / "run",
    }
    layers = [partial(make_block, width)] * 8
    if case["split"] == "tensor":
        trainer: Any = ModelParallelTrainer(case["workers"], model=layers, **common_parts)
    else:
        trainer = ModelParallelTrainer(
            case["workers"], model=layers, split="layers", **common_parts
        )
    with trainer:
        trainer.train(2)
        time.sleep(1.5)  # the black boxes note memory once a second
        boxes = [trainer.run.path / "ranks" / f"{r}.box" for r in range(case["workers"])]
        return {"bytes": [max(read_box(box).rss for box in boxes)]}


CASES = {"bubble": bubble_case, "step": step_case, "hand": hand_case, "memory": memory_case}


# -- all cases -------------------------------------------------------------------------------------


def run_case(kind: str, **case: Any) -> dict[str, Any]:
    return common.run_measured(Path(__file__), ["--case", kind, "--with", json.dumps(case)])


def measure(quick: bool, say: Any) -> dict[str, Any]:
    cores = os.cpu_count() or 1
    repetitions, epochs, steps = (1, 3, 4) if quick else (3, 4, 8)
    found: dict[str, Any] = {"bubble": {}, "overhead": {"step": [], "hand": []}, "memory": {}}
    for workers in (2, 4):
        if workers > cores:
            say(f"{workers} workers are left out on {cores} cores")
            continue
        for microbatches in (4, 8) if quick else (4, 8, 16):
            for schedule in ("gpipe", "1f1b") if quick else SCHEDULES:
                name = f"{schedule}, p={workers}, m={microbatches}"
                say(name)
                stages = workers * (2 if schedule in ("interleaved", "zero_bubble") else 1)
                found["bubble"][name] = run_case(
                    "bubble",
                    workers=workers,
                    microbatches=microbatches,
                    schedule=schedule,
                    epochs=epochs,
                    steps=steps,
                    layers_per_stage=[8 // stages] * stages,
                )
    for repetition in range(repetitions):
        for kind in ("step", "hand") if repetition % 2 == 0 else ("hand", "step"):
            say(f"{repetition + 1}/{repetitions}  overhead: {kind}")
            case = {"workers": 2, "microbatches": 8, "schedule": "1f1b"}
            got = run_case(kind, **case, epochs=epochs + 1, steps=2 * steps)
            found["overhead"][kind] += got["seconds"]
    width = 512 if quick else 1024
    for kind, workers in (("layers", 1), ("layers", 2), ("tensor", 2)):
        for size in (8, width):
            say(f"memory: {kind}, {workers} workers, width {size}")
            got = run_case("memory", split=kind, workers=workers, width=size)
            found["memory"][f"{kind}, {workers}, {size}"] = got["bytes"]
    found["width"] = width
    return found


def summarise(found: dict[str, Any]) -> list[Line]:
    lines = []
    for name, samples in found["bubble"].items():
        mine, formula = median(samples["bubble"]), samples["formula"][0]
        # The formula of zero_bubble is for weights' gradients as long as the inputs': a limit.
        goal = None if name.startswith("zero") else formula + ABOVE
        cells = [f"{100 * mine:.1f} %", f"{100 * formula:.1f} %", f"{100 * (mine - formula):+.1f}"]
        wanted = "" if goal is None else f"< +{100 * ABOVE:.0f}"
        lines.append(Line(f"bubble: {name}", cells, wanted, None if goal is None else mine <= goal))
    mine, hand = (median(found["overhead"][kind]) for kind in ("step", "hand"))
    cells = [common.human(mine, "s"), common.human(hand, "s"), f"{mine / hand:.3f}×"]
    title = "a step, against the same calls by hand"
    lines.append(Line(title, cells, f"< {OVERHEAD:g}×", mine / hand < OVERHEAD))
    memory, width = found["memory"], found["width"]

    def own(kind: str, workers: int) -> float:
        return memory[f"{kind}, {workers}, {width}"][0] - memory[f"{kind}, {workers}, 8"][0]

    whole = own("layers", 1)
    for kind, words in (("layers", "layers dealt out"), ("tensor", "layers cut")):
        part = own(kind, 2)
        cells = [f"{part / 1e6:.0f} MB", f"{whole / 1e6:.0f} MB", f"{part / whole:.2f}×"]
        lines.append(
            Line(f"memory of 1 of 2 workers, {words}", cells, "< 0.6×", part < 0.6 * whole)
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer cases, once each")
    results = common.RESULTS / "parallel.json"
    parser.add_argument("--json", type=Path, default=results, metavar="PATH")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--with", dest="settings", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        arguments.out.write_text(json.dumps(CASES[arguments.case](arguments.settings)))
        return

    started = common.stamp()
    found = measure(arguments.quick, lambda text: print(text, flush=True))
    lines = summarise(found)
    columns = ["miniray", "against", "difference"]
    if arguments.markdown:
        print(common.markdown_table(columns, lines))
    else:
        common.print_table("Models split over workers", columns, lines)
    record = {
        "started": started,
        "finished": common.stamp(),
        "machine": common.machine(),
        "versions": common.versions("miniray", "torch", "numpy"),
        "quick": arguments.quick,
        "samples": found,
        "table": [vars(line) for line in lines],
    }
    common.write_json(arguments.json, record)
    print(f"all samples: {arguments.json}")


if __name__ == "__main__":
    main()
