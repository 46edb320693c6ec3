"""Compare what a rank that is killed costs miniray and other frameworks.

    python benchmarks/recovery.py [--quick] [--only miniray,torchrun] [--peer-pairs 5] [--json PATH]

Each of ``recovery_scripts/`` trains the CNN of ``train.py`` (1 M parameters) with DDP on two ranks,
batches of 64 per rank, one thread per process. Three measurements:

- interval: how long a checkpoint holds up the steps, and after how many steps it may be repeated
  to cost ``COST`` of the training time. It is the time of the ``BLOCK`` steps after a checkpoint,
  less that of the ``BLOCK`` steps before. miniray chooses its interval itself. torchft has none.
- overhead: the step time with this protection over that without: the median of pairs, and its 95 %
  interval. For miniray, two runs are alive at once and train in turns of ``TURN_STEPS`` steps, so
  that a pair takes 3 seconds and neither processes nor the load of the machine change in it. The
  CPU time of all processes in these turns is compared too. For peers, pairs are separate runs. For
  torchft, the other run is plain torchrun.
- recovery: a random rank is killed with SIGKILL at a random moment, the same for all. Steps lost
  are those made twice. The time is from the kill until all ranks have made the next step.

torchrun, Ray Train and miniray restart all ranks by themselves. Lightning ends, and is started
again at once with ``ckpt_path``. With torchft, the other rank continues alone until the lost one is
back: it loses no step, and what counts is its next one. A run that doesn't reach its last step in
time is counted as failed, and has no time.

Figures are medians; the JSON file has every sample. Peers that aren't installed, or can't run here,
are named below the table with the reason.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import math
import os
import random
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import common
import psutil
from common import Line, median

SCRIPTS = Path(__file__).with_name("recovery_scripts")
WORKLOAD = Path(__file__).with_name("train_scripts")
RANKS = 2
#: The part of the training time that the checkpoints of each peer may cost.
COST = 0.01
#: Steps at the start of a run that aren't measured: miniray measures some to choose its interval.
WARM_UP = 60
MEASURED = 300
#: Steps before and after a checkpoint from which its cost is measured.
BLOCK = 10
#: Pairs of turns of two runs of miniray. Each time, processes are new.
PAIRS_AT_ONCE = 20
#: As in ``workload.py``.
TURN_STEPS = 96
#: Steps at both ends of a turn that aren't measured. Between them are two ends of epochs.
TURN_ENDS = 16
TIMEOUT_S = 120.0

_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS))


@dataclass(frozen=True)
class Peer:
    """A way to train.

    Attributes:
        writes_checkpoints: Whether its interval is chosen here.
        often: Steps between two checkpoints while their cost is measured.
        is_rerun: Whether its command ends with the rank, and is started again by hand.
        survives: Whether the other ranks continue.
    """

    title: str
    script: str
    package: str
    launcher: tuple[str, ...] = ()
    writes_checkpoints: bool = True
    often: int = 2 * BLOCK
    is_rerun: bool = False
    survives: bool = False


PEERS: dict[str, Peer] = {
    "miniray": Peer("miniray", "miniray_ddp.py", "miniray", writes_checkpoints=False),
    "torchrun": Peer("torchrun", "torchrun_ddp.py", "torch", (*_TORCHRUN, "--max-restarts", "3")),
    # Its controller takes note of one checkpoint in 2 s. More would wait.
    "ray": Peer("Ray Train", "ray_train.py", "ray", often=200),
    "lightning": Peer("Lightning, by hand", "lightning_ddp.py", "lightning", is_rerun=True),
    "torchft": Peer(
        "torchft",
        "torchft_ddp.py",
        "torchft",
        (str(SCRIPTS / "torchft_launch.py"),),
        writes_checkpoints=False,
        survives=True,
    ),
}
#: Whose run is the unprotected one of a peer, if not its own script without checkpoints.
UNPROTECTED = {"torchft": "torchrun"}

Say = Callable[[str], None]
Samples = dict[str, Any]


@dataclass(frozen=True)
class Kill:
    """Which rank dies, and how long after which step."""

    rank: int
    step: int
    delay: float


class Records:
    """When each process completed which step, from the files of ``workload.py``."""

    def __init__(self, directory: Path) -> None:
        self.steps: dict[int, list[tuple[float, int]]] = {}  # by process
        for path in directory.glob("*.steps"):
            self.steps[int(path.stem)] = list(struct.iter_unpack("dq", path.read_bytes()))
        killed = directory / "killed"
        self.killed: tuple[float, int] | None = None  # when, and which process
        if killed.exists():
            self.killed = struct.unpack("dq", killed.read_bytes())

    def find_last_step(self) -> int:
        return max((steps[-1][1] for steps in self.steps.values()), default=0)

    def measure_step(self) -> float:
        """Return the mean seconds of a step after the warm-up. Ranks are in lockstep."""
        times = {step: when for when, step in max(self.steps.values(), key=len)}
        last = max(times)
        return (times[last] - times[WARM_UP]) / (last - WARM_UP)

    def measure_checkpoints(self, every: int) -> tuple[list[float], float]:
        """Return the seconds that each checkpoint costs, and the median of a step without one."""
        times = {step: when for when, step in max(self.steps.values(), key=len)}
        first = every * math.ceil(WARM_UP / every)
        costs, steps = [], []
        for step in range(first, max(times) - BLOCK, every):
            before = times[step] - times[step - BLOCK]
            costs.append(times[step + BLOCK] - times[step] - before)
            steps.append(before / BLOCK)
        return costs, median(steps)

    def measure_turn(self, start: float, end: float) -> float:
        """Return the mean seconds of the steps of a turn, without its ends."""
        turns = ([t for t, _ in steps if start < t < end] for steps in self.steps.values())
        times = max(turns, key=len)
        assert len(times) == TURN_STEPS
        first, last = TURN_ENDS - 1, TURN_STEPS - TURN_ENDS - 1
        return (times[last] - times[first]) / (last - first)

    def measure_recovery(self, peer: Peer) -> dict[str, float]:
        """Return the steps lost, and the seconds until all ranks have made the next one."""
        assert self.killed is not None
        moment, victim = self.killed
        # A step may be in flight: its gradients were exchanged before the kill.
        in_flight = moment + 2 * self._measure_pace(victim, moment)
        old = {pid: steps for pid, steps in self.steps.items() if steps[0][0] < moment}
        new = [steps for pid, steps in self.steps.items() if pid not in old]
        if peer.survives:
            (survivor,) = (steps for pid, steps in old.items() if pid != victim)
            started = min((steps[0][0] for steps in new), default=math.inf)
            return {
                "lost": 0,
                "seconds": min(when for when, _ in survivor if when > in_flight) - moment,
                "alone": sum(in_flight < when < started for when, _ in survivor),
            }
        completed = max(s for steps in old.values() for when, s in steps if when <= in_flight)
        assert len(new) == RANKS, f"{len(new)} new processes"
        return {
            "lost": completed + 1 - min(steps[0][1] for steps in new),
            "seconds": max(steps[0][0] for steps in new) - moment,
        }

    def _measure_pace(self, victim: int, moment: float) -> float:
        times = [when for when, _ in self.steps[victim] if when < moment][-50:]
        return median([b - a for a, b in itertools.pairwise(times)])


def missing(peer: Peer) -> str | None:
    """Return why ``peer`` can't run here, if so."""
    needed = [peer.package, *(["pydantic", "pyarrow"] if peer.package == "ray" else [])]
    absent = [name for name in needed if importlib.util.find_spec(name) is None]
    return f"{' and '.join(absent)} not installed" if absent else None


def run(name: str, steps: int, every: int, kill: Kill | None = None) -> Records:
    """Run a peer's script for ``steps`` steps.

    Raises:
        RuntimeError: It ended before, or didn't end in time.
    """
    peer = PEERS[name]
    with tempfile.TemporaryDirectory(prefix="bench-recovery-") as home:
        records, log = Path(home, "records"), Path(home, "log")
        command = [sys.executable, *peer.launcher, str(SCRIPTS / peer.script)]
        environment = _create_environment(home, records, steps, every, kill)
        deadline = time.monotonic() + TIMEOUT_S
        with log.open("w") as file:
            status = _run_command(command, environment, file, deadline)
            if peer.is_rerun and kill is not None and status != 0:
                environment.pop("BENCH_KILL")
                status = _run_command(command, environment, file, deadline)
        found = Records(records)
        last = found.find_last_step()
        if last < steps or (kill is not None and found.killed is None):
            shown = log.read_text(errors="replace")[-40000:]
            raise RuntimeError(f"{peer.title} ended with {status} at step {last}:\n{shown}")
        return found


def _run_command(
    command: list[str], environment: dict[str, str], log: Any, deadline: float
) -> int | str:
    """Return the exit status. No process of the command is left."""
    process = subprocess.Popen(
        command,
        env=environment,
        cwd=environment["HOME"],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    started: dict[int, psutil.Process] = {}
    try:
        while process.poll() is None and time.monotonic() < deadline:
            for child in psutil.Process(process.pid).children(recursive=True):
                started[child.pid] = child
            time.sleep(0.5)
        return "no end" if process.poll() is None else process.returncode
    except psutil.NoSuchProcess:
        return process.wait()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        _, left = psutil.wait_procs(list(started.values()), timeout=2)
        for child in left:
            child.kill()


def _create_environment(
    home: str, records: Path, steps: int, every: int, kill: Kill | None
) -> dict[str, str]:
    records.mkdir()
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MINIRAY_", "RAY_"))}
    source = common.ROOT / "src"
    paths = [str(source), str(SCRIPTS), str(WORKLOAD), kept.get("PYTHONPATH", "")]
    environment = {
        **kept,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "OMP_NUM_THREADS": "1",
        "BENCH_RECORDS": str(records),
        "BENCH_STEPS_TOTAL": str(steps),
        "BENCH_EVERY": str(every),
        "HOME": home,  # where Ray Train writes its results
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    if kill is not None:
        environment["BENCH_KILL"] = f"{kill.rank}:{kill.step}:{kill.delay}"
    return environment


def measure_interval(name: str, repetitions: int, say: Say) -> dict[str, Any]:
    """Measure what a checkpoint costs, and return the interval at which that is ``COST``."""
    costs: list[float] = []
    steps: list[float] = []
    often = PEERS[name].often
    if not PEERS[name].writes_checkpoints:
        return {"every": 1, "checkpoint": costs, "step": steps}
    count = WARM_UP + max(MEASURED, 6 * often)
    for _ in range(repetitions):
        found, step = _again(name, count, often, say).measure_checkpoints(often)
        costs += found
        steps.append(step)
    every = max(1, math.ceil(median(costs) / (COST * median(steps))))
    say(f"{PEERS[name].title}: a checkpoint costs {median(costs):.4g} s, so every {every} steps")
    return {"every": every, "checkpoint": costs, "step": steps}


def measure_turns(pairs: int, say: Say) -> tuple[list[list[float]], list[list[float]]]:
    """Return pairs of step times of miniray, with and without protection, and of CPU seconds."""
    found: list[list[float]] = []
    cpu: list[list[float]] = []
    while len(found) < pairs:
        count = min(PAIRS_AT_ONCE, pairs - len(found))
        with tempfile.TemporaryDirectory(prefix="bench-recovery-") as home:
            records, log, out = (Path(home, name) for name in ("records", "log", "turns.json"))
            command = [sys.executable, str(SCRIPTS / "miniray_turns.py"), str(count), str(out)]
            environment = _create_environment(home, records, 0, 1, None)
            with log.open("w") as file:
                deadline = time.monotonic() + 2 * TIMEOUT_S
                status = _run_command(command, environment, file, deadline)
            if status != 0:
                raise RuntimeError(f"miniray ended with {status}:\n{log.read_text()[-40000:]}")
            turns, steps = json.loads(out.read_text()), Records(records)
        for pair in zip(turns[::2], turns[1::2], strict=True):
            with_, without = sorted(pair, key=lambda turn: turn["run"])
            times = [steps.measure_turn(turn["start"], turn["end"]) for turn in (with_, without)]
            found.append(times)
            cpu.append([with_["cpu"], without["cpu"]])
        overhead, low, high = summarize_overhead(found)
        say(
            f"{len(found)}/{pairs}  miniray in turns: {_percent(overhead)}, 95 % interval "
            f"{_percent(low)} to {_percent(high)}; CPU {_percent(summarize_overhead(cpu)[0])}"
        )
    return found, cpu


def measure_overhead(
    pairs: dict[str, int], every: dict[str, int], say: Say
) -> dict[str, list[list[float]]]:
    """Return pairs of step times, with and without protection, by peer."""
    found: dict[str, list[list[float]]] = {name: [] for name in pairs}
    for number in range(max(pairs.values(), default=0)):
        for name in [name for name, count in pairs.items() if number < count]:
            # A whole number of intervals, so that each run has its share of checkpoints.
            interval = every[name] if PEERS[name].writes_checkpoints else 1
            steps = WARM_UP + interval * math.ceil(MEASURED / interval)
            plain = UNPROTECTED.get(name, name)
            runs = [(name, every[name]), (plain, 0)]
            order = (0, 1) if number % 2 == 0 else (1, 0)
            pair = [0.0, 0.0]
            try:
                for index in order:
                    script, interval = runs[index]
                    pair[index] = _again(script, steps, interval, say).measure_step()
            except RuntimeError as error:
                say(f"without this pair: {error}")
                continue
            found[name].append(pair)
            say(
                f"{number + 1}/{pairs[name]}  {PEERS[name].title}: {1e3 * pair[0]:.3f} ms with, "
                f"{1e3 * pair[1]:.3f} without: {100 * (pair[0] / pair[1] - 1):+.2f} %"
            )
    return found


def measure_recovery(
    names: list[str], every: dict[str, int], kills: int, seed: int, say: Say
) -> dict[str, dict[str, list[float]]]:
    """Return what each kill cost, by peer. A run that failed is one in ``failed``."""
    found: dict[str, dict[str, list[float]]] = {
        name: {"lost": [], "seconds": [], "failed": []} for name in names
    }
    for number in range(kills):
        chance = random.Random(f"{seed}-{number}")
        rank, place, delay = chance.randrange(RANKS), chance.random(), chance.random()
        for name in names:
            # Anywhere between two checkpoints, of which one has been written.
            first = max(WARM_UP + 40, 2 * every[name])
            kill = Kill(rank, first + int(place * max(100, every[name])), 0.015 * delay)
            left = 300 if PEERS[name].survives else 40
            try:
                costs = run(name, kill.step + left, every[name], kill).measure_recovery(PEERS[name])
            except RuntimeError as error:
                say(f"{number + 1}/{kills}  {PEERS[name].title} didn't recover: {error}")
                found[name]["failed"].append(1)
                continue
            found[name]["failed"].append(0)
            for key, value in costs.items():
                found[name].setdefault(key, []).append(value)
            shown = ", ".join(f"{key} {value:.4g}" for key, value in costs.items())
            say(f"{number + 1}/{kills}  {PEERS[name].title}, step {kill.step}: {shown}")
    return found


def _again(name: str, steps: int, every: int, say: Say) -> Records:
    """Run, and again if a peer fails: torch 2.13 sometimes aborts a process of gloo at its end."""
    if PEERS[name].package == "miniray":
        return run(name, steps, every)
    return common.tried_again(lambda: run(name, steps, every), say)


def summarize_overhead(pairs: list[list[float]]) -> tuple[float, float, float]:
    """Return the median overhead of the pairs, and its 95 % interval."""
    if not pairs:
        return math.nan, math.nan, math.nan
    overheads = sorted(with_ / without - 1 for with_, without in pairs)
    return median(overheads), *common.find_median_interval(overheads)


def summarize(names: list[str], found: Samples) -> list[Line]:
    """Return one line per figure. The last cell is miniray against the best that restarts."""
    lost, seconds = {}, {}
    rows: dict[str, list[str]] = {}
    for name in names:
        recovery = found["recovery"][name]
        lost[name] = statistics.fmean(recovery["lost"]) if recovery["lost"] else math.nan
        seconds[name] = median(recovery["seconds"]) if recovery["seconds"] else math.nan
        overhead, low, high = summarize_overhead(found["overhead"][name])
        cpu = found["cpu"].get(name)
        every = found["interval"][name]["every"]
        attempts = len(recovery["failed"])
        cells = {
            "steps between checkpoints": str(every) if PEERS[name].writes_checkpoints else "–",
            "steps lost, mean": f"{lost[name]:.1f}",
            "steps lost, most": f"{max(recovery['lost'], default=math.nan):.0f}",
            "from the kill to the next step": common.human(seconds[name], "s"),
            "slowest": common.human(max(recovery["seconds"], default=math.nan), "s"),
            "recovered": f"{attempts - sum(recovery['failed'])} of {attempts}",
            "overhead without failures": _percent(overhead),
            "95 % interval": f"{_percent(low)} to {_percent(high)}",
            "pairs": str(len(found["overhead"][name])),
            "overhead in CPU time": _percent(summarize_overhead(cpu)[0]) if cpu else "–",
        }
        for title, cell in cells.items():
            rows.setdefault(title, []).append(cell)
    lines = [Line(title, [*cells, ""]) for title, cells in rows.items()]
    if "miniray" not in names:
        return lines
    by_title = {line.title: line for line in lines}
    restarting = [n for n in names if n != "miniray" and not PEERS[n].survives]
    overhead = summarize_overhead(found["overhead"]["miniray"])[0]
    _judge(by_title["overhead without failures"], "", "below 1 %", overhead < COST)
    if restarting:
        fewest = min(lost[name] for name in restarting)
        ratio = min(seconds[name] for name in restarting) / seconds["miniray"]
        _judge(by_title["steps lost, mean"], "", "fewest", lost["miniray"] < fewest)
        sooner = by_title["from the kill to the next step"]
        _judge(sooner, f"{ratio:.1f}×", "5×", ratio >= 5)
    return lines


def _judge(line: Line, cell: str, goal: str, reached: bool) -> None:
    line.cells[-1], line.goal, line.reached = cell or ("yes" if reached else "no"), goal, reached


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def choose(parser: argparse.ArgumentParser, only: str | None) -> tuple[list[str], dict[str, str]]:
    """Return the peers to run, and why the others that were asked for can't."""
    names = only.split(",") if only else list(PEERS)
    unknown = sorted(set(names) - set(PEERS))
    if unknown:
        parser.error(f"unknown peers {', '.join(unknown)}; there are {', '.join(PEERS)}")
    reasons = {name: reason for name in names if (reason := missing(PEERS[name]))}
    return [name for name in names if name not in reasons], reasons


def try_all(names: list[str], say: Say) -> dict[str, str]:
    """Let each peer make some steps, and return why those that fail did."""
    reasons = {}
    for name in names:
        try:
            common.tried_again(partial(run, name, WARM_UP, 0), say, times=2)
        except RuntimeError as error:
            lines = str(error).strip().splitlines()
            reasons[name] = f"{lines[0]} {lines[-1]}"
    return reasons


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one pair and two kills per peer")
    parser.add_argument("--only", metavar="PEERS", help=f"comma-separated: {', '.join(PEERS)}")
    parser.add_argument("--pairs", type=int, default=60, metavar="N", help="of turns of miniray")
    parser.add_argument("--peer-pairs", type=int, default=20, metavar="N", help="of runs of peers")
    parser.add_argument("--kills", type=int, default=10, metavar="N", help="of each peer")
    parser.add_argument("--seed", type=int, default=0, help="of the kills")
    parser.add_argument("--json", type=Path, metavar="PATH")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    arguments = parser.parse_args()
    names, not_run = choose(parser, arguments.only)
    if arguments.quick:
        arguments.kills, arguments.pairs, arguments.peer_pairs = 2, 4, 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # no process of a peer is left
    started = common.stamp()

    def say(text: str) -> None:
        print(text, flush=True)

    not_run |= try_all([name for name in names if name != "miniray"], say)
    names = [name for name in names if name not in not_run]
    pairs = {name: arguments.peer_pairs for name in names if name != "miniray"}
    turns, cpu = {}, {}
    if "miniray" in names:
        turns["miniray"], cpu["miniray"] = measure_turns(arguments.pairs, say)
    intervals = {name: measure_interval(name, 1 if arguments.quick else 3, say) for name in names}
    every = {name: interval["every"] for name, interval in intervals.items()}
    found = {
        "interval": intervals,
        "recovery": measure_recovery(names, every, arguments.kills, arguments.seed, say),
        "overhead": {**turns, **measure_overhead(pairs, every, say)},
        "cpu": cpu,
        "not_run": not_run,
    }
    lines = summarize(names, found)
    columns = [*(PEERS[name].title for name in names), "miniray to the best"]
    if arguments.markdown:
        print(common.markdown_table(columns, lines))
    else:
        common.print_table("one of two ranks is killed", columns, lines)
    for name, reason in not_run.items():
        print(f"{PEERS[name].title} didn't run: {reason}")
    record = {
        "started": started,
        "finished": common.stamp(),
        "machine": common.machine(),
        "versions": common.versions("miniray", "torch", "ray", "lightning", "torchft"),
        "seed": arguments.seed,
        "samples": found,
        "table": [vars(line) for line in lines],
    }
    target = arguments.json or common.RESULTS / "recovery.json"
    common.write_json(target, record)
    print(f"all samples: {target}")


if __name__ == "__main__":
    main()
