"""The top of the page: what ran, how it ended, figures at a glance, and what is wrong with it."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence

from miniray.doctor.diagnose import Diagnosis
from miniray.doctor.findings import Finding, Severity, plural, seconds, size
from miniray.report.html import Markup, folded, section, short, tag
from miniray.report.run import Run
from miniray.report.series import Curve, axis, more_is_better, number
from miniray.runs import files

_KINDS = {
    Severity.FAILED: "bad",
    Severity.STUCK: "bad",
    Severity.WRONG: "warn",
    Severity.SLOW: "warn",
    Severity.NOTE: "",
}


def head(run: Run) -> Markup:
    """Name, state, and one line that says what it was."""
    parts = [run.kind]
    if run.world_size:
        parts.append(plural(run.world_size, "worker" if "trainer" in run.config else "rank"))
    backend = run.config.get("backend")
    parts.append(f"{backend} engine" if isinstance(backend, str) else "")
    taken, started = run.seconds, run.started
    parts.append(f"{seconds(taken)}" if taken is not None else "")
    if started is not None:
        moment = datetime.datetime.fromtimestamp(started, datetime.timezone.utc)
        parts.append(f"{moment:%Y-%m-%d %H:%M} UTC")
    badge = tag("span", run.state, cls=f"badge {run.state}")
    said = [tag("p", " · ".join(part for part in parts if part))]
    reason = run.info.get("stop_reason")
    if isinstance(reason, str) and reason:
        said.append(tag("p", f"Stopped early: {reason}"))
    return tag("header", tag("h1", run.name, badge), *said)


def tiles(run: Run, curves: Sequence[Curve]) -> Markup:
    """A handful of figures: scores first, and of a metric with a held-out twin the twin alone."""
    found: list[tuple[str, str, str]] = []
    if run.metrics:
        title, count, notes = f"{run.unit}s recorded", len(run.metrics), []
        if axis(run.metrics) == "epoch":
            done = {n for record in run.metrics if (n := number(record.get("epoch"))) is not None}
            title, count = f"{run.unit}s", len(done)
            # Some count from 0, as trainers do, and some from 1: "best, epoch 7" needs to know.
            notes = [f"{short(min(done))} to {short(max(done))}"] if count > 1 else []
        if run.seconds is not None:
            resumed = "the last attempt " if run.info.get("attempts") else ""
            notes.append(f"{resumed}in {seconds(run.seconds)}")
        found.append((title, f"{count:,}", ", ".join(notes)))
    groups = {curve.group for curve in curves if curve.group != curve.name}
    single = [curve for curve in curves if curve.name not in groups]
    known = [c for c in single if "loss" in c.name.lower() or more_is_better(c.name)]
    # Fields of a group, as timing.reward, are details whatever they are called.
    known = [c for c in known if "." not in c.name] or known
    known.sort(key=lambda c: (c.group == c.name, not more_is_better(c.name)))
    for curve in known[:3]:
        best = curve.best
        if best is not None:
            where = f"best, {run.unit} {short(best[0])}"
            found.append((curve.name, short(best[1]), where))
    if not known:  # nobody knows what would be good
        found += [(c.name, short(c.points[-1][1]), "last") for c in single[:3]]
    steps = [rank.step for rank in run.record]
    if any(steps) and run.unit != "step":
        low, high = min(steps), max(steps)
        shown = f"{low:,}" if low == high else f"{low:,}–{high:,}"
        found.append(("steps", shown, "a rank"))
    rate = _rate(run)
    if rate:
        found.append(("samples", short(rate), "a second, all ranks"))
    peak = max((rank.peak_rss for rank in run.record), default=0)
    if peak:
        found.append(("memory", size(peak), "most of a rank"))
    inside = [
        tag("div", tag("span", name), tag("b", value), tag("span", note), cls="tile")
        for name, value, note in found
    ]
    return tag("div", *inside, cls="tiles") if inside else Markup()


def _rate(run: Run) -> float | None:
    """Samples a second over all epochs that say how many they had and how long they took."""
    total = spent = 0.0
    for record in run.metrics:
        count, taken = number(record.get("num_samples")), number(record.get("seconds"))
        if count and taken and taken > 0:
            total, spent = total + count, spent + taken
    return total / spent if spent else None


def failure(run: Run) -> Markup:
    """Why the run ended, in its driver's own words."""
    error = run.info.get("error")
    if run.state == "died" and not error:
        text = "Its process is gone and wrote no end: it was killed, or the machine stopped."
        return tag("section", tag("h2", "The run died"), tag("p", text), cls="alert bad")
    if not isinstance(error, dict):
        return Markup()
    kind, message = str(error.get("type") or ""), str(error.get("message") or "").strip()
    if run.state == "interrupted":
        said = message or "by Ctrl-C"
        return tag("section", tag("p", tag("b", "Interrupted. "), said), cls="alert warn slim")
    lines = message.splitlines() or [""]
    remote = str(error.get("remote_traceback") or "").rstrip()
    title = ": ".join(part for part in (kind, lines[0]) if part)
    if remote:  # it ends with the exception of the user
        title = remote.rpartition("\n")[2]
    inside = [tag("h2", title or "failed")]
    if remote:
        inside.append(tag("p", lines[0], cls="soft"))
        inside.append(folded("traceback of the worker", tag("pre", remote)))
    elif len(lines) > 1:
        inside.append(tag("pre", "\n".join(lines[1:])))
    if error.get("traceback"):
        inside.append(folded("traceback", tag("pre", str(error["traceback"]).rstrip())))
    return tag("section", *inside, cls="alert bad")


def findings(run: Run, found: Diagnosis, curves: Sequence[Curve]) -> Markup:
    """What the doctor says: at the moment the run was ended where it was asked then, else now."""
    if not found.readable:
        return Markup()
    shown = _kept(run) or list(_worth(run, found))
    if not shown and (run.state not in ("finished", "running") or run.info.get("error")):
        return Markup()  # why it ended stands above, and there is nothing to add
    if not shown:
        kind, first = "good", "The doctor says: healthy."
        text = f" {plural(len(found.case.ranks), 'rank')} looked at, nothing found."
        broken = [(x, curve.name, y) for curve in curves for x, y in curve.broken]
        if broken:  # a worker whose steps nobody sees returned it
            x, name, y = min(broken, key=lambda point: point[0])
            kind, first = "warn", f"{name} was {y} in {run.unit} {short(x)}."
            text = f" {plural(len(broken), 'value')} in metrics.jsonl not finite;{text}"
        said = tag("p", tag("b", first), tag("span", text, cls="soft"))
        return tag("section", said, *_kept_text(run), cls=f"alert {kind} slim")
    kind = _KINDS[shown[0].severity]
    inside = [tag("div", *_finding(finding), cls="finding") for finding in shown]
    return tag(
        "section", tag("h2", "Doctor"), *inside, *_kept_text(run), cls=f"alert {kind}".strip()
    )


def _worth(run: Run, found: Diagnosis) -> Iterator[Finding]:
    over = run.state in ("finished", "failed", "interrupted")
    for finding in (*found.findings, *found.notes):
        if over and finding.severity is Severity.STUCK:
            continue  # its ranks wait for a driver that is done
        yield finding


def _kept(run: Run) -> list[Finding]:
    """Findings of ``doctor.json``, made while the ranks were there; none of an old attempt."""
    if run.state == "finished":
        return []
    try:
        said = files.read_json(run.path / "doctor.json")[0]
        return [
            Finding(
                code=str(f["code"]),
                severity=Severity[str(f["severity"]).upper()],
                title=str(f["title"]),
                evidence=tuple(map(str, f["evidence"])),
                cause=str(f["cause"]),
                fix=str(f["fix"]),
            )
            for f in (*said["findings"], *said["notes"])
        ]
    except (KeyError, TypeError):
        return []


def _finding(finding: Finding) -> Iterator[Markup]:
    word = "" if finding.severity is Severity.NOTE else f"{finding.severity.word}: "
    yield tag("p", tag("b", f"{word}{finding.title}"))
    if finding.evidence:
        yield tag("ul", *(tag("li", line) for line in finding.evidence), cls="soft")
    if finding.cause:
        yield tag("p", tag("b", "Cause. "), finding.cause)
    if finding.fix:
        yield tag("p", tag("b", "What to do. "), finding.fix)


def _kept_text(run: Run) -> list[Markup]:
    """The same as it was printed, with the stacks of the ranks."""
    try:
        text = files.read_text(run.path / "doctor.txt")
    except OSError:
        return []
    return [folded("as it was printed, with stacks", tag("pre", text.rstrip()[:40_000]))]


def damaged(run: Run) -> Markup:
    """Files that could not be read: said, not passed over."""
    found = {**run.record.damaged, **run.damaged}
    rows = [tag("li", tag("code", name), f": {why}") for name, why in found.items()]
    return section("Could not be read", tag("ul", *rows)) if rows else Markup()
