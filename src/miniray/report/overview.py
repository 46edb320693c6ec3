"""Render the top of the page: the name and state of the run, the verdict and the key figures."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence

from miniray.doctor.diagnose import Diagnosis
from miniray.doctor.findings import Finding, Severity, plural, seconds, size
from miniray.report.html import (
    Markup,
    collapsible,
    format_number,
    render_code_spans,
    section,
    tag,
)
from miniray.report.run import Run
from miniray.report.series import Curve, find_unit, is_higher_better, to_float
from miniray.runs import files

_CLASSES = {
    Severity.FAILED: "bad",
    Severity.STUCK: "bad",
    Severity.WRONG: "warn",
    Severity.SLOW: "warn",
    Severity.NOTE: "",
}


def render_header(run: Run) -> Markup:
    """Return the header of the page.

    The header shows the name and the state of the run. A second line shows the type of the run, the
    number of ranks, the duration and the start time.
    """
    parts = [run.kind]
    if run.world_size:
        parts.append(plural(run.world_size, "worker" if "trainer" in run.config else "rank"))
    backend = run.config.get("backend")
    parts.append(f"{backend} engine" if isinstance(backend, str) else "")
    duration, started = run.seconds, run.started
    parts.append(f"{seconds(duration)}" if duration is not None else "")
    if started is not None:
        moment = datetime.datetime.fromtimestamp(started, datetime.timezone.utc)
        parts.append(f"{moment:%Y-%m-%d %H:%M} UTC")
    badge = tag("span", run.state, cls=f"badge {run.state}")
    lines = [tag("p", " · ".join(part for part in parts if part))]
    reason = run.info.get("stop_reason")
    if isinstance(reason, str) and reason:
        lines.append(tag("p", f"Stopped early: {reason}"))
    return tag("header", tag("h1", run.name, badge), *lines)


# -- tiles ----------------------------------------------------------------------------------------


def render_tiles(run: Run, curves: Sequence[Curve]) -> Markup:
    """Return the tiles with the epochs, best scores, steps, throughput and memory of a run.

    If a metric was also computed on held-out data, only that version is shown. For example, if both
    ``loss`` and ``val_loss`` exist, the tile shows ``val_loss``.
    """
    tiles: list[tuple[str, str, str]] = []
    if run.metrics:
        title, count, notes = f"{run.unit}s recorded", len(run.metrics), []
        if find_unit(run.metrics) == "epoch":
            epochs = [to_float(record.get("epoch")) for record in run.epochs]
            done = {epoch for epoch in epochs if epoch is not None}
            title, count = f"{run.unit}s", len(done)
            if done and (min(done), max(done)) != (1, count):  # a script may count from 0
                notes = [f"{format_number(min(done))} to {format_number(max(done))}"]
        if run.seconds is not None:
            resumed = "last attempt: " if run.info.get("attempts") else ""
            notes.append(f"{resumed}{seconds(run.seconds)}")
        tiles.append((title, f"{count:,}", ", ".join(notes)))
    groups = {curve.group for curve in curves if curve.group != curve.name}
    single = [curve for curve in curves if curve.name not in groups]
    known = [c for c in single if "loss" in c.name.lower() or is_higher_better(c.name)]
    # Nested fields, such as timing.reward, are details even if their names look like scores.
    known = [c for c in known if "." not in c.name] or known
    known.sort(key=lambda c: (c.group == c.name, not is_higher_better(c.name)))
    for curve in known[:3]:
        best = curve.best
        if best is not None:
            note = f"best, {run.axis} {format_number(best[0])}"
            tiles.append((curve.name, format_number(best[1]), note))
    if not known:  # it isn't known whether higher or lower values are better
        tiles += [(c.name, format_number(c.points[-1][1]), "last value") for c in single[:3]]
    steps = [rank.global_step for rank in run.record]
    if any(steps) and run.unit != "step":
        low, high = min(steps), max(steps)
        tiles.append(("steps", f"{low:,}" if low == high else f"{low:,}–{high:,}", "per rank"))
    rate = _get_throughput(run)
    if rate:
        tiles.append(("samples", format_number(rate), "per second, all ranks"))
    peak = max((rank.peak_rss for rank in run.record), default=0)
    if peak:
        tiles.append(("peak memory", size(peak), "largest rank"))
    elements = [
        tag("div", tag("span", name), tag("b", value), tag("span", note), cls="tile")
        for name, value, note in tiles
    ]
    return tag("div", *elements, cls="tiles") if elements else Markup()


def _get_throughput(run: Run) -> float | None:
    """Return the average number of samples per second.

    Only epochs with a recorded number of samples and a recorded duration are considered.
    """
    samples = duration = 0.0
    for record in run.metrics:
        count, spent = to_float(record.get("num_samples")), to_float(record.get("seconds"))
        if count and spent and spent > 0:
            samples, duration = samples + count, duration + spent
    return samples / duration if duration else None


# -- the verdict ----------------------------------------------------------------------------------


def render_verdict(run: Run, diagnosis: Diagnosis, curves: Sequence[Curve]) -> Markup:
    """Return a box that shows the outcome of the run.

    The box contains the findings of the doctor and the error in ``run.json``. The heading
    shows the finding or the error, whichever is more severe. If findings were saved while the ranks
    were running, they are shown instead of the findings from the current files.
    """
    findings = _read_saved_findings(run) or list(_current_findings(run, diagnosis))
    error = _render_error(run)
    if findings and (findings[0].severity.ends_run or error is None):
        kind = _CLASSES[findings[0].severity]
        rendered = [_render_finding(finding, "h3") for finding in findings[1:]]
        first = _render_finding(findings[0], "h2")
        details = []
        if error is not None:
            details = [tag("p", tag("b", "Error: "), error[1]), *error[2]]
        inside = [first, *rendered, *details]
    elif error is not None:
        kind, heading, details = error
        rendered = [_render_finding(finding, "h3") for finding in findings]
        inside = [tag("h2", heading), *details, *rendered]
    elif diagnosis.readable and run.state in ("finished", "running"):
        kind, heading, text = _describe_success(run, diagnosis, curves)
        inside = [tag("h2", heading), tag("p", text, cls="soft")]
    else:
        return Markup()
    classes = f"alert {kind}".strip()
    return tag("section", *inside, *_render_saved_text(run), id="verdict", cls=classes)


def _render_error(run: Run) -> tuple[str, str, list[Markup]] | None:
    """Return the CSS class, the heading and the details of the error that ended the run.

    Return None if the run didn't end with an error.
    """
    error = run.info.get("error")
    if run.state == "died" and not error:
        text = (
            "The process ended without recording an exit status. It was killed, or the machine "
            "went down."
        )
        return "bad", "The run died", [tag("p", text)]
    if not isinstance(error, dict):
        return None
    kind, message = str(error.get("type") or ""), str(error.get("message") or "").strip()
    if run.state == "interrupted":
        return "warn", "Interrupted", [tag("p", message or "The run was stopped with Ctrl-C.")]
    if run.state == "preempted" and not kind:
        return "warn", "Preempted", [tag("p", message)]
    lines = message.splitlines() or [""]
    remote = str(error.get("remote_traceback") or "").rstrip()
    heading = ": ".join(part for part in (kind, lines[0]) if part)
    details: list[Markup] = []
    if remote:  # its last line is the exception that the user's code raised
        heading = remote.rpartition("\n")[2]
        details.append(tag("p", lines[0], cls="soft"))
        details.append(collapsible("Traceback of the worker", tag("pre", remote)))
    elif len(lines) > 1:
        details.append(tag("pre", "\n".join(lines[1:])))
    if error.get("traceback"):
        details.append(collapsible("Traceback", tag("pre", str(error["traceback"]).rstrip())))
    return "bad", heading or "The run failed", details


def _describe_success(
    run: Run, diagnosis: Diagnosis, curves: Sequence[Curve]
) -> tuple[str, str, str]:
    """Return the CSS class, the heading and the text for a run without findings.

    The doctor checks losses only if the ranks record steps. Therefore, this function also checks
    whether the metrics contain values that aren't finite.
    """
    ranks = plural(len(diagnosis.case.ranks), "rank")
    broken = [(x, curve.name, y) for curve in curves for x, y in curve.broken]
    if not broken:
        return "good", "Healthy", f"The doctor checked {ranks} and found no problems."
    x, name, y = min(broken, key=lambda point: point[0])
    count = plural(len(broken), "non-finite value")
    heading = f"{name} was {y} at {run.axis} {format_number(x)}"
    text = f"The metrics contain {count}. The doctor found no other problems on {ranks}."
    return "warn", heading, text


def _current_findings(run: Run, diagnosis: Diagnosis) -> Iterator[Finding]:
    if not diagnosis.readable:
        return
    ended = run.state in ("finished", "failed", "interrupted", "preempted")
    for finding in (*diagnosis.findings, *diagnosis.notes):
        if ended and finding.severity is Severity.STUCK:
            continue  # the ranks are only waiting for a driver that has finished
        yield finding


def _read_saved_findings(run: Run) -> list[Finding]:
    """Return the findings in ``doctor.json``.

    Return [] if the run has finished, because the findings then belong to an earlier attempt.
    """
    if run.state == "finished":
        return []
    try:
        saved = files.read_json(run.path / "doctor.json")[0]
        return [
            Finding(
                code=str(f["code"]),
                severity=Severity[str(f["severity"]).upper()],
                title=str(f["title"]),
                evidence=tuple(map(str, f["evidence"])),
                cause=str(f["cause"]),
                fix=str(f["fix"]),
            )
            for f in (*saved["findings"], *saved["notes"])
        ]
    except (KeyError, TypeError):
        return []


def _render_finding(finding: Finding, heading: str) -> Markup:
    word = "" if finding.severity is Severity.NOTE else f"{finding.severity.word}: "
    parts = [tag(heading, render_code_spans(f"{word}{finding.title}"))]
    if finding.evidence:
        lines = (tag("li", render_code_spans(line)) for line in finding.evidence)
        parts.append(tag("ul", *lines, cls="soft"))
    if finding.cause:
        parts.append(tag("p", tag("b", "Cause: "), render_code_spans(finding.cause)))
    if finding.fix:
        parts.append(tag("p", tag("b", "Fix: "), render_code_spans(finding.fix)))
    return tag("div", *parts, cls="finding")


def _render_saved_text(run: Run) -> list[Markup]:
    """Return the text of the saved diagnosis, which includes the stack traces of the ranks."""
    try:
        text = files.read_text(run.path / "doctor.txt")
    except OSError:
        return []
    return [collapsible("Diagnosis with stack traces", tag("pre", text.rstrip()[:40_000]))]


def render_damaged_files(run: Run) -> Markup:
    """Return the section that lists the files that can't be read, with the reason for each file."""
    damaged = {**run.record.damaged, **run.damaged}
    rows = [tag("li", tag("code", name), f": {why}") for name, why in damaged.items()]
    return section("damaged", "Unreadable files", tag("ul", *rows)) if rows else Markup()
