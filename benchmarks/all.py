"""Run all benchmarks and write docs/benchmarks.md (`make bench`).

    python benchmarks/all.py [--quick] [--only engine,data] [--peers] [--results DIR] [--list]

Peers that change the versions of what is installed here (datasets, Mosaic Streaming, LitData, grain
and verl for ``data``, TRL for ``rl``) go into environments of their own, in ``build/bench-peers``,
with ``--peers``; without it, and where one cannot be installed, the benchmark says which are left
out. A benchmark that fails leaves its earlier results as they are and the others run on; the end
says which it was, and the exit status is 1. What needs a GPU runs where there is one.

With ``--quick`` nothing is kept but what ``--results`` names: figures of few repetitions do not
belong on the page.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import common

HERE = Path(__file__).resolve().parent
PEERS = common.ROOT / "build" / "bench-peers"
#: What the environment of a benchmark's peers gets, one after the other: what cannot be installed
#: is left out. Loaders bring the torch they want (Mosaic needs a torchvision that fits it); what
#: trains must have the one that is here, or figures of two versions would be compared.
PEER_PACKAGES = {
    "data": [
        "numpy pyarrow pillow psutil",
        "torch",
        "datasets torchdata",
        "mosaicml-streaming",
        "litdata",
        "grain array-record",
        "ray[data]",
        "verl",
    ],
    "rl": ["torch=={torch}", "trl accelerate torch=={torch}"],
}


@dataclass(frozen=True)
class Benchmark:
    """A script with its options; its results are ``NAME.json``."""

    script: str
    options: tuple[str, ...] = ()
    output: str = "--json"
    has_quick: bool = True
    needs_gpu: bool = False
    needs_cores: int = 1


BENCHMARKS: dict[str, Benchmark] = {
    "engine": Benchmark("engine.py"),
    "start": Benchmark("start.py"),
    "train": Benchmark("train.py"),
    "train_pairs": Benchmark("train.py", ("--pairs", "20")),
    "scaling": Benchmark("train.py", ("--scaling",), needs_cores=4),
    "recovery": Benchmark("recovery.py"),
    "sync_interval": Benchmark("sync_interval.py"),
    "ps": Benchmark("ps.py"),
    "gpu_sync": Benchmark("gpu_sync.py", output="--out", has_quick=False, needs_gpu=True),
    "data": Benchmark("data.py"),
    "memory_table": Benchmark("memory_table.py"),
    "doctor": Benchmark("doctor.py"),
    "doctor_gpu": Benchmark("doctor.py", ("--gpu",), needs_gpu=True),
    "parallel": Benchmark("parallel.py"),
    "bubble": Benchmark("parallel.py", ("--bubble",), needs_cores=4),
    "rl": Benchmark("rl.py"),
    "geoguessr": Benchmark("geoguessr.py"),
    "geoguessr_gpu": Benchmark("geoguessr.py", ("--gpu",), has_quick=False, needs_gpu=True),
}


def command(name: str, results: Path, quick: bool, peers: bool) -> list[str]:
    """How ``name`` is run."""
    benchmark = BENCHMARKS[name]
    made = [sys.executable, str(HERE / benchmark.script), *benchmark.options]
    made += [benchmark.output, str(results / f"{name}.json")]
    if quick and benchmark.has_quick:
        made.append("--quick")
    if name == "scaling":
        cores = common.machine()["cores"]
        made += ["--workers", ",".join(str(n) for n in (1, 2, 4, 8, 16) if n <= cores)]
    if name in PEER_PACKAGES and (peers or peer_python(name).exists()):
        made += ["--peer-python", str(peer_python(name))]
    return made


def peer_python(name: str) -> Path:
    """The interpreter of the peers of benchmark ``name``."""
    return PEERS / name / "bin" / "python"


def make_peers(name: str) -> None:
    """The environment of a benchmark's peers, with what could be installed."""
    python = peer_python(name)
    if not python.exists():
        venv.create(PEERS / name, with_pip=True)
    here = common.versions("torch").get("torch", "").partition("+")[0]
    for packages in PEER_PACKAGES[name]:
        wanted = packages.format(torch=here) if here else packages.replace("=={torch}", "")
        print(f"installing {wanted} into {PEERS / name}", flush=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", *wanted.split()]
        if subprocess.run(pip, check=False).returncode != 0:
            print(f"without {wanted}: it cannot be installed here", flush=True)


def has_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None


def left_out(benchmark: Benchmark) -> str | None:
    """Why it cannot be run here; its earlier results, of another machine, then stay."""
    if benchmark.needs_gpu and not has_gpu():
        return "there is no GPU here"
    if benchmark.needs_cores > common.machine()["cores"]:
        return f"it needs {benchmark.needs_cores} cores"
    return None


def run_all(names: Sequence[str], results: Path, quick: bool, peers: bool) -> str:
    """Run them; returns what to say at the end, which is empty if none failed."""
    failed, ran = [], 0
    for number, name in enumerate(names, 1):
        reason = left_out(BENCHMARKS[name])
        print(
            f"\n== {number}/{len(names)}  {name}" + f": left out, {reason}" * bool(reason),
            flush=True,
        )
        if reason:
            continue
        start = time.monotonic()
        status = subprocess.run(command(name, results, quick, peers), check=False).returncode
        ran += 1
        if status != 0:
            failed.append(name)
        outcome = "done" if status == 0 else f"FAILED with status {status}"
        print(f"== {name}: {outcome} after {time.monotonic() - start:.0f} s", flush=True)
    return f"{len(failed)} of {ran} benchmarks failed: {', '.join(failed)}" if failed else ""


def show(names: Sequence[str], results: Path, quick: bool, peers: bool) -> None:
    """What would be run, and nothing is."""
    for name in names:
        reason = left_out(BENCHMARKS[name])
        line = f"left out, {reason}" if reason else shlex.join(command(name, results, quick, peers))
        print(f"{name:<14} {line}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="each with little; writes no page")
    parser.add_argument("--only", metavar="NAMES", help=f"comma-separated: {', '.join(BENCHMARKS)}")
    parser.add_argument("--peers", action="store_true", help="install peers into build/bench-peers")
    parser.add_argument("--results", type=Path, metavar="DIR", help="where the JSON files go")
    parser.add_argument("--list", action="store_true", help="say what would run, and run nothing")
    arguments = parser.parse_args(argv)
    names = arguments.only.split(",") if arguments.only else list(BENCHMARKS)
    unknown = sorted(set(names) - set(BENCHMARKS))
    if unknown:
        parser.error(f"unknown benchmarks {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")

    if arguments.list:
        show(names, arguments.results or common.RESULTS, arguments.quick, arguments.peers)
        return 0
    if arguments.peers:
        for name in names:
            if name in PEER_PACKAGES:
                make_peers(name)
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        kept = arguments.results or (Path(scratch) if arguments.quick else common.RESULTS)
        kept.mkdir(parents=True, exist_ok=True)
        failure = run_all(names, kept, arguments.quick, arguments.peers)
    written = 0
    if kept == common.RESULTS:
        written = subprocess.run([sys.executable, str(HERE / "page.py")], check=False).returncode
    print(f"\n{failure or 'all benchmarks ran'}")
    return 1 if failure or written else 0


if __name__ == "__main__":
    sys.exit(main())
