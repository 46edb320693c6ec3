"""Compare the training of a CNN on two workers with other frameworks.

    python benchmarks/train.py [--quick] [--only miniray,torchrun] [--json PATH] [--markdown]
    python benchmarks/train.py --scaling [--workers 1,2,4,8,16]
    python benchmarks/train.py --pairs 20

Each of ``train_scripts/`` is a whole program and runs as a user would start it, in fresh processes,
taking turns: 1 M parameters, 4,096 samples, batches of 64 a worker, 3 epochs, a thread a process.
They do not do the same for the model: miniray averages weights once an epoch, the others average
gradients in every step; ``sync_interval.py`` says what that means for the loss.

- wall: the whole command. First step: from its start to the end of every worker's first step.
- time of an epoch: from the last step of an epoch to the last step of the next.
- samples/s: of all workers together, over the steps of an epoch without its first one.
  Whole run: from the first step to the last, with all that happens between epochs.
- lines: of the script, between its markers, without blank lines and comments.
- memory: the sum of PSS over all processes at its highest, in a run of its own.

With ``--scaling`` it is miniray and plain torch DDP with more and more workers on the same 32,768
samples: samples/s over the whole run and how much faster than its own single worker that is.

With ``--pairs`` it is the steady-state step time of ``DDPTrainer`` and of a hand-written DDP loop
on 16,384 samples: the median time between two steps, without the first epoch and the first step of
the others. Each pair is one run of both, in alternating order. The result is the median of the
ratios over all pairs, with its 95 % interval from order statistics.

Figures are medians; the JSON file has every sample. Peers that are not installed are left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import itertools
import os
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import common
import psutil
from common import Line, median

SCRIPTS = Path(__file__).with_name("train_scripts")
SAMPLES, BATCH, EPOCHS = 4096, 64, 3

_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "{workers}")
# With --cpu it would start one process and not say so.
_ACCELERATE = (
    *("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"),
    *("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"),
)


@dataclass(frozen=True)
class Peer:
    title: str
    script: str
    package: str
    launcher: tuple[str, ...] = ()
    workers: int = 2


PEERS: dict[str, Peer] = {
    "miniray": Peer("miniray", "miniray_train.py", "miniray"),
    "ddp": Peer("miniray DDP", "miniray_ddp.py", "miniray"),
    "torchrun": Peer("torchrun DDP", "torchrun_ddp.py", "torch", _TORCHRUN),
    "lightning": Peer("Lightning", "lightning_ddp.py", "lightning"),
    "accelerate": Peer("Accelerate", "accelerate_ddp.py", "accelerate", _ACCELERATE),
    "ray": Peer("Ray Train", "ray_train.py", "ray"),
    "one": Peer("one process", "one_process.py", "torch", workers=1),
}

#: Key, title, unit, whether more is better, and what is wanted: a share of the best peer.
METRICS: list[tuple[str, str, str, bool, float | None]] = [
    ("wall", "wall time of the command", "s", False, 1.0),
    ("first_step", "time to first step", "s", False, 1.0),
    ("epoch", "time of an epoch", "s", False, 0.98),
    ("rate", "samples/s in training steps", "", True, 0.98),
    ("rate_whole", "samples/s, whole run", "", True, 0.98),
    ("lines", "lines of code", "", False, 1.0),
    ("memory", "memory, highest (PSS)", "MB", False, None),
]

#: Peers of ``--scaling``: those that need nothing but torch.
SCALING: dict[str, Peer] = {
    "miniray": Peer("miniray", "miniray_scaling.py", "miniray"),
    "torchrun": PEERS["torchrun"],
}
SCALING_SAMPLES = 32_768
#: Peers of ``--pairs``, and how much longer a step of the first one may take.
PAIR, PAIR_LIMIT = ("ddp", "torchrun"), 1.02
PAIR_SAMPLES = 16_384

Samples = dict[str, list[float]]


def missing(peer: Peer) -> str | None:
    """Why ``peer`` cannot run here, if so."""
    needed = [peer.package, *(["pydantic", "pyarrow"] if peer.package == "ray" else [])]
    absent = [name for name in needed if importlib.util.find_spec(name) is None]
    return f"{' and '.join(absent)} not installed" if absent else None


def run(
    peer: Peer, measure_memory: bool = False, timeout: float = 180, samples: int = SAMPLES
) -> dict[str, float]:
    """One run of ``peer``'s command. Raises ``RuntimeError`` if it did not do its work."""
    with tempfile.TemporaryDirectory(prefix="bench-train-") as folder:
        steps = Path(folder) / "steps"
        steps.mkdir()
        launcher = [part.format(workers=peer.workers) for part in peer.launcher]
        command = [sys.executable, *launcher, str(SCRIPTS / peer.script)]
        log = Path(folder) / "log"
        memory = 0.0
        with log.open("w") as file:
            start = time.monotonic()
            process = subprocess.Popen(
                command,
                env=_environment(folder, steps, peer.workers, samples),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                if measure_memory:
                    while process.poll() is None and time.monotonic() < start + timeout:
                        memory = max(memory, tree_pss(process.pid))
                        time.sleep(0.1)
                status: int | str = process.wait(max(0, start + timeout - time.monotonic()))
            except subprocess.TimeoutExpired:
                status = f"no end after {timeout:g} s"
            finally:
                wall = time.monotonic() - start
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        times = [_read_times(path) for path in sorted(steps.glob("*.steps"))]
        # A launcher that quietly starts one process, or does half of the batches, is not measured.
        wanted = [samples // BATCH // peer.workers * EPOCHS] * peer.workers
        if status != 0 or [len(t) for t in times] != wanted:
            shown = log.read_text(errors="replace")[-4000:]
            counts = [len(t) for t in times]
            raise RuntimeError(
                f"{' '.join(command)} ended with {status}, steps {counts}, not {wanted}:\n{shown}"
            )
    if measure_memory:
        return {"memory": memory / 1e6}
    first, last = max(t[0] for t in times), max(t[-1] for t in times)
    return {
        "wall": wall,
        "first_step": first - start,
        "epoch": max(_measure_epoch(t) for t in times),
        "step": statistics.median(itertools.chain(*map(_list_intervals, times))),
        "rate": sum(_rate(t) for t in times),
        "rate_whole": sum(len(t) - 1 for t in times) * BATCH / (last - min(t[0] for t in times)),
        "after_last_step": start + wall - last,
    }


def _environment(home: str, steps: Path, workers: int, samples: int) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MINIRAY_", "RAY_"))}
    paths = [str(common.ROOT / "src"), str(SCRIPTS), kept.get("PYTHONPATH", "")]
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", "")]),
        "OMP_NUM_THREADS": "1",
        "BENCH_STEPS": str(steps),
        "BENCH_WORKERS": str(workers),
        "BENCH_SAMPLES": str(samples),
        "HOME": home,  # where Ray Train writes its results and Accelerate looks for its settings
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def _read_times(path: Path) -> list[float]:
    data = path.read_bytes()
    return list(struct.unpack(f"{len(data) // 8}d", data))


def _rate(times: list[float]) -> float:
    """Samples a second in one worker's steps, without the first of each epoch."""
    per_epoch = len(times) // EPOCHS
    epochs = [times[i : i + per_epoch] for i in range(0, len(times), per_epoch)]
    return EPOCHS * (per_epoch - 1) * BATCH / sum(epoch[-1] - epoch[0] for epoch in epochs)


def _measure_epoch(times: list[float]) -> float:
    """Seconds from the end of an epoch to the end of the next, the median."""
    ends = times[len(times) // EPOCHS - 1 :: len(times) // EPOCHS]
    return statistics.median(after - before for before, after in itertools.pairwise(ends))


def _list_intervals(times: list[float]) -> list[float]:
    """Seconds between two steps of one worker, after the first epoch and inside an epoch."""
    per_epoch = len(times) // EPOCHS
    epochs = [times[i : i + per_epoch] for i in range(per_epoch, len(times), per_epoch)]
    return [after - before for epoch in epochs for before, after in itertools.pairwise(epoch)]


def tree_pss(pid: int) -> float:
    """Bytes of a process and all below it; what several share counts once."""
    total = 0.0
    try:
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.Error:
        return 0.0
    for process in processes:
        try:
            total += process.memory_full_info().pss
        except (psutil.Error, AttributeError, FileNotFoundError):
            continue
    return total


def user_lines(peer: Peer) -> int:
    text = (SCRIPTS / peer.script).read_text()
    code = text.partition("# -- user code\n")[2].partition("# -- end")[0].splitlines()
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in code)


def measure(names: list[str], repetitions: int, say: Callable[[str], None]) -> dict[str, Samples]:
    samples: dict[str, Samples] = {name: {"lines": [user_lines(PEERS[name])]} for name in names}
    for repetition in range(repetitions + 1):
        memory = repetition == repetitions  # sampling takes time: in a run of its own
        # Taking turns at being first, too.
        for name in names if repetition % 2 == 0 else reversed(names):
            once = functools.partial(run, PEERS[name], measure_memory=memory)
            found = once() if PEERS[name].package == "miniray" else common.tried_again(once, say)
            shown = ", ".join(f"{key} {value:.4g}" for key, value in found.items())
            turn = "memory" if memory else f"{repetition + 1}/{repetitions}"
            say(f"{turn}  {PEERS[name].title}: {shown}")
            for key, value in found.items():
                samples[name].setdefault(key, []).append(value)
    return samples


def summarise(samples: dict[str, Samples]) -> list[Line]:
    """A line a metric; the last cell is miniray against the best of those with two workers."""
    lines = []
    for key, title, unit, more, goal in METRICS:
        values = {name: median(of[key]) for name, of in samples.items()}
        cells = [common.human(value, unit).strip() for value in values.values()]
        others = (n for n in values if PEERS[n].package != "miniray" and PEERS[n].workers > 1)
        peers = [values[name] for name in others]
        if "miniray" not in values or not peers:
            lines.append(Line(title, [*cells, ""]))
            continue
        ratio = values["miniray"] / max(peers) if more else min(peers) / values["miniray"]
        wanted = "" if goal is None else "first" if goal == 1 else f"{goal:g}×"
        reached = None if goal is None else ratio >= goal
        lines.append(Line(title, [*cells, f"{ratio:.2f}×"], wanted, reached))
    return lines


def measure_scaling(
    workers: list[int], samples: int, repetitions: int, say: Callable[[str], None]
) -> dict[str, Samples]:
    """By peer and number of workers; all taking turns."""
    found: dict[str, Samples] = {}
    for repetition in range(repetitions):
        for count in workers:
            for name, peer in SCALING.items():
                sized = dataclasses.replace(peer, workers=count)
                figures = run(sized, timeout=600, samples=samples)
                rate = figures["rate_whole"]
                say(f"{repetition + 1}/{repetitions}  {peer.title} on {count}: {rate:,.0f}/s")
                for key, value in figures.items():
                    found.setdefault(f"{name}-{count}", {}).setdefault(key, []).append(value)
    return found


def summarise_scaling(found: dict[str, Samples], workers: list[int]) -> list[Line]:
    """Two lines a peer, a cell a number of workers."""
    lines = []
    for name, peer in SCALING.items():
        rates = [median(found[f"{name}-{count}"]["rate_whole"]) for count in workers]
        cells = [common.human(rate, "").strip() for rate in rates]
        lines.append(Line(f"{peer.title}: samples/s, whole run", cells))
        # Against the smallest number of workers there is, which should be 1.
        gains = [rate / rates[0] for rate in rates]
        shares = [gain * workers[0] / count for gain, count in zip(gains, workers, strict=True)]
        cells = [f"{g:.2f}× ({s:.0%})" for g, s in zip(gains, shares, strict=True)]
        lines.append(Line(f"{peer.title}: speed-up (efficiency)", cells))
        firsts = [median(found[f"{name}-{count}"]["first_step"]) for count in workers]
        cells = [common.human(first, "s").strip() for first in firsts]
        lines.append(Line(f"{peer.title}: time to first step", cells))
    return lines


def measure_pairs(
    pairs: int, samples: int, say: Callable[[str], None]
) -> tuple[list[Line], dict[str, Samples]]:
    """Run both peers of ``PAIR`` in each pair, and compare their step times."""
    found: dict[str, Samples] = {name: {} for name in PAIR}
    for pair in range(pairs):
        for name in PAIR if pair % 2 == 0 else reversed(PAIR):
            figures = run(PEERS[name], timeout=600, samples=samples)
            for key, value in figures.items():
                found[name].setdefault(key, []).append(value)
        steps = [found[name]["step"][-1] for name in PAIR]
        say(f"{pair + 1}/{pairs}  {1e3 * steps[0]:.3f} ms, {1e3 * steps[1]:.3f} ms")
    steps, others = (found[name]["step"] for name in PAIR)
    ratios = sorted(step / other for step, other in zip(steps, others, strict=True))
    low, high = common.find_median_interval(ratios)
    ratio = median(ratios)
    found["ratio"] = {"pairs": ratios, "median": [ratio], "interval": [low, high]}
    cells = [f"{1e3 * median(steps):.3f} ms", f"{1e3 * median(others):.3f} ms"]
    cells += [f"{ratio:.4f}", f"{low:.4f} to {high:.4f}"]
    line = Line("time of a step", cells, f"at most {PAIR_LIMIT:g}", ratio <= PAIR_LIMIT)
    return [line], found


def compare_pairs(
    arguments: argparse.Namespace,
) -> tuple[str, list[str], list[Line], dict[str, Samples]]:
    samples = PAIR_SAMPLES // (4 if arguments.quick else 1)
    lines, found = measure_pairs(arguments.pairs, samples, lambda text: print(text, flush=True))
    title = f"steady state of a CNN of 1 M parameters on two workers, {arguments.pairs} pairs"
    columns = [*(PEERS[name].title for name in PAIR), "ratio (median)", "95 % interval"]
    return title, columns, lines, found


def scaling(arguments: argparse.Namespace) -> tuple[str, list[str], list[Line], dict[str, Samples]]:
    workers = [int(count) for count in arguments.workers.split(",")]
    samples = SCALING_SAMPLES // (4 if arguments.quick else 1)
    repetitions = 1 if arguments.quick else min(arguments.repetitions, 3)
    found = measure_scaling(workers, samples, repetitions, lambda text: print(text, flush=True))
    from miniray.limits import cpu_count  # only here: peers are measured without miniray

    cores = cpu_count()
    title = f"a CNN of 1 M parameters, {samples:,} samples an epoch, on {cores} cores"
    columns = [f"{count} worker{'s' if count > 1 else ''}" for count in workers]
    return title, columns, summarise_scaling(found, workers), found


def comparison(
    arguments: argparse.Namespace, names: list[str]
) -> tuple[str, list[str], list[Line], dict[str, Samples]]:
    repetitions = 1 if arguments.quick else arguments.repetitions
    found = measure(names, repetitions, lambda text: print(text, flush=True))
    columns = [*(PEERS[name].title for name in names), "to the best"]
    return "a CNN of 1 M parameters on two workers", columns, summarise(found), found


def chosen(parser: argparse.ArgumentParser, only: str | None) -> list[str]:
    """The peers to run: those asked for that are installed."""
    names = only.split(",") if only else list(PEERS)
    unknown = sorted(set(names) - set(PEERS))
    if unknown:
        parser.error(f"unknown peers {', '.join(unknown)}; there are {', '.join(PEERS)}")
    for name in list(names):
        reason = missing(PEERS[name])
        if reason:
            print(f"without {PEERS[name].title}: {reason}")
            names.remove(name)
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one repetition")
    parser.add_argument("--only", metavar="PEERS", help=f"comma-separated: {', '.join(PEERS)}")
    parser.add_argument("--scaling", action="store_true", help="more and more workers instead")
    parser.add_argument("--workers", default="1,2,4,8,16", help="for --scaling", metavar="N,N")
    parser.add_argument("--pairs", type=int, metavar="N", help="step time beside plain DDP instead")
    parser.add_argument("--repetitions", type=int, default=5, metavar="N")
    parser.add_argument("--json", type=Path, metavar="PATH")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    arguments = parser.parse_args()
    started = common.stamp()
    if arguments.scaling:
        title, columns, lines, samples = scaling(arguments)
    elif arguments.pairs:
        title, columns, lines, samples = compare_pairs(arguments)
    else:
        title, columns, lines, samples = comparison(arguments, chosen(parser, arguments.only))
    if arguments.markdown:
        print(common.markdown_table(columns, lines))
    else:
        common.print_table(title, columns, lines)
    if not arguments.pairs:
        print("miniray averages weights once an epoch; its peers average gradients in every step")
    record = {
        "started": started,
        "finished": common.stamp(),
        "machine": common.machine(),
        "versions": common.versions("miniray", "torch", "lightning", "accelerate", "ray"),
        "samples": samples,
        "table": [vars(line) for line in lines],
    }
    name = "train_scaling" if arguments.scaling else "train_pairs" if arguments.pairs else "train"
    target = arguments.json or common.RESULTS / f"{name}.json"
    common.write_json(target, record)
    print(f"all samples: {target}")


if __name__ == "__main__":
    main()
