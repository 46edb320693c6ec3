"""A training run kept under fire: ``python -m tests.soak --minutes 30``.

A driver trains (``driver.py``) while workers are killed, stopped for a moment or for good and
slowed down by their disk; the driver itself, its zygote and its parameter server are killed too,
and the run is then taken up on another number of workers. At the end every row must have been
delivered exactly once in every pass, every round must be in the weights, memory must not have
grown, and nothing may be left: no process, directory, temporary file or named memory.

Ends with a table, a JSON file and status 0 if all held, 1 if not.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.soak import accounts, watch
from tests.soak.slowdisk import SLOW

ROOT = Path(__file__).resolve().parents[2]
ROWS, FILES, FEATURES = 6_007, 4, 64
WORKERS = (1, 2, 3, 4)
STUCK = 240.0  # seconds without a checkpoint that no fault explains
MOST_PROBLEMS = 5  # the rest would be more of the same
GROWTH = 4.0  # megabytes a minute that a driver may grow by, and
LARGEST_GROWTH = 0.10  # of its size over its life

#: How often each comes, of those that leave the driver running and of those that end it.
FAULTS = {"kill": 5, "stop": 3, "pause": 3, "slow": 3}
ENDS = {"SIGKILL": 5, "SIGTERM": 2, "SIGINT": 1, "zygote": 2, "server": 2, "everything": 1}


def write_data(folder):
    generator = np.random.default_rng(0)
    line = generator.normal(size=FEATURES)
    x = generator.normal(size=(ROWS, FEATURES)).astype(np.float32)
    y = (x @ line + 0.1 * generator.normal(size=ROWS)).astype(np.float32)
    for number, rows in enumerate(np.array_split(np.arange(ROWS), FILES)):
        table = pa.table({"id": rows, "x": list(x[rows]), "y": y[rows]})
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=200)


class Soak:
    def __init__(self, folder, seconds, seed):
        self.folder, self.seconds = folder, seconds
        self.random = random.Random(seed)
        self.mark = uuid.uuid4().hex
        self.began = time.monotonic()
        self.injected = dict.fromkeys([*FAULTS, *ENDS], 0)
        self.lives, self.problems, self.named = [], [], set()
        self.driver, self.paused = None, {}
        for name in ("data", "calls", "rounds", "pids", "runtime", "tmp"):
            (folder / name).mkdir(parents=True)
        write_data(folder / "data")

    # -- a life of the driver ---------------------------------------------------------------------

    def start(self, workers):
        environment = {
            **os.environ,
            watch.MARK: self.mark,
            SLOW: str(self.folder / "slow"),
            "XDG_RUNTIME_DIR": str(self.folder / "runtime"),
            "TMPDIR": str(self.folder / "tmp"),
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
            "PYTHONUNBUFFERED": "1",
        }
        environment.pop("MINIRAY_BACKEND", None)
        command = [sys.executable, "-m", "tests.soak.driver", str(self.folder), str(workers)]
        with open(self.folder / "log", "a") as log:
            self.driver = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self.lives.append({"workers": workers, "samples": [], "began": time.monotonic()})

    def live(self, seconds, last=False):
        """Torment a driver for a while after its first checkpoint; then end it some way."""
        choices = [n for n in WORKERS if not self.lives or n != self.lives[-1]["workers"]]
        self.start(self.random.choice(choices))
        until, fault_at, seen, moved = None, 0.0, self.checkpoint(), time.monotonic()
        while until is None or time.monotonic() < until:
            time.sleep(0.05)
            now = time.monotonic()
            if self.driver.poll() is not None:
                self.problem(f"the driver ended by itself with status {self.driver.returncode}")
                break
            if self.checkpoint() != seen:
                seen, moved = self.checkpoint(), now
                if until is None:
                    until = now + seconds
                    self.lives[-1]["samples"].clear()  # what grew until now was its start
            if now - moved > STUCK:
                self.problem(f"no checkpoint for {STUCK:g} s")
                self.driver.send_signal(signal.SIGUSR1)  # stacks to the log
                time.sleep(1)
                break
            self.resume_paused()
            if until is not None and now > fault_at:
                self.fault(self.pick(FAULTS))
                fault_at = now + self.random.expovariate(1 / 2.5)
            self.look()
        self.end(last)

    def end(self, graceful):
        self.resume_paused(everyone=True)
        (self.folder / "slow").unlink(missing_ok=True)
        self.named |= watch.named_memory(watch.marked(self.mark))
        ended_by_itself, way = self.driver.poll() is not None, None
        if graceful and not ended_by_itself:
            (self.folder / "stop").touch()
        elif not ended_by_itself:
            way = self.pick(ENDS)
            self.end_by(way)
        try:
            status = self.driver.wait(timeout=STUCK)
            if graceful and status != 0 and not ended_by_itself:
                self.problem(f"asked to stop, the driver ended with status {status}")
        except subprocess.TimeoutExpired:
            self.problem("the driver does not end")
            self.driver.send_signal(signal.SIGUSR1)
            time.sleep(1)
            self.driver.kill()
            self.driver.wait()
        at_once = way == "everything"
        for leftover in watch.left_behind(self.mark, self.folder, directories=not at_once):
            self.problem(f"left behind: {leftover}")
        for pid in watch.marked(self.mark):
            watch.kill(pid)
        self.lives[-1]["seconds"] = time.monotonic() - self.lives[-1].pop("began")

    def end_by(self, way):
        self.injected[way] += 1
        processes = watch.roles(self.driver.pid, self.folder)
        if way in ("SIGKILL", "SIGTERM", "SIGINT"):
            self.driver.send_signal(signal.Signals[way])
        elif way == "everything":
            everybody = [self.driver.pid, *(pid for some in processes.values() for pid in some)]
            for number in (signal.SIGSTOP, signal.SIGKILL):  # nobody sees another one's end
                for pid in everybody:
                    watch.kill(pid, number)
        else:
            for pid in processes[way]:
                watch.kill(pid)
            # The run may survive that, or not; either is right.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.driver.wait(timeout=5)
            self.driver.kill()

    # -- faults -----------------------------------------------------------------------------------

    def pick(self, weights):
        """One at random; those that never came, first."""
        fresh = [name for name in weights if not self.injected[name]]
        names = fresh or list(weights)
        return self.random.choices(names, [weights[name] for name in names])[0]

    def fault(self, kind):
        workers = watch.roles(self.driver.pid, self.folder)["worker"]
        if kind == "slow":
            (self.folder / "slow").write_text(str(self.random.choice([0, 0.02, 0.1])))
        elif not workers:
            return
        else:
            victim = self.random.choice(workers)
            watch.kill(victim, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
            if kind == "pause":
                self.paused[victim] = time.monotonic() + self.random.uniform(0.2, 2.0)
        self.injected[kind] += 1

    def resume_paused(self, everyone=False):
        for pid, until in list(self.paused.items()):
            if everyone or time.monotonic() > until:
                del self.paused[pid]
                watch.kill(pid, signal.SIGCONT)

    # -- looking ----------------------------------------------------------------------------------

    def checkpoint(self):
        """The newest one's epoch, -1 before the first."""
        found = (self.folder / "run" / "checkpoints").glob("epoch-*")
        return max((int(p.name.removeprefix("epoch-")) for p in found), default=-1)

    def look(self):
        samples = self.lives[-1]["samples"]
        if samples and time.monotonic() - samples[-1][0] < 1:
            return
        sample = watch.sample(self.driver.pid)
        if sample is not None:
            samples.append(sample)
            self.show(sample)

    def show(self, sample):
        minutes, seconds = divmod(int(time.monotonic() - self.began), 60)
        faults = " ".join(f"{name} {count}" for name, count in self.injected.items() if count)
        line = (
            f"{minutes:3d}:{seconds:02d}  life {len(self.lives)}, "
            f"{self.lives[-1]['workers']} workers  round {self.checkpoint() + 1}  "
            f"driver {sample[1]:.0f} MB, {sample[2]} files  {faults}"
            f"{f'  PROBLEMS {len(self.problems)}' if self.problems else ''}"
        )
        if sys.stdout.isatty():
            print(f"\r\033[K{line}", end="", flush=True)
        elif len(self.lives[-1]["samples"]) % 30 == 1:
            print(line, flush=True)

    def problem(self, text):
        text = f"life {len(self.lives)}: {text}"
        self.problems.append(text)
        print(f"\n{text}", flush=True)

    # -- all of it --------------------------------------------------------------------------------

    def run(self):
        try:
            while not self.over():
                # Mostly short lives; some long enough to see memory grow.
                mean = min(self.seconds / 6, 40)
                self.live(min(self.random.expovariate(1 / mean), self.seconds / 3))
                if len(self.problems) > MOST_PROBLEMS:
                    return self.report()
            self.live(min(self.seconds / 6, 120), last=True)
        finally:
            self.resume_paused(everyone=True)
            for pid in watch.marked(self.mark):
                watch.kill(pid)
        return self.report()

    def over(self):
        """Time is up, and everything was tried at least once."""
        enough = time.monotonic() - self.began > self.seconds * 0.8
        return enough and all(self.injected[name] for name in [*FAULTS, "SIGKILL"])

    def report(self):
        figures, wrong = accounts.check(accounts.read(self.folder), ROWS)
        self.problems += wrong
        stray = sorted(name for name in self.named if os.path.exists(name))
        self.problems += [f"named memory left: {name}" for name in stray]
        checkpoints = self.folder / "run" / "checkpoints"
        strays = [p.name for p in checkpoints.glob("*") if not p.name.startswith("epoch-")]
        self.problems += [f"in the folder of checkpoints: {name}" for name in strays]
        rises = []
        for number, life in enumerate(self.lives, 1):
            rise = watch.growth(life["samples"])
            if rise is not None:
                rises.append(rise)
                minutes = life["seconds"] / 60
                if rise[0] > GROWTH and rise[0] * minutes > LARGEST_GROWTH * rise[1]:
                    self.problems.append(
                        f"life {number}: memory grows by {rise[0]:.1f} MB a minute"
                    )
        files = [s[2] for life in self.lives for s in life["samples"]]
        return {
            "ok": not self.problems,
            "problems": self.problems,
            "minutes": (time.monotonic() - self.began) / 60,
            "lives": len(self.lives),
            "faults": self.injected,
            **figures,
            "worker_failures": self.count_events("worker_failed"),
            "driver_mb": [round(rise[1], 1) for rise in rises],
            "driver_mb_a_minute": [round(rise[0], 2) for rise in rises],
            "driver_most_files": max(files, default=0),
        }

    def count_events(self, kind):
        path = self.folder / "run" / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return sum(json.loads(line)["event"] == kind for line in lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    parser.add_argument("--folder", type=Path, help="work here, and keep it")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="miniray-soak-"))
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().getrandbits(32)
    print(f"seed {seed}, folder {folder}", flush=True)
    report = {"seed": seed, **Soak(folder, 60 * arguments.minutes, seed).run()}
    print()
    for key, value in report.items():
        if key != "problems":
            print(f"{key.replace('_', ' '):>20}  {value}")
    for problem in report["problems"]:
        print(f"{'PROBLEM':>20}  {problem}")
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(report, indent=1))
    if report["ok"] and arguments.folder is None:
        shutil.rmtree(folder)
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
