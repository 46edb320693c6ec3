"""A diagnosis as JSON, for a program."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from miniray.doctor.facts import Facts
from miniray.doctor.render import step_line

if TYPE_CHECKING:
    from miniray.doctor.diagnose import Diagnosis


def to_json(diagnosis: Diagnosis) -> dict[str, Any]:
    case = diagnosis.case
    return {
        "verdict": diagnosis.verdict,
        "healthy": diagnosis.exit_code == 0,
        "exit_code": diagnosis.exit_code,
        "run_dir": str(diagnosis.run.path),
        "read_at": diagnosis.run.read_at,
        "world_size": diagnosis.run.world_size,
        "missing": list(diagnosis.run.missing),
        "ranks": [_rank_json(facts) for facts in case],
        "findings": [finding.to_json() for finding in diagnosis.findings],
        "notes": [finding.to_json() for finding in diagnosis.notes],
        "stacks": {
            str(rank): [
                {
                    "thread": thread.thread,
                    "name": thread.name,
                    "frames": [f"{f.file}:{f.line} {f.function}" for f in thread.frames],
                }
                for thread in threads
            ]
            for rank, threads in diagnosis.stacks.items()
        },
        "damaged": dict(diagnosis.run.damaged),
    }


def _rank_json(facts: Facts) -> dict[str, Any]:
    record = facts.record
    gpu = record.gpu
    return {
        "rank": record.rank,
        "pid": record.pid,
        "host": record.host,
        "launcher": record.launcher,
        "state": facts.state,
        "line": step_line(record),
        "step": record.step,
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


def plain(value: float | None) -> float | str | None:
    """JSON has no NaN: the words are those of ``metrics.jsonl``."""
    if value is None or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
