"""Runs that ended badly: which rank was first, and who only went down with it?

Where no rank is to blame, the driver is: the process that started them, a script with a trainer or
``miniray run``, raised an error, or is gone itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from miniray.doctor import sites
from miniray.doctor.facts import Case, Facts
from miniray.doctor.findings import Finding, Severity, named, plural, positions, shortened, size
from miniray.doctor.model import NOWHERE, Exit, Site
from miniray.doctor.waiting import in_words
from miniray.runs import files
from miniray.runs.run_info import get_state

_CRASHES = {"SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGABRT"}
#: What torch says first of an error in a loader's process; the error itself comes last.
_LOST_WORKER = "DataLoader worker (pid"
#: Where in C++ a message comes from: a path of the machine that torch was built on.
_IN_C = re.compile(r"^\[(enforce fail at )?\S+:\d+\] ")
#: What gloo says when two ranks' calls meet that do not match.
_MISMATCH = "data size doesn't match"
_TAIL = 8192  # bytes of a log
_IN_WORKER = re.compile(r"Caught \w+ in (DataLoader worker process \d+)")
_FRAME = re.compile(r'^ *File "(.+)", line (\d+), in (.+)(?:\n +(?! |File ")(.*))?$', re.MULTILINE)

_LONG_MESSAGE = 400


def explain(case: Case) -> Finding | None:
    """The first failure that no other one caused; None where no rank failed of itself."""
    return _of([facts for facts in case if facts.failed], case)


def explain_any(case: Case) -> Finding | None:
    """The first exception of all, although it looks like a consequence: nobody caused it."""
    raised = [f for f in case if f.record.exit is not None and f.record.exit.kind == "exception"]
    return _of(raised, case)


def _of(failed: Sequence[Facts], case: Case) -> Finding | None:
    if not failed:
        return None
    first = min(failed, key=_when)
    together = [f for f in failed if f is first or _same(f, first)]
    ended = first.end
    what, cause, fix = _story(first)
    ranks = tuple(sorted(f.rank for f in together))
    others = [f for f in case if f not in together]
    evidence = [_evidence(first)]
    if ended.traceback:
        in_worker = _IN_WORKER.match(ended.message)
        evidence += _told(ended.traceback, "" if in_worker else _IN_C.sub("", ended.message))
    words = _last_words(first)
    if words:
        evidence.append(f"its log ends with: {shortened(words, 200)}")
        evidence += positions(f for f in others if f.wait is not None)
    consequences = [f.rank for f in others if f.consequence or f.wait is not None]
    if consequences:
        state = "was" if len(consequences) == 1 else "were"
        evidence.append(
            f"{named(consequences)} {state} waiting for {'it' if len(ranks) == 1 else 'them'}: "
            f"{'a consequence' if len(consequences) == 1 else 'consequences'}"
        )
    later = [f for f in others if f.failed]
    if later:
        evidence.append(f"{named(f.rank for f in later)} failed after that")
    return Finding(
        code=_code(first),
        severity=Severity.FAILED,
        title=f"{named(ranks)} {what}",
        ranks=ranks,
        evidence=tuple(evidence),
        cause=cause,
        fix=fix,
        step=first.record.global_step,
        site=_site(ended),
    )


def _when(facts: Facts) -> tuple[bool, float, int]:
    """By time. A process nobody saw end comes last: the others' launcher may have ended it."""
    ended = facts.end
    return ended.kind == "gone", ended.at or facts.record.heartbeat, facts.rank


def _same(one: Facts, two: Facts) -> bool:
    a, b = one.end, two.end
    alike = (a.kind, a.type, a.signal, a.code, a.site) == (b.kind, b.type, b.signal, b.code, b.site)
    return alike and a.kind in ("exception", "exit", "code")


def _code(facts: Facts) -> str:
    if _out_of_memory(facts.end):
        return "out-of-memory"
    if _MISMATCH in _last_words(facts):
        return "mismatch"
    kinds = {"exception": "exception", "signal": "killed", "gone": "killed"}
    return kinds.get(facts.end.kind, "exit")


def _out_of_memory(ended: Exit) -> bool:
    return ended.kind == "exception" and (
        ended.type.rpartition(".")[2] in ("MemoryError", "OutOfMemoryError")
        or "out of memory" in ended.message.lower()
        or "can't allocate memory" in ended.message.lower()
    )


def _story(facts: Facts) -> tuple[str, str, str]:
    """(what happened, after "rank r"; cause; fix)"""
    record, ended = facts.record, facts.end
    memory = f"{size(record.rss)} resident, {size(record.peak_rss)} at most"
    if ended.kind == "exception":
        said, where = _raised(ended)
        if ended.type == "BdbQuit" or ended.message == "EOF when reading a line":
            stopped = ended.type == "BdbQuit"
            what, word = ("stopped at a", "breakpoint") if stopped else ("asked for", "input")
            return (
                f"{what} {word}{where}, and nobody is there to answer it",
                "The ranks of a launcher have no terminal: what they read is at its end at once.",
                f"take the {word} out; or run the script in one process, with `python`",
            )
        if "address already in use" in ended.message:
            return (
                f"raised {said}{where}",
                "The port on which the ranks meet (MASTER_PORT) belongs to another process.",
                "another --master-port, or none: a free one is chosen then",
            )
        if ended.message.startswith(_LOST_WORKER):  # said in whatever line the signal came
            return (
                f"lost a loader's process: {said}",
                "Killed: by the kernel, for memory. Bus error: /dev/shm is full. Segmentation "
                "fault: C code that the dataset uses has crashed.",
                "fewer workers or less prefetching; a larger /dev/shm; num_workers=0 to see where",
            )
        if _out_of_memory(ended):
            return (
                f"ran out of memory{where} ({memory}): {said}",
                "The process asked for more memory than it may have.",
                "a smaller batch, fewer loader workers, or a higher memory limit",
            )
        return (
            f"raised {said}{where}",
            "The exception is the root cause; what the other ranks say about connections or "
            "time-outs only follows from it.",
            f"fix the error at that line; the whole traceback is in {_output_of(facts)}",
        )
    if ended.kind in ("signal", "gone"):
        if ended.signal == "SIGKILL" or ended.kind == "gone":
            how = "was killed by SIGKILL" if ended.signal else "is gone, and nobody saw it end"
            return (
                f"{how} at step {record.global_step} ({memory})",
                "SIGKILL comes from outside: the kernel's out-of-memory killer, a scheduler's "
                "limit, or a person.",
                "look for 'Out of memory' in `dmesg` and at the job's memory limit; compare with "
                "the memory column",
            )
        if ended.signal in _CRASHES and record.phase.name == "exit":
            return (
                f"crashed with {ended.signal} after the script's end, at step {record.global_step}",
                "Code in C was still running when Python ended: a thread"
                f"{', the process group' * facts.has_process_group}.",
                f"{'call dist.destroy_process_group() and ' * facts.has_process_group}"
                "end threads before the script ends",
            )
        if ended.signal in _CRASHES:
            call = record.waiting
            where = f" in {in_words(call)}" if call is not None else _last_place(facts)
            if _MISMATCH in _last_words(facts):
                return (
                    f"crashed at step {record.global_step}{where}: what it received has another "
                    "size than it asked for",
                    "The ranks were in different collectives, or in one with other sizes; gloo "
                    "ends the process that notices.",
                    "compare what the ranks call there: a call in a branch, a size that differs?",
                )
            return (
                f"crashed with {ended.signal} at step {record.global_step}{where}",
                "C code (an extension, a library, CUDA) crashed; Python had no chance to say why.",
                "run with PYTHONFAULTHANDLER=1; try num_workers=0 and one rank; look at versions "
                "of compiled packages",
            )
        return (
            f"was ended by {ended.signal} at step {record.global_step}",
            "The signal came from outside the run.",
            "see who sent it: a scheduler, a time limit, a person",
        )
    code = "?" if ended.code is None else ended.code
    where = f" at {ended.site}" if ended.site.file else _last_place(facts)
    said = f": {shortened(ended.message.partition(chr(10))[0])}" if ended.message else ""
    return (
        f"exited with code {code} at step {record.global_step}{where}{said}",
        "The process ended itself (sys.exit, os._exit) or a library did, without an exception.",
        f"look at the last lines of {_output_of(facts)}",
    )


def _last_words(facts: Facts) -> str:
    """What C++ said before it ended the process, in the rank's log; "" where it said nothing."""
    if facts.end.signal != "SIGABRT":
        return ""
    lines = files.read_last_lines(facts.record.path.with_suffix(".log"), _TAIL)
    text = b"\n".join(lines).decode(errors="replace")
    said = text.rpartition("what():")[2].strip() if "what():" in text else ""
    return _IN_C.sub("", said.partition("\n")[0])


def _raised(ended: Exit) -> tuple[str, str]:
    """(type and first line of the message, where it was raised); of a loader's worker its own."""
    site = _site(ended)
    where = f" at {site}" if site.file else ""
    worker = _IN_WORKER.match(ended.message)
    if worker is not None:
        return shortened(ended.traceback.rstrip().rpartition("\n")[2]), f"{where} in {worker[1]}"
    first_line = _IN_C.sub("", ended.message.strip()).partition("\n")[0]
    return shortened(f"{ended.type}: {first_line}".rstrip(": ")), where


def _site(ended: Exit) -> Site:
    return site_in(ended.traceback) if _IN_WORKER.match(ended.message) else ended.site


def _last_place(facts: Facts) -> str:
    site = facts.record.phase.site
    return f", last seen at {site} ({facts.record.phase.name})" if site.file else ""


def _evidence(facts: Facts) -> str:
    record = facts.record
    log = record.path.with_suffix(".log")
    where = f", log {log.name}" if log.exists() else ""
    taken = plural(record.batches, "batch")
    return f"rank {record.rank}: pid {record.pid}, step {record.global_step}, {taken} taken{where}"


def _output_of(facts: Facts) -> str:
    """Where ranks' output is not kept in the run directory, their driver knows it."""
    if facts.record.path.with_suffix(".log").exists():
        return "the rank's log"
    return "run.json" if facts.record.launcher == "miniray" else "its launcher's output"


# -- the driver -----------------------------------------------------------------------------------


def explain_driver_gone(case: Case) -> Finding | None:
    """It was killed, and its ranks went down with it: none of them says why."""
    run = case.run.run
    pid = run.get("pid")
    if get_state(run) != "died" or any(f.record.pid == pid for f in case):
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


def explain_driver_error(case: Case) -> Finding | None:
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
        evidence=(*_told(trace, message), *_consequences(case)),
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


def _told(trace: str, message: str) -> Iterator[str]:
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
