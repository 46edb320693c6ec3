"""Runs all benchmarks one after the other, then writes the page: `make bench`.

    python benchmarks/all.py [--quick] [--only engine,data] [--peers] [--results DIR]

Peers that change the versions of what is installed here (datasets, Mosaic Streaming, LitData, grain
and verl for ``data``, TRL for ``rl``) go into an environment of their own, ``build/bench-peers``,
with ``--peers``; without it, and where one cannot be installed, the benchmark says which are left
out. A benchmark that fails leaves its earlier results as they are and the others run on; the end
says which it was, and the exit status is 1. What needs a GPU runs where there is one.

With ``--quick`` nothing is kept but what ``--results`` names: figures of few repetitions do not
belong on the page.
"""

from __future__ import annotations

import argparse
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
#: What the peers' environment gets, one after the other: what cannot be installed is left out.
PEER_PACKAGES = [
    "numpy pyarrow pillow psutil",
    "torch",  # the version that is here: another may come with gigabytes of GPU libraries
    "datasets torchdata",
    "mosaicml-streaming",
    "litdata",
    "grain array-record",
    "ray[data]",
    "verl",
    "trl accelerate",
]


@dataclass(frozen=True)
class Benchmark:
    """A script with its options; its results are ``NAME.json``."""

    script: str
    options: tuple[str, ...] = ()
    output: str = "--json"
    takes_peers: bool = False
    has_quick: bool = True
    needs_gpu: bool = False
    needs_cores: int = 1


BENCHMARKS: dict[str, Benchmark] = {
    "engine": Benchmark("engine.py"),
    "train": Benchmark("train.py"),
    "scaling": Benchmark("train.py", ("--scaling",), needs_cores=4),
    "sync_interval": Benchmark("sync_interval.py"),
    "ps": Benchmark("ps.py"),
    "gpu_sync": Benchmark("gpu_sync.py", output="--out", has_quick=False, needs_gpu=True),
    "data": Benchmark("data.py", takes_peers=True),
    "memory_table": Benchmark("memory_table.py"),
    "doctor": Benchmark("doctor.py"),
    "parallel": Benchmark("parallel.py"),
    "rl": Benchmark("rl.py", takes_peers=True),
    "geoguessr": Benchmark("geoguessr.py"),
}


def command(name: str, results: Path, quick: bool, peers: Path | None) -> list[str]:
    """How ``name`` is run."""
    benchmark = BENCHMARKS[name]
    made = [sys.executable, str(HERE / benchmark.script), *benchmark.options]
    made += [benchmark.output, str(results / f"{name}.json")]
    if quick and benchmark.has_quick:
        made.append("--quick")
    if name == "scaling":
        cores = common.machine()["cores"]
        made += ["--workers", ",".join(str(n) for n in (1, 2, 4, 8, 16) if n <= cores)]
    if peers is not None and benchmark.takes_peers:
        made += ["--peer-python", str(peers)]
    return made


def make_peers() -> Path:
    """The interpreter of the peers' environment, with what could be installed."""
    python = PEERS / "bin" / "python"
    if not python.exists():
        venv.create(PEERS, with_pip=True)
    here = common.versions("torch").get("torch", "").partition("+")[0]
    for packages in PEER_PACKAGES:
        if packages == "torch" and here:
            packages = f"torch=={here}"
        print(f"installing {packages} into {PEERS.relative_to(common.ROOT)}", flush=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", *packages.split()]
        if subprocess.run(pip, check=False).returncode != 0:
            print(f"without {packages}: it cannot be installed here", flush=True)
    return python


def has_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None


def left_out(benchmark: Benchmark) -> str | None:
    """Why it cannot be run here; its earlier results, of another machine, then stay."""
    if benchmark.needs_gpu and not has_gpu():
        return "there is no GPU here"
    if benchmark.needs_cores > common.machine()["cores"]:
        return f"it needs {benchmark.needs_cores} cores"
    return None


def run_all(names: Sequence[str], results: Path, quick: bool, peers: Path | None) -> str:
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


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="each with little; writes no page")
    parser.add_argument("--only", metavar="NAMES", help=f"comma-separated: {', '.join(BENCHMARKS)}")
    parser.add_argument("--peers", action="store_true", help="install peers into build/bench-peers")
    parser.add_argument("--results", type=Path, metavar="DIR", help="where the JSON files go")
    arguments = parser.parse_args(argv)
    names = arguments.only.split(",") if arguments.only else list(BENCHMARKS)
    unknown = sorted(set(names) - set(BENCHMARKS))
    if unknown:
        parser.error(f"unknown benchmarks {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")

    peers = make_peers() if arguments.peers else None
    if peers is None and (PEERS / "bin" / "python").exists():
        peers = PEERS / "bin" / "python"
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        kept = arguments.results or (Path(scratch) if arguments.quick else common.RESULTS)
        kept.mkdir(parents=True, exist_ok=True)
        failure = run_all(names, kept, arguments.quick, peers)
    written = 0
    if kept == common.RESULTS:
        written = subprocess.run([sys.executable, str(HERE / "page.py")], check=False).returncode
    print(f"\n{failure or 'all benchmarks ran'}")
    return 1 if failure or written else 0


if __name__ == "__main__":
    sys.exit(main())
