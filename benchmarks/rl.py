"""Compare GRPO with TRL, and count the bytes that pass through the driver.

    python benchmarks/rl.py [--quick] [--peer-python PYTHON] [--json PATH] [--markdown]

The same decoder of 0.6 M parameters with random weights, the same prompts and settings: 8 prompts
a step with 8 rollouts each, one update, KL to a reference. miniray and TRL run as whole programs in
fresh processes, taking turns: as one process with two threads, and as two workers with one each.
``--peer-python`` is an interpreter that has trl, where that is not this one. miniray is copied and
compiled first, as pip does with a package that it installs.

- first step: from the start of the command to the end of the first step.
- tokens/s: sampled tokens over all steps but the first, rewards and updates included.
- memory: the sum of PSS over all processes at its highest, in a run of its own.

The second table is for rows that carry an encoded image. It compares the bytes that go through the
driver in a step with those of the same step led by one controller (``rl_peers/driver_bytes.py``),
by number of prompts and size of the image.

Figures are medians; the JSON file has every sample.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import common
from common import Line, median

from data import install
from train import tree_pss

SCRIPTS = Path(__file__).with_name("rl_peers")
LAUNCH_TWO = (
    *("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"),
    *("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"),
)
#: Wanted: as many tokens/s as TRL, as soon, in less memory; and so few bytes a step.
MOST_BYTES = 100_000

Samples = dict[str, list[float]]


@dataclass(frozen=True)
class System:
    title: str
    script: str
    workers: int
    launcher: tuple[str, ...] = ()

    @property
    def is_peer(self) -> bool:
        return self.script.startswith("trl")


SYSTEMS = {
    "miniray-1": System("miniray, 1 worker", "miniray_grpo.py", 1),
    "miniray-2": System("miniray, 2 workers", "miniray_grpo.py", 2),
    "trl-1": System("TRL, 1 process", "trl_grpo.py", 1),
    "trl-2": System("TRL, 2 processes", "trl_grpo.py", 2, LAUNCH_TWO),
}
METRICS = [
    ("rate", "tokens/s", "", True),
    ("first_step", "time to first step", "s", False),
    ("wall", "wall time of the command", "s", False),
    ("memory", "memory, highest (PSS)", "MB", False),
]
#: (prompts a step, bytes of a row's image)
SIZES = [(8, 0), (8, 33_000), (64, 33_000), (64, 330_000)]


def run(
    system: System, python: str, site: str, steps: int, measure_memory: bool
) -> dict[str, float]:
    """One run of a command. Raises ``RuntimeError`` if it did not do all its steps."""
    with tempfile.TemporaryDirectory(prefix="bench-rl-") as folder:
        out, log = Path(folder) / "steps", Path(folder) / "log"
        environment = _environment(folder, site, out, steps, system.workers)
        command = [python, *system.launcher, str(SCRIPTS / system.script)]
        memory = 0.0
        with log.open("w") as file:
            start = time.monotonic()
            process = subprocess.Popen(
                command,
                env=environment,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                deadline = start + 300
                while process.poll() is None and time.monotonic() < deadline:
                    if measure_memory:
                        memory = max(memory, tree_pss(process.pid))
                    time.sleep(0.1)
            finally:
                wall = time.monotonic() - start
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        data = out.read_bytes() if out.exists() else b""
        pairs = list(struct.iter_unpack("dd", data))
        if process.returncode != 0 or len(pairs) != steps:
            shown = log.read_text(errors="replace")[-4000:]
            raise RuntimeError(
                f"{' '.join(command)} ended with {process.returncode} after {len(pairs)} of "
                f"{steps} steps:\n{shown}"
            )
    if measure_memory:
        return {"memory": memory / 1e6}
    (first, _), *later = pairs
    return {
        "rate": sum(tokens for _, tokens in later) / (later[-1][0] - first),
        "first_step": first - start,
        "wall": wall,
    }


def _environment(folder: str, site: str, out: Path, steps: int, workers: int) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("MINIRAY_")}
    kept.pop("OMP_NUM_THREADS", None)
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join([site, str(SCRIPTS)]),
        "OMP_NUM_THREADS": str(2 // workers),
        "BENCH_OUT": str(out),
        "BENCH_STEPS": str(steps),
        "BENCH_WORKERS": str(workers),
        "HOME": folder,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def has(python: str, package: str) -> bool:
    check = f"import importlib.util as u, sys; sys.exit(u.find_spec({package!r}) is None)"
    return subprocess.run([python, "-c", check], check=False).returncode == 0


def peer_versions(python: str) -> dict[str, str]:
    """Versions in the peer's interpreter; what is not there is left out."""
    code = (
        "import importlib.metadata as m, json\n"
        "found = {d.name.lower(): d.version for d in m.distributions()}\n"
        "wanted = ('torch', 'transformers', 'trl', 'accelerate')\n"
        "print(json.dumps({name: found[name] for name in wanted if name in found}))"
    )
    done = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
    versions: dict[str, str] = json.loads(done.stdout)
    return versions


def measure(
    names: list[str], pythons: dict[str, str], steps: int, rounds: int, say: Callable[[str], None]
) -> dict[str, Samples]:
    found: dict[str, Samples] = {name: {} for name in names}
    with tempfile.TemporaryDirectory(prefix="bench-rl-") as site:
        install(Path(site))
        for turn in range(rounds + 1):
            memory = turn == rounds  # sampling takes time: in a run of its own
            what = "memory" if memory else f"{turn + 1}/{rounds}"
            for name in names if turn % 2 == 0 else reversed(names):
                once = functools.partial(run, SYSTEMS[name], pythons[name], site, steps, memory)
                is_peer = SYSTEMS[name].is_peer
                figures = common.tried_again(once, say) if is_peer else once()
                shown = ", ".join(f"{key} {value:.4g}" for key, value in figures.items())
                say(f"{what}  {SYSTEMS[name].title}: {shown}")
                for key, value in figures.items():
                    found[name].setdefault(key, []).append(value)
    return found


def summarise(found: dict[str, Samples]) -> list[Line]:
    """The last cell is miniray's better way against TRL's better way."""
    lines = []
    for key, title, unit, more in METRICS:
        values = {name: median(samples[key]) for name, samples in found.items()}
        cells = [common.human(value, unit).strip() for value in values.values()]
        mine = [v for name, v in values.items() if not SYSTEMS[name].is_peer]
        theirs = [v for name, v in values.items() if SYSTEMS[name].is_peer]
        if not mine or not theirs:
            lines.append(Line(title, [*cells, ""]))
            continue
        ratio = max(mine) / max(theirs) if more else min(theirs) / min(mine)
        lines.append(Line(title, [*cells, f"{ratio:.2f}×"], "first", ratio >= 1))
    return lines


def measure_bytes(sizes: list[tuple[int, int]], say: Callable[[str], None]) -> dict[str, Samples]:
    found = {}
    for prompts, image in sizes:
        for system in ("workers", "controller"):
            arguments = ["--system", system, "--prompts", str(prompts), "--image-bytes", str(image)]
            made = common.run_measured(SCRIPTS / "driver_bytes.py", arguments)
            found[f"{system}-{prompts}-{image}"] = made
            say(f"{system}, {prompts} prompts, images of {image:,} B: {median(made['bytes']):,} B")
    return found


def summarise_bytes(found: dict[str, Samples], sizes: list[tuple[int, int]]) -> list[Line]:
    lines = []
    for prompts, image in sizes:
        ours, theirs = (
            median(found[f"{system}-{prompts}-{image}"]["bytes"])
            for system in ("workers", "controller")
        )
        title = f"{prompts} prompts, images of {image // 1000} KB"
        cells = [f"{ours / 1e3:,.1f} KB", f"{theirs / 1e3:,.0f} KB", f"{theirs / ours:,.0f}×"]
        lines.append(Line(title, cells, f"< {MOST_BYTES // 1000} KB", ours < MOST_BYTES))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one round, fewer steps and sizes")
    parser.add_argument("--peer-python", default=sys.executable, help="an interpreter with trl")
    parser.add_argument("--only", help=f"of {', '.join(SYSTEMS)}, with commas")
    parser.add_argument("--json", type=Path, default=common.RESULTS / "rl.json")
    parser.add_argument("--markdown", action="store_true", help="print tables for the docs")
    chosen = parser.parse_args()
    steps, rounds = (3, 1) if chosen.quick else (6, 3)
    sizes = SIZES[1:2] if chosen.quick else SIZES
    names = chosen.only.split(",") if chosen.only else list(SYSTEMS)
    pythons = {n: chosen.peer_python if SYSTEMS[n].is_peer else sys.executable for n in names}

    def say(text: str) -> None:
        print(text, flush=True)

    if not has(chosen.peer_python, "trl"):
        say("TRL is not installed here; --peer-python names an interpreter that has it")
        names = [name for name in names if not SYSTEMS[name].is_peer]
    found = measure(names, pythons, steps, rounds, say)
    crossed = measure_bytes(sizes, say)
    record = {
        "when": common.stamp(),
        "machine": common.machine(),
        "versions": common.versions("torch", "transformers"),
        "peer_versions": peer_versions(chosen.peer_python),
        "steps": steps,
        "training": found,
        "driver_bytes": crossed,
    }
    common.write_json(chosen.json, record)
    columns = [*(SYSTEMS[name].title for name in names), "miniray : TRL"]
    byte_columns = ["workers own data", "one controller", "ratio"]
    tables = [
        ("GRPO, the same model, prompts and settings", columns, summarise(found)),
        ("Through the driver in a step", byte_columns, summarise_bytes(crossed, sizes)),
    ]
    for title, heads, lines in tables:
        if chosen.markdown:
            print(common.markdown_table(heads, lines), end="\n\n")
        else:
            common.print_table(title, heads, lines)


if __name__ == "__main__":
    main()
