"""Syncs, failures and restarts, and what the run was made with."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

from miniray.doctor import runfile
from miniray.doctor.findings import plural, seconds, size
from miniray.report.html import Markup, facts, folded, section, short, table, tag
from miniray.report.run import Run
from miniray.report.series import flat, number, spread
from miniray.runs.run_info import parse_time

_MOST_EVENTS = 100
_PHASES = {
    "collect": "collecting weights",
    "combine": "combining",
    "distribute": "giving them back",
}


def sync(run: Run) -> Markup:
    """What the parameter server counted over the run."""
    stats = run.info.get("sync")
    if not isinstance(stats, Mapping) or not stats.get("num_syncs"):
        done = [record for record in run.metrics if record.get("synced") is True]
        if not done:
            return Markup()
        text = f"Synced after {len(done)} of {len(run.metrics)} {run.unit}s."
        return section("Parameter sync", tag("p", text))
    pairs: list[tuple[str, Any]] = [
        ("strategy", run.config.get("sync_strategy")),
        ("every", _interval(run)),
        ("syncs", stats.get("num_syncs")),
        ("failed syncs", stats.get("failed_syncs")),
        ("bytes moved", _bytes(stats.get("bytes"))),
        ("bytes a sync", _bytes(stats.get("last_bytes"))),
        ("last change (norm)", stats.get("last_change_norm")),
    ]
    apart, spent = stats.get("divergence"), stats.get("seconds")
    if isinstance(apart, Mapping):
        pairs.append(("workers apart, at most", apart.get("max")))
    if isinstance(spent, Mapping):
        taken = ((text, number(spent.get(name))) for name, text in _PHASES.items())
        pairs += [(text, _spent(value)) for text, value in taken if value is not None]
    if stats.get("skipped"):
        pairs.append(("syncs a worker missed", _short(stats["skipped"])))
    pairs.append(("last error", stats.get("last_error") or None))
    return section("Parameter sync", facts(pairs))


def failures(run: Run) -> Markup:
    """Attempts, events, restarts: what happened besides training."""
    inside: list[Markup] = []
    attempts = run.info.get("attempts")
    if isinstance(attempts, list) and attempts:
        rows = [
            [i + 1, _moment(a.get("started")), a.get("state"), a.get("world_size"), _error(a)]
            for i, a in enumerate(attempts)
            if isinstance(a, Mapping)
        ]
        head = ["attempt", "began", "ended as", "ranks", "error"]
        inside += [tag("h3", "Earlier attempts"), table(head, rows, texts=(0, 1, 2, 4))]
    if run.events:
        kept = spread(run.events, _MOST_EVENTS)
        rows = [
            [_after(run, e), str(e.get("event", "?")).replace("_", " "), e.get("worker"),
             e.get("epoch"), _rest(e)]
            for e in kept
        ]  # fmt: skip
        title = plural(len(run.events), "event")
        inside += [tag("h3", title), table(["after", "what", "worker", run.unit, "why"], rows,
                                           texts=(0, 1, 4))]  # fmt: skip
    return section("Failures and restarts", *inside)


def environment(run: Run) -> Markup:
    """Versions, machine, command, seed, configuration."""
    info = run.info
    versions = info.get("versions")
    pairs: list[tuple[str, Any]] = []
    if isinstance(versions, Mapping):
        pairs += [(str(name), version or "not installed") for name, version in versions.items()]
    for key in ("host", "platform", "pid", "seed"):
        if info.get(key) is not None:
            pairs.append((key, str(info[key])))
    for key in ("started", "ended"):
        if _moment(info.get(key)) is not None:
            pairs.append((f"{key} (UTC)", _moment(info[key])))
    records = list(run.record)
    if not pairs and records:  # a run of `attach` alone: what its boxes say
        first = records[0]
        pairs += [("host", first.host), ("launcher", first.launcher)]
        pairs += [(key, value) for key, value in first.notes.items() if isinstance(value, str)]
    inside = [facts(pairs)] if pairs else []
    command = info.get("command") or next((rank.command for rank in records), "")
    if command:
        inside += [tag("h3", "Command"), tag("pre", runfile.mask_command(str(command)))]
    config = flat(run.config)
    if config:
        rows = [(key, _short(value)) for key, value in config.items()]
        inside += [tag("h3", "Configuration"), facts(rows)]
    checkpoints = sorted(p.name for p in run.path.glob("checkpoints/*") if p.is_dir())
    files = sorted(p.name for p in run.path.iterdir() if p.is_file() and p.name[0] != ".")
    if checkpoints:
        shown = ", ".join(checkpoints[-8:])
        inside.append(folded(plural(len(checkpoints), "checkpoint"), tag("p", shown)))
    inside.append(folded(plural(len(files), "file"), tag("p", ", ".join(files))))
    return section("Environment", *inside)


def _spent(value: float) -> str:
    """Of all syncs together, which may take a millisecond."""
    return seconds(value) if value >= 1 else f"{short(1000 * value)} ms"


def _interval(run: Run) -> str | None:
    plain = number(run.config.get("sync_interval"))
    if plain is None:
        return None
    return run.unit if plain == 1 else f"{plain:.0f} {run.unit}s"


def _after(run: Run, event: Mapping[str, Any]) -> str | None:
    """Since the run began; an event of an earlier attempt shows its date."""
    at, began = parse_time(event.get("time")), run.started
    if at is None:
        return None
    if began is None or at < began:
        return _moment(event["time"])
    return seconds(at - began)


def _rest(event: Mapping[str, Any]) -> str:
    for key in ("reason", "message", "path"):
        if event.get(key):
            return _first_line(str(event[key]))
    known = ("time", "event", "worker", "epoch")
    return ", ".join(f"{k} {v}" for k, v in event.items() if k not in known)


def _first_line(text: str, most: int = 160) -> str:
    line = text.strip().partition("\n")[0]
    return line if len(line) <= most else f"{line[: most - 1]}…"


def _error(attempt: Mapping[str, Any]) -> str | None:
    error = attempt.get("error")
    if not isinstance(error, Mapping):
        return None
    return _first_line(f"{error.get('type') or 'error'}: {error.get('message')}")


def _moment(value: Any) -> str | None:
    try:
        return f"{datetime.datetime.fromisoformat(value):%Y-%m-%d %H:%M:%S}"
    except (TypeError, ValueError):
        return None


def _bytes(value: Any) -> str | None:
    plain = number(value)
    return None if plain is None else size(plain)


def _short(value: Any) -> str:
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= 200 else f"{text[:199]}…"
