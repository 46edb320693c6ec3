"""Is it faster than one process? The same script with 1, 2, 4, … ranks, measured alike. (P10)

Every run gets the same number of threads a rank, the one-process run too: torchrun gives a single
process all cores and several processes one thread each, and a comparison of those two says nothing.
Samples per second come from the ranks' own step records, without the first steps.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from miniray.doctor.findings import plural
from miniray.doctor.model import RankRecord
from miniray.doctor.reader import read_run
from miniray.errors import MinirayError

#: What a healthy data-parallel run reaches: (at least, at most) times one process.
BANDS = {1: (1.0, 1.0), 2: (1.8, 1.9), 4: (3.5, 3.8), 8: (7.0, 7.5)}
#: Of other sizes: shares of the number of ranks.
_AT_LEAST, _AT_MOST = 0.875, 0.95
#: The first steps pay for memory, caches and lazy imports.
_WARM_UP = 3
_FEWEST_STEPS = 5


@dataclasses.dataclass(frozen=True)
class Measured:
    """One run. Shares are of the time of a step, averaged over ranks."""

    nproc: int
    rate: float  #: samples a second, all ranks together
    steps: int
    data: float
    compute: float
    backward: float
    collective: float


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the answer."""

    measured: Measured
    speedup: float
    low: float
    high: float

    @property
    def efficiency(self) -> float:
        return self.speedup / self.measured.nproc

    @property
    def verdict(self) -> str:
        if self.measured.nproc == 1:
            return "baseline"
        if self.speedup < self.low:
            return "below"
        return "as expected" if self.speedup <= self.high * 1.02 else "above"


@dataclasses.dataclass(frozen=True)
class Speedup:
    """All runs, with the smallest one as baseline."""

    rows: tuple[Row, ...]
    threads: int
    cores: int

    @property
    def exit_code(self) -> int:
        return 1 if any(row.verdict == "below" for row in self.rows) else 0

    def text(self) -> str:
        lines = [
            f"{'ranks':>5} {'samples/s':>11} {'speed-up':>9} {'efficiency':>11} "
            f"{'expected':>11}  verdict"
        ]
        for row in self.rows:
            expected = "" if row.measured.nproc == 1 else f"{row.low:.1f}–{row.high:.1f}×"
            lines.append(
                f"{row.measured.nproc:>5} {row.measured.rate:>11,.1f} {row.speedup:>8.2f}× "
                f"{row.efficiency:>10.0%} {expected:>11}  {row.verdict}"
            )
        lines += ["", f"{plural(self.threads, 'thread')} a rank in every run; {self.cores} cores"]
        last = self.rows[-1].measured
        lines.append(
            f"a step with {plural(last.nproc, 'rank')}: {last.data:.0%} waiting for data, "
            f"{last.compute:.0%} compute, {last.backward:.0%} backward, "
            f"{last.collective:.0%} other collectives"
        )
        lines += self._advice()
        return "\n".join(lines)

    def _advice(self) -> list[str]:
        if self.exit_code == 0:
            return []
        last, first = self.rows[-1].measured, self.rows[0].measured
        if last.nproc * self.threads > self.cores:
            return [
                f"{last.nproc} ranks × {self.threads} threads want more than {self.cores} cores: "
                "this machine cannot show the speed-up"
            ]
        if last.data > first.data + 0.1:
            return ["waiting for data grew: the loader or the disk is what limits"]
        if last.backward + last.collective > first.backward + first.collective + 0.1:
            return ["backward and collectives grew: the exchange of gradients is what limits"]
        return ["compute itself became slower: ranks share cores, memory bandwidth or a GPU"]

    def to_json(self) -> dict[str, Any]:
        return {
            "threads": self.threads,
            "cores": self.cores,
            "rows": [
                {
                    **dataclasses.asdict(row.measured),
                    "speedup": row.speedup,
                    "efficiency": row.efficiency,
                    "expected": [row.low, row.high],
                    "verdict": row.verdict,
                }
                for row in self.rows
            ],
        }


def band(nproc: int, baseline: int = 1) -> tuple[float, float]:
    """The expected speed-up of ``nproc`` ranks over ``baseline`` of them."""
    low, high = BANDS.get(nproc, (_AT_LEAST * nproc, _AT_MOST * nproc))
    base_low, base_high = BANDS.get(baseline, (_AT_LEAST * baseline, _AT_MOST * baseline))
    return low / base_high, high / base_low


def measure(
    command: Sequence[str],
    nprocs: Sequence[int],
    folder: Path,
    cores: int,
    threads: int = 1,
    hang_timeout: float = 60.0,
) -> Speedup:
    """Run ``command`` (script and arguments) with each number of ranks, one after the other.

    Run directories and output are kept in ``folder``. ``MinirayError`` shows the last lines of a
    run that failed, or says that a run was too short to measure.
    """
    measured = [_run(command, n, folder / f"nproc-{n}", threads, hang_timeout) for n in nprocs]
    return compare(measured, threads, cores)


def compare(measured: Sequence[Measured], threads: int, cores: int) -> Speedup:
    ordered = sorted(measured, key=lambda one: one.nproc)
    first = ordered[0]
    rows = []
    for one in ordered:
        low, high = (1.0, 1.0) if one is first else band(one.nproc, first.nproc)
        rows.append(
            Row(one, one.rate / first.rate * first.nproc, low * first.nproc, high * first.nproc)
        )
    return Speedup(tuple(rows), threads, cores)


def _run(
    command: Sequence[str], nproc: int, folder: Path, threads: int, hang_timeout: float
) -> Measured:
    folder.mkdir(parents=True)
    run_dir, output = folder / "run", folder / "output.txt"
    full = [sys.executable, "-m", "miniray", "run", "--nproc", str(nproc)]
    full += ["--run-dir", str(run_dir), "--hang-timeout", str(hang_timeout), *command]
    with open(output, "wb") as file:
        done = subprocess.run(
            full, env=_environment(threads), stdout=file, stderr=file, check=False
        )
    if done.returncode != 0:
        last = "\n".join(output.read_text(errors="replace").splitlines()[-15:])
        raise MinirayError(f"the run with {plural(nproc, 'rank')} failed:\n{last}")
    return of_records(nproc, {r.rank: r for r in read_run(run_dir)})


def _environment(threads: int) -> dict[str, str]:
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return {**os.environ, **dict.fromkeys(names, str(threads))}


def of_records(nproc: int, records: Mapping[int, RankRecord]) -> Measured:
    """Samples a second of all ranks together, and where the time of a step went."""
    rate = 0.0
    sums = [0.0] * 5
    fewest = None
    for record in records.values():
        steps = [s for s in record.steps if s.step - s.count >= _WARM_UP and s.seconds > 0]
        count = sum(s.count for s in steps)
        if count < _FEWEST_STEPS:
            raise MinirayError(
                f"rank {record.rank} of {nproc} recorded {plural(record.step, 'step')}: at least "
                f"{_WARM_UP + _FEWEST_STEPS} are needed to measure. Does the script train with a "
                "torch optimizer? If not, call miniray.doctor.step() once a step."
            )
        if not any(s.batch_size for s in steps):
            raise MinirayError(
                "the size of a batch is not known: call miniray.doctor.step(batch_size=...)"
            )
        total = sum(s.seconds for s in steps)
        rate += sum(s.batch_size * s.count for s in steps) / total
        parts = (
            total,
            sum(s.data for s in steps),
            sum(s.compute for s in steps),
            sum(s.backward for s in steps),
            sum(s.collective for s in steps),
        )
        sums = [a + b for a, b in zip(sums, parts, strict=True)]
        fewest = count if fewest is None else min(fewest, count)
    if not records:
        raise MinirayError("the run recorded no rank")
    shares = [part / sums[0] for part in sums[1:]]
    return Measured(nproc, rate, fewest or 0, *shares)
