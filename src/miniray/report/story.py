"""Render the sections about parameter syncs, failures, restarts and the environment of a run."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

from miniray.doctor import runfile
from miniray.doctor.findings import plural, seconds, size
from miniray.report.html import (
    Markup,
    collapsible,
    definition_list,
    format_number,
    section,
    table,
    tag,
)
from miniray.report.run import Run
from miniray.report.series import flatten, sample_evenly, to_float
from miniray.runs.run_info import parse_time

_MOST_EVENTS = 100
_PHASES = {
    "collect": "collecting weights",
    "combine": "combining weights",
    "distribute": "distributing weights",
}


def render_sync(run: Run) -> Markup:
    """Return the section that shows the statistics of the parameter server."""
    stats = run.info.get("sync")
    if not isinstance(stats, Mapping) or not stats.get("num_syncs"):
        done = [record for record in run.metrics if record.get("synced") is True]
        if not done:
            return Markup()
        text = f"Weights were synced after {len(done)} of {len(run.metrics)} {run.unit}s."
        return section("sync", "Parameter sync", tag("p", text))
    pairs: list[tuple[str, Any]] = [
        ("strategy", run.config.get("sync_strategy")),
        ("interval", _format_sync_interval(run)),
        ("syncs", stats.get("num_syncs")),
        ("failed syncs", stats.get("failed_syncs")),
        ("bytes transferred", _format_bytes(stats.get("bytes"))),
        ("bytes per sync", _format_bytes(stats.get("last_bytes"))),
        ("last change (norm)", stats.get("last_change_norm")),
    ]
    apart, spent = stats.get("divergence"), stats.get("seconds")
    if isinstance(apart, Mapping):
        pairs.append(("largest divergence", apart.get("max")))
    if isinstance(spent, Mapping):
        taken = ((text, to_float(spent.get(name))) for name, text in _PHASES.items())
        pairs += [(text, _format_duration(value)) for text, value in taken if value is not None]
    if stats.get("skipped"):
        pairs.append(("missed syncs per worker", _shorten(stats["skipped"])))
    pairs.append(("last error", stats.get("last_error") or None))
    return section("sync", "Parameter sync", definition_list(pairs))


def render_failures(run: Run) -> Markup:
    """Return the section that lists earlier attempts and events such as failures and restarts."""
    inside: list[Markup] = []
    attempts = run.info.get("attempts")
    if isinstance(attempts, list) and attempts:
        rows = [
            [
                i + 1,
                _format_time(a.get("started")),
                a.get("state"),
                a.get("world_size"),
                _format_error(a),
            ]
            for i, a in enumerate(attempts)
            if isinstance(a, Mapping)
        ]
        head = ["attempt", "started", "state", "ranks", "error"]
        inside += [tag("h3", "Earlier attempts"), table(head, rows, texts=(0, 1, 2, 4))]
    if run.events:
        kept = sample_evenly(run.events, _MOST_EVENTS)
        rows = [
            [_format_elapsed(run, e), str(e.get("event", "?")).replace("_", " "), e.get("worker"),
             run.number_epoch(e).get("epoch"), _format_event_details(e)]
            for e in kept
        ]  # fmt: skip
        title = plural(len(run.events), "event")
        inside += [tag("h3", title), table(["time", "event", "worker", run.unit, "reason"], rows,
                                           texts=(0, 1, 4))]  # fmt: skip
    return section("failures", "Failures and restarts", *inside)


def render_environment(run: Run) -> Markup:
    """Return the section with the versions, host, command, seed and configuration of a run."""
    info = run.info
    versions = info.get("versions")
    pairs: list[tuple[str, Any]] = []
    if isinstance(versions, Mapping):
        pairs += [(str(name), version or "not installed") for name, version in versions.items()]
    for key in ("host", "platform", "pid", "seed"):
        if info.get(key) is not None:
            pairs.append((key, str(info[key])))
    for key in ("started", "ended"):
        if _format_time(info.get(key)) is not None:
            pairs.append((f"{key} (UTC)", _format_time(info[key])))
    records = list(run.record)
    if not pairs and records:  # if run.json is missing, use the rank records
        first = records[0]
        pairs += [("host", first.host), ("launcher", first.launcher)]
        pairs += [(key, value) for key, value in first.notes.items() if isinstance(value, str)]
    inside = [definition_list(pairs)] if pairs else []
    command = info.get("command") or next((rank.command for rank in records), "")
    if command:
        inside += [tag("h3", "Command"), tag("pre", runfile.mask_command(str(command)))]
    config = flatten(run.config)
    if config:
        rows = [(key, _shorten(value)) for key, value in config.items()]
        inside += [tag("h3", "Configuration"), definition_list(rows)]
    checkpoints = sorted(p.name for p in run.path.glob("checkpoints/*") if p.is_dir())
    files = sorted(p.name for p in run.path.iterdir() if p.is_file() and p.name[0] != ".")
    if checkpoints:
        shown = ", ".join(checkpoints[-8:])
        inside.append(collapsible(plural(len(checkpoints), "checkpoint"), tag("p", shown)))
    inside.append(collapsible(plural(len(files), "file"), tag("p", ", ".join(files))))
    return section("environment", "Environment", *inside)


def _format_duration(value: float) -> str:
    """Format the total duration of all syncs in seconds, or in milliseconds if it is short."""
    return seconds(value) if value >= 1 else f"{format_number(1000 * value)} ms"


def _format_sync_interval(run: Run) -> str | None:
    plain = to_float(run.config.get("sync_interval"))
    if plain is None:
        return None
    return f"every {run.unit}" if plain == 1 else f"every {plain:.0f} {run.unit}s"


def _format_elapsed(run: Run, event: Mapping[str, Any]) -> str | None:
    """Format the time between the start of the run and an event.

    For an event of an earlier attempt, return its date and time.
    """
    at, began = parse_time(event.get("time")), run.started
    if at is None:
        return None
    if began is None or at < began:
        return _format_time(event["time"])
    return seconds(at - began)


def _format_event_details(event: Mapping[str, Any]) -> str:
    for key in ("message", "reason", "path"):
        if event.get(key):
            return _first_line(str(event[key]))
    known = ("time", "event", "worker", "epoch")
    shown = {k: v for k, v in event.items() if k not in known}
    shown["bytes"] = _format_bytes(event.get("bytes"))
    return ", ".join(f"{k} {v}" for k, v in shown.items() if v is not None)


def _first_line(text: str, most: int = 160) -> str:
    line = text.strip().partition("\n")[0]
    return line if len(line) <= most else f"{line[: most - 1]}…"


def _format_error(attempt: Mapping[str, Any]) -> str | None:
    error = attempt.get("error")
    if not isinstance(error, Mapping):
        return None
    return _first_line(f"{error.get('type') or 'error'}: {error.get('message')}")


def _format_time(value: Any) -> str | None:
    try:
        return f"{datetime.datetime.fromisoformat(value):%Y-%m-%d %H:%M:%S}"
    except (TypeError, ValueError):
        return None


def _format_bytes(value: Any) -> str | None:
    plain = to_float(value)
    return None if plain is None else size(plain)


def _shorten(value: Any) -> str:
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= 200 else f"{text[:199]}…"
