"""A diagnosis as the page shows it: plain data, worst first, ranks to blame marked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miniray.doctor import render
from miniray.doctor.diagnose import Diagnosis
from miniray.doctor.facts import Case, Facts
from miniray.doctor.findings import Severity, plain
from miniray.doctor.hang import awaited_by, on_gpu
from miniray.doctor.model import Site, ThreadStack
from miniray.doctor.sites import is_users

_STATES_OF_TROUBLE = ("failed", "died", "gone", "stopped", "silent")


def of(diagnosis: Diagnosis, run: Mapping[str, Any], state: str) -> dict[str, Any]:
    """Everything about a run but its curves and lanes."""
    blame = blamed(diagnosis)
    severity, verdict = judged(diagnosis, run, state)
    case = diagnosis.case
    # Where none has a record, and none will, nobody records ranks there: that is no failure.
    absent = case.never_started if diagnosis.readable or state == "running" else ()
    return {
        "state": state,
        "severity": severity,
        "verdict": verdict,
        "facts": " ".join(render.facts_line(case).split()) if diagnosis.readable else "",
        "world_size": diagnosis.run.world_size,
        "live": bool(case.live),
        "ranks": [_row(facts, blame.get(facts.rank, "")) for facts in case]
        + [_absent(rank) for rank in absent],
        "waits": waits(case),
        "findings": [finding.to_json() for finding in diagnosis.findings],
        "notes": [finding.to_json() for finding in diagnosis.notes],
        "damaged": dict(diagnosis.run.damaged),
        "gpus": list(render.gpu_lines(case)),
    }


def judged(diagnosis: Diagnosis, run: Mapping[str, Any], state: str) -> tuple[str, str]:
    """(severity, sentence): the doctor's, or what ``run.json`` says where there is no record."""
    if diagnosis.findings:
        return diagnosis.findings[0].severity.word.lower(), diagnosis.findings[0].title
    error = run.get("error")
    if state == "failed" and isinstance(error, Mapping):
        kind = f"{error['type']}: " if error.get("type") else ""
        return "failed", f"{kind}{error.get('message')}"
    if state == "died":
        return "failed", "the run's process is gone and said nothing of its end"
    if not diagnosis.readable and not diagnosis.run.damaged and run:
        return "none", f"{state}; no rank recorded itself here"
    word, _, sentence = diagnosis.verdict.partition(": ")
    return word.lower(), sentence


def blamed(diagnosis: Diagnosis) -> dict[int, str]:
    """Ranks that a finding names, with the worst there is to say of each."""
    found: dict[int, str] = {}
    for finding in diagnosis.findings:
        everybody = len(finding.ranks) == len(diagnosis.case.ranks) > 1
        if finding.severity is not Severity.NOTE and not everybody:
            for rank in finding.ranks:
                found.setdefault(rank, finding.severity.word.lower())
    return found


def waits(case: Case) -> list[dict[str, Any]]:
    """What is being waited for now: who is in, since when, who is missing and what those do."""
    case = on_gpu(case)
    groups: dict[tuple[str, int, str], list[Facts]] = {}
    for facts in case:
        if facts.wait is not None and not facts.ended:
            groups.setdefault(facts.wait.key, []).append(facts)
    found = []
    for members in groups.values():
        first = min(members, key=lambda facts: facts.wait.since if facts.wait else 0.0)
        assert first.wait is not None
        missing = set[int]()
        for facts in members:
            missing |= awaited_by(case, facts)
        found.append(
            {
                "what": first.wait.describe(),
                "seconds": round(max(0.0, first.now - first.wait.since), 1),
                "in": sorted(facts.rank for facts in members),
                "missing": [
                    {"rank": rank, "doing": _doing(case.ranks.get(rank))}
                    for rank in sorted(missing - {facts.rank for facts in members})
                ],
            }
        )
    return sorted(found, key=lambda wait: -float(str(wait["seconds"])))


def _doing(facts: Facts | None) -> str:
    return "has not started" if facts is None else facts.doing()


def _row(facts: Facts, blame: str) -> dict[str, Any]:
    record = facts.record
    phase, since = record.phase.name or "start", record.phase.since
    if facts.wait is not None:
        phase, since = facts.wait.short(), facts.wait.since
    elif record.section is not None:
        phase, since = record.section.name, record.section.since
    end = facts.now if record.alive else facts.last_move
    if record.exit is not None and record.exit.at:
        end = record.exit.at
    return {
        "rank": record.rank,
        "state": facts.state,
        "blame": blame or ("failed" if facts.state in _STATES_OF_TROUBLE else ""),
        "step": record.step,
        "epoch": record.epoch,
        "batch_size": record.batch_size,
        "phase": phase,
        "since": round(max(0.0, end - since), 1),
        "doing": facts.doing(),
        "loss": plain(record.loss),
        "samples": record.samples,
        "rss": record.rss,
        "cpu": None if facts.cpu is None else round(facts.cpu, 2),
        "pid": record.pid,
        "host": record.host,
        "alive": record.alive,
    }


def _absent(rank: int) -> dict[str, Any]:
    return {"rank": rank, "state": "missing", "blame": "failed", "doing": "has not started"}


def stack(threads: tuple[ThreadStack, ...]) -> list[dict[str, Any]]:
    """Threads with their frames, innermost first; the user's own lines marked."""
    main = next((t for t in threads if t.frames and not _is_started(t.frames[-1])), None)
    return [
        {
            "name": thread.name or thread.thread,
            "main": thread is main,
            "frames": [_frame(frame) for frame in thread.frames],
        }
        for thread in sorted(threads, key=lambda thread: thread is not main)
    ]


def _is_started(outermost: Site) -> bool:
    """Every thread but the main one begins in ``threading``."""
    return outermost.function.startswith("_bootstrap")


def _frame(frame: Site) -> dict[str, Any]:
    return {
        "file": frame.file,
        "short": Path(frame.file).name,
        "line": frame.line,
        "function": frame.function,
        "mine": is_users(frame.file),
    }
