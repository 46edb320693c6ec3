"""Convert a diagnosis to JSON for the page.

The most severe finding comes first, and the ranks that are affected by a finding are marked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from miniray.doctor import render
from miniray.doctor.diagnose import Diagnosis
from miniray.doctor.facts import Case, Facts
from miniray.doctor.findings import Severity, conjugated, plain
from miniray.doctor.hang import awaited_by, on_gpu
from miniray.doctor.model import Site, ThreadStack
from miniray.doctor.sites import is_users

_FAILED_STATES = ("failed", "died", "gone", "stopped", "silent")


def run_summary(diagnosis: Diagnosis, run: Mapping[str, Any], state: str) -> dict[str, Any]:
    """Return all data that the page shows about a run, except its curves and timelines."""
    severities = severity_by_rank(diagnosis)
    severity, verdict = choose_verdict(diagnosis, run, state)
    case = diagnosis.case
    first = 1 if "trainer" in (run.get("config") or {}) else 0  # the number of a trainer's epoch 0
    # If a run ended without any rank records, it doesn't record ranks, so no ranks are missing.
    missing = case.never_started if diagnosis.readable or state == "running" else ()
    return {
        "state": state,
        "severity": severity,
        "verdict": verdict,
        "facts": " ".join(render.facts_line(case).split()) if diagnosis.readable else "",
        "world_size": diagnosis.run.world_size,
        "live": bool(case.live),
        "ranks": [_rank_row(facts, severities.get(facts.rank, ""), first) for facts in case]
        + [_missing_row(rank) for rank in missing],
        "waits": list_waits(case),
        "findings": [finding.to_json() for finding in diagnosis.findings],
        "notes": [finding.to_json() for finding in diagnosis.notes],
        "damaged": dict(diagnosis.run.damaged),
        "gpus": list(render.gpu_lines(case)),
    }


def choose_verdict(diagnosis: Diagnosis, run: Mapping[str, Any], state: str) -> tuple[str, str]:
    """Return the verdict on a run as a ``(severity, sentence)`` tuple.

    The verdict describes the most severe finding. If the run has no rank records, the verdict is
    the state or the error that ``run.json`` contains.
    """
    if diagnosis.findings:
        return diagnosis.findings[0].severity.word.lower(), diagnosis.findings[0].title
    error = run.get("error")
    if state == "failed" and isinstance(error, Mapping):
        kind = f"{error['type']}: " if error.get("type") else ""
        return "failed", f"{kind}{error.get('message')}"
    if state == "died":
        return "failed", (
            "The process ended without recording an exit status. It was killed, or the machine "
            "went down."
        )
    if not diagnosis.readable and not diagnosis.run.damaged and run:
        return "none", f"{state}; this run has no rank records"
    word, _, sentence = diagnosis.verdict.partition(": ")
    return word.lower(), sentence


def severity_by_rank(diagnosis: Diagnosis) -> dict[int, str]:
    """Return the highest severity of the findings about each rank.

    Notes and findings that affect all ranks are ignored.
    """
    found: dict[int, str] = {}
    for finding in diagnosis.findings:
        all_ranks = len(finding.ranks) == len(diagnosis.case.ranks) > 1
        if finding.severity is not Severity.NOTE and not all_ranks:
            for rank in finding.ranks:
                found.setdefault(rank, finding.severity.word.lower())
    return found


def list_waits(case: Case) -> list[dict[str, Any]]:
    """Return the operations in which ranks are waiting, starting with the longest wait.

    Each entry contains the waiting ranks, the duration of the wait, and the current activity of the
    ranks that haven't reached the operation.
    """
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
                "waiting": sorted(facts.rank for facts in members),
                "missing": _group_by_activity(
                    case, sorted(missing - {facts.rank for facts in members})
                ),
            }
        )
    return sorted(found, key=lambda wait: -float(str(wait["seconds"])))


def _group_by_activity(case: Case, ranks: Sequence[int]) -> list[dict[str, Any]]:
    """Return the ranks with the same activity, and a sentence about them."""
    groups: dict[str, list[int]] = {}
    for rank in ranks:
        facts = case.ranks.get(rank)
        groups.setdefault("has not started" if facts is None else facts.doing(), []).append(rank)
    return [
        {"ranks": members, "doing": conjugated(doing, len(members))}
        for doing, members in groups.items()
    ]


def _rank_row(facts: Facts, severity: str, first: int) -> dict[str, Any]:
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
        "severity": severity or ("failed" if facts.state in _FAILED_STATES else ""),
        "step": record.global_step,
        "epoch": record.epoch + first if record.epoch >= 0 else record.epoch,
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


def _missing_row(rank: int) -> dict[str, Any]:
    return {"rank": rank, "state": "missing", "severity": "failed", "doing": "hasn't started"}


def stack_to_json(threads: tuple[ThreadStack, ...]) -> list[dict[str, Any]]:
    """Return the threads of a rank and their frames, starting with the innermost frame.

    Frames in the user's code are marked.
    """
    main = next((t for t in threads if t.frames and not _is_secondary_thread(t.frames[-1])), None)
    return [
        {
            "name": thread.name or thread.thread,
            "main": thread is main,
            "frames": [_frame_to_json(frame) for frame in thread.frames],
        }
        for thread in sorted(threads, key=lambda thread: thread is not main)
    ]


def _is_secondary_thread(outermost: Site) -> bool:
    """Return True if the ``threading`` module started the thread."""
    return outermost.function.startswith("_bootstrap")


def _frame_to_json(frame: Site) -> dict[str, Any]:
    return {
        "file": frame.file,
        "short": Path(frame.file).name,
        "line": frame.line,
        "function": frame.function,
        "is_user_code": is_users(frame.file),
    }
