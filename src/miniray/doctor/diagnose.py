"""The doctor: a function from a run directory to findings.

    diagnosis = diagnose("runs/my-run")
    print(diagnosis.text())

Works on a run that is live, hung or dead, from its files and from what the kernel shows of its
processes; the ranks do nothing for it. Only to show where a living rank is, its stack is asked for
by a signal that its recorder answers even when the rank is stuck in C. Needs no torch.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from miniray.doctor import (
    checks,
    collectives,
    crossed,
    ended,
    hang,
    render,
    stacks,
)
from miniray.doctor.checks.world import explain_meeting
from miniray.doctor.facts import Case, Facts, gather
from miniray.doctor.findings import Finding, Severity, by_weight, plain, plural
from miniray.doctor.model import RunRecord, ThreadStack
from miniray.doctor.reader import read_run

#: Seconds between the two readings of a run that lives.
_GAP = 0.5


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """What is wrong with a run. ``findings`` are worst first; a healthy run has none.

    ``notes`` are worth knowing and say nothing against the run. ``exit_code`` is that of ``miniray
    doctor``: 0 healthy, 1 something was found, 2 nothing could be read.
    """

    case: Case
    findings: tuple[Finding, ...]
    notes: tuple[Finding, ...]
    stacks: Mapping[int, tuple[ThreadStack, ...]]

    @property
    def run(self) -> RunRecord:
        return self.case.run

    @property
    def readable(self) -> bool:
        return bool(self.run.ranks)

    @property
    def exit_code(self) -> int:
        if not self.readable:
            return 2
        return 1 if self.findings else 0

    @property
    def verdict(self) -> str:
        """The one line to read."""
        if self.findings:
            return f"{self.findings[0].severity.word}: {self.findings[0].title}"
        if not self.readable:
            damaged = next(iter(self.run.damaged.items()), None)
            why = f": {damaged[0]}: {damaged[1]}" if damaged else " (no ranks/*.box in it)"
            return f"UNREADABLE: {self.run.path} has no record of any rank{why}"
        ranks, where = plural(len(self.case.ranks), "rank"), self.case.place
        if self.case.interrupted:
            return f"HEALTHY: {ranks} at {where} when the run was interrupted"
        if not self.case.live:
            return f"HEALTHY: {ranks} finished at {where}"
        return f"HEALTHY: {ranks} at {where}, nothing wrong"

    def text(self, width: int = 80, color: bool = False) -> str:
        """The whole diagnosis for a person, at most ``width`` columns wide."""
        return render.text(self, width, color)

    def to_json(self) -> dict[str, Any]:
        """The same for a program; plain data that ``json.dumps`` takes."""
        return {
            "verdict": self.verdict,
            "healthy": self.exit_code == 0,
            "exit_code": self.exit_code,
            "run_dir": str(self.run.path),
            "read_at": self.run.read_at,
            "world_size": self.run.world_size,
            "missing": list(self.run.missing),
            "ranks": [_rank_json(facts, self.case.run.epochs) for facts in self.case],
            "findings": [finding.to_json() for finding in self.findings],
            "notes": [finding.to_json() for finding in self.notes],
            "stacks": {
                str(rank): [
                    {
                        "thread": thread.thread,
                        "name": thread.name,
                        "frames": [f"{f.file}:{f.line} {f.function}" for f in thread.frames],
                    }
                    for thread in threads
                ]
                for rank, threads in self.stacks.items()
            },
            "damaged": dict(self.run.damaged),
        }


def _rank_json(facts: Facts, epochs: int | None) -> dict[str, Any]:
    record = facts.record
    gpu = record.gpu
    return {
        "rank": record.rank,
        "pid": record.pid,
        "host": record.host,
        "launcher": record.launcher,
        "state": facts.state,
        "line": render.step_line(record, epochs),
        "step": record.global_step,
        "epoch": record.epoch,
        "batch_size": record.batch_size,
        "batches": record.batches,
        "samples": record.samples,
        "loss": plain(record.loss),
        "phase": record.phase.name,
        "waiting_for": facts.wait.describe() if facts.wait is not None else None,
        "idle_seconds": round(facts.idle, 3),
        "heartbeat_age": round(record.heartbeat_age(facts.now), 3),
        "cpu": None if facts.cpu is None else round(facts.cpu, 3),
        "threads": record.process.threads,
        "children": record.process.children,
        "rss": record.rss,
        "peak_rss": record.peak_rss,
        "distributed": {
            "available": record.distributed_available,
            "initialised": record.initialised,
            "backend": record.backend,
            "rank": record.group_rank,
            "world_size": record.group_size,
        },
        "gpu": None
        if gpu is None
        else {
            "index": gpu.index,
            "name": gpu.name,
            "utilisation": gpu.utilisation,
            "memory_used": gpu.memory_used,
            "memory_total": gpu.memory_total,
            "process_memory": gpu.process_memory,
            "power": gpu.power,
        },
    }


def diagnose(
    run_dir: str | os.PathLike[str],
    *,
    hang_timeout: float | None = None,
    ask_for_stacks: bool = True,
) -> Diagnosis:
    """Read the run and say what is wrong with it.

    ``hang_timeout`` is how many seconds without movement make a hang: by default what the run was
    started with, else 60. Takes half a second on a run that lives. ``FileNotFoundError`` where
    there is no such directory.
    """
    first = read_run(run_dir)
    if not any(record.alive for record in first):
        return examine(first, None, _old_stacks(first), hang_timeout)
    began = time.monotonic()
    shown = _old_stacks(first)
    if ask_for_stacks:
        shown |= stacks.ask(first.ranks)
    time.sleep(max(0.0, _GAP - (time.monotonic() - began)))
    return examine(read_run(run_dir), first, shown, hang_timeout)


def examine(
    run: RunRecord,
    before: RunRecord | None = None,
    shown: Mapping[int, tuple[ThreadStack, ...]] | None = None,
    hang_timeout: float | None = None,
) -> Diagnosis:
    """The reasoning by itself, on what was read."""
    case = gather(run, before, shown, hang_timeout)
    found = by_weight([*_ends(case), *(f for check in checks.ALL for f in check(case))])
    if found and found[0].severity.ends_run:
        # Next to the reason why it ended, what made it slow is noise.
        found = tuple(f for f in found if f.severity is not Severity.SLOW)
    notes = tuple(f for f in found if f.severity is Severity.NOTE)
    return Diagnosis(case, tuple(f for f in found if f not in notes), notes, shown or {})


def _ends(case: Case) -> Iterable[Finding]:
    """Why the run ended or does not go on: one finding at most, for the rest follows from it."""
    failed = ended.explain_driver_gone(case) or ended.explain(case)
    if failed is not None:
        return [explain_meeting(case, Severity.FAILED) or _mismatched(case, failed) or failed]
    stuck = hang.explain(case)
    if stuck is not None:
        # All in one place, and nobody to blame: then what one of them raised is the best there is.
        raised = ended.explain_any(case) if stuck.code == "does-not-complete" else None
        return [explain_meeting(case, Severity.STUCK) or raised or stuck]
    told = ended.explain_driver_error(case)
    return [told] if told is not None else _diverged(case)


def _mismatched(case: Case, failed: Finding) -> Finding | None:
    """Why a rank crashed inside of a collective: the others made one that does not match it."""
    divergence = collectives.first_divergence(case)
    if divergence is None or divergence.kind != collectives.CALL:
        return None
    calls = [divergence.calls[rank] for rank in failed.ranks if rank in divergence.calls]
    if not any(call.is_open for call in calls):  # it came out of the call, and failed later
        return None
    found = crossed.from_divergence(divergence, Severity.FAILED)
    return dataclasses.replace(found, evidence=(*found.evidence, failed.title))


def _diverged(case: Case) -> Iterable[Finding]:
    """Collectives that do not match although the run goes on: the results are wrong."""
    divergence = collectives.first_divergence(case)
    if divergence is None:
        return []
    return [crossed.from_divergence(divergence, Severity.WRONG)]


def _old_stacks(run: RunRecord) -> dict[int, tuple[ThreadStack, ...]]:
    """Of ranks that ended: what they showed when they were last asked."""
    found = {}
    for record in run:
        if not record.alive and (shown := stacks.read_stacks(record.path)):
            found[record.rank] = shown
    return found


def find_run_of_process(pid: int, runs: str | os.PathLike[str] = "runs") -> Path:
    """Return the directory of the run that a process, its children or its siblings record.

    Raise ``FileNotFoundError`` if there is none.
    """
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        maps = ""
    for line in maps.splitlines():
        name = line.partition("/")[2]
        if name.endswith(".box"):
            return Path(f"/{name}").parent.parent
    for folder in Path(runs).glob("*/ranks"):
        for record in read_run(folder.parent):
            if record.pid == pid:
                return folder.parent
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        raise FileNotFoundError(f"there is no process {pid}, and no run knows it") from None
    for child in children:
        try:
            return find_run_of_process(int(child), runs)
        except FileNotFoundError:
            continue
    raise FileNotFoundError(f"process {pid} records no run: start it with `miniray run`")
