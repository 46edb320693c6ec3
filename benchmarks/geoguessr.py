"""Run the GeoGuessr recipe with several seeds, and measure what RL adds to the warm-up.

    python benchmarks/geoguessr.py [--seeds 0,1,2] [--steps 60] [--quick] [--json PATH] [--markdown]
    python benchmarks/geoguessr.py --gpu [--json PATH]

Runs ``recipes/geoguessr/train_ppo.py`` once a seed, on the same rows, and keeps what each run says
of held-out pictures: the mean reward of sampled answers before and after the steps, and reward and
accuracy of the likeliest answers. The JSON file has all of it for every seed.

A worker has one thread, whatever the environment says: another number rounds otherwise, and a seed
would not give the same figures again. They are those of this kind of CPU and this torch.

With ``--gpu`` it is one run of the large policy on a GPU: how fast a step is, and of what.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import common
from common import Line, median

SCRIPT = common.ROOT / "recipes/geoguessr/train_ppo.py"
ON_GPU = (
    "--size large --device cuda --precision bf16 --workers 1 --rows 16000 --prompts 128 "
    "--micro-batch-tokens 65536 --warm-up 650 --warm-up-lr 2e-4 --lr 1e-5 --steps 70"
)


def run(seed: int, steps: int, folder: Path, quick: bool) -> dict[str, Any]:
    """Figures of one training. Raises ``CalledProcessError`` if it fails."""
    run_dir = folder / f"seed-{seed}"
    command = [
        *(sys.executable, str(SCRIPT), "--seed", str(seed), "--steps", str(steps)),
        *("--data", str(folder / "rows"), "--run-dir", str(run_dir), "--no-progress"),
        *(["--quick", "--size", "tiny"] if quick else []),
    ]
    start = time.monotonic()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, cwd=folder, env=environment)
    figures: dict[str, Any] = json.loads((run_dir / "geoguessr.json").read_text())
    return {**figures, "wall_seconds": time.monotonic() - start}


def summarise(runs: dict[str, dict[str, Any]]) -> list[Line]:
    """A line a figure: before and after for every seed, and the median of the change."""

    def line(title: str, pairs: list[tuple[float, float]], shown: str) -> Line:
        cells = [f"{before:{shown}} → {after:{shown}}" for before, after in pairs]
        change = median([after - before for before, after in pairs])
        return Line(title, [*cells, f"{change:+{shown}}"])

    sampled = [(made["reward"][0], made["reward"][-1]) for made in runs.values()]
    lines = [line("reward of samples", sampled, ".3f")]
    for name in ("reward", "acc@200km", "acc@750km", "acc@2500km"):
        states = [list(made["likeliest"].values()) for made in runs.values()]
        pairs = [(before[name], after[name]) for *_, before, after in states]
        shown = ".3f" if name == "reward" else ".1%"
        lines.append(line(f"likeliest answers: {name}", pairs, shown))
    return lines


def run_on_gpu(path: Path) -> None:
    """Write the figures of the large policy to ``path``. Raises ``CalledProcessError``."""
    import torch

    with tempfile.TemporaryDirectory(prefix="bench-geoguessr-") as folder:
        out = Path(folder) / "figures.json"
        command = [sys.executable, str(SCRIPT), *ON_GPU.split(), "--no-progress", "--out", str(out)]
        subprocess.run(command, check=True, cwd=folder)
        figures = json.loads(out.read_text())
    record = {
        "finished": common.stamp(),
        "machine": {**common.machine(), "gpu": torch.cuda.get_device_name()},
        "versions": common.versions("miniray", "torch"),
    }
    common.write_json(path, {**record, **figures})
    print(f"all figures: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="0,1,2", help="with commas")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that it works")
    parser.add_argument("--gpu", action="store_true", help="the large policy on a GPU instead")
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--markdown", action="store_true", help="print the table for the docs")
    chosen = parser.parse_args()
    name = "geoguessr_gpu.json" if chosen.gpu else "geoguessr.json"
    path = chosen.json or common.RESULTS / name
    if chosen.gpu:
        run_on_gpu(path)
        return
    record: dict[str, Any] = {
        "started": common.stamp(),
        "machine": common.machine(),
        "versions": common.versions("miniray", "torch"),
        "steps": chosen.steps,
        "runs": {},
    }
    lines: list[Line] = []
    with tempfile.TemporaryDirectory(prefix="bench-geoguessr-") as folder:
        for seed in chosen.seeds.split(","):
            record["runs"][seed] = run(int(seed), chosen.steps, Path(folder), chosen.quick)
            lines = summarise(record["runs"])
            table = [vars(line) for line in lines]
            # After every seed: a run that is broken off leaves those that were finished.
            common.write_json(path, {**record, "finished": common.stamp(), "table": table})
    columns = [*(f"seed {seed}" for seed in record["runs"]), "median change"]
    if chosen.markdown:
        print(common.markdown_table(columns, lines))
    else:
        common.print_table("Held-out pictures, after the warm-up → after GRPO", columns, lines)
    print(f"all figures: {path}")


if __name__ == "__main__":
    main()
