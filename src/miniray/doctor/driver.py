"""Runs that ended without a rank to blame: their driver raised an error, or is gone itself.

The driver is the process that started the ranks: a script with a trainer, or ``miniray run``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from miniray.doctor import runfile, sites
from miniray.doctor.facts import Case
from miniray.doctor.findings import Finding, Severity, named, shortened
from miniray.doctor.model import NOWHERE, Site

_FRAME = re.compile(r'^ *File "(.+)", line (\d+), in (.+)(?:\n +(?! |File ")(.*))?$', re.MULTILINE)

_LONG_MESSAGE = 400


def explain_gone(case: Case) -> Finding | None:
    """It was killed, and its ranks went down with it: none of them says why."""
    run = case.run.run
    pid = run.get("pid")
    if runfile.state_of(run) != "died" or any(f.record.pid == pid for f in case):
        return None
    ends = {"" if f.record.exit is None else f.record.exit.kind for f in case}
    if "gone" not in ends or not ends <= {"gone", "finished"}:
        return None
    return Finding(
        code="driver-gone",
        severity=Severity.FAILED,
        title=f"the driver (pid {pid}) is gone, and nobody saw it end",
        evidence=_consequences(case),
        cause="SIGKILL comes from outside: the kernel's out-of-memory killer, a scheduler's limit, "
        "or a person. The ranks end with the process that started them.",
        fix="look for 'Out of memory' in `dmesg` and at the job's memory limit",
    )


def explain_error(case: Case) -> Finding | None:
    """``run.json`` says that the run failed, and why. None where it does not, or ranks live."""
    run = case.run.run
    error = run.get("error")
    if run.get("state") != "failed" or not isinstance(error, dict) or case.live:
        return None
    message = str(error.get("message") or "").strip()
    trace = str(error.get("traceback") or "")
    first_line = message.partition("\n")[0]
    site = site_in(trace)
    where = f" at {site}" if site.file else ""
    title = f"the run failed: {shortened(first_line)}"
    if error.get("type"):
        said = shortened(f"{error['type']}: {first_line}".rstrip(": "))
        title = f"the driver raised {said}{where}"
    return Finding(
        code="driver-failed",
        severity=Severity.FAILED,
        title=title,
        evidence=(*told(trace, message), *_consequences(case)),
        cause="The error is in the process that started the ranks, and in none of them.",
        fix="fix the error at that line; the whole traceback is in run.json" if trace else "",
        site=site,
    )


def _consequences(case: Case) -> tuple[str, ...]:
    ranks = [f.rank for f in case if f.record.exit is not None and f.record.exit.failed]
    if not ranks:
        return ()
    word = "a consequence" if len(ranks) == 1 else "consequences"
    return (f"{named(ranks)} ended with it: {word}",)


def site_in(trace: str) -> Site:
    """Of a traceback the innermost line of the user's own code, else the innermost line."""
    return next(reversed(_frames(trace)), NOWHERE)


def told(trace: str, message: str) -> Iterator[str]:
    """The lines that raised, the user's and another's below it; a message that no title holds."""
    for frame, source in _frames(trace).items():
        yield f"{sites.short(frame)}:{frame.line} in {frame.function}: {shortened(source)}"
    if message.strip() != shortened(message).partition("\n")[0]:
        yield shortened(" ".join(message.split()), _LONG_MESSAGE)


def _frames(trace: str) -> dict[Site, str]:
    """The innermost frame and then, if that is another, the user's innermost; with their lines."""
    frames = {Site(file, int(at), name): line for file, at, name, line in _FRAME.findall(trace)}
    users = [frame for frame in frames if sites.is_users(frame.file)]
    chosen = [*list(frames)[-1:], *users[-1:]]
    return {frame: frames[frame] for frame in chosen}
