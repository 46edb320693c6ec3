"""Ranks that do not come to where the others wait: what do they do instead?"""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator, Sequence

from miniray.doctor import collectives, leaving, loop
from miniray.doctor.checks import bars
from miniray.doctor.crossed import LATE_FIX, gave_up
from miniray.doctor.facts import Case, Facts
from miniray.doctor.findings import (
    BUFFERS_STORY,
    Finding,
    Severity,
    named,
    positions,
    seconds,
    shortened,
    they,
    waiting_clause,
)
from miniray.doctor.model import BAR, Site
from miniray.doctor.sites import is_users
from miniray.doctor.waiting import BUFFERS, GRADIENTS

_END = "is the other end there? give the call a timeout"
_MOUNT = "can others read that path? look at the mount, at who serves it, at dmesg"

#: (what the path of the called line has, its function or "", what it waits for, what to do)
_CALLS = (
    (r"/queue\.py", "put", "room in a queue", "is whoever takes from it still there?"),
    (r"/queues?\.py", "", "something in a queue", "is whoever puts into it still there?"),
    (r"/multiprocessing/", "", "another process", "what is that one at? py-spy dump --pid PID"),
    (r"/subprocess\.py", "", "a child process", "what is the child at? give the call a timeout"),
    (r"/threading\.py", "join", "the end of a thread", "look where its threads are"),
    (r"/threading\.py", "", "a lock or an event", "who has the lock, or was to set the event?"),
    (r"/concurrent/futures/", "", "a future", "look where its threads are; result(timeout=...)"),
    (r"/(ssl|socket)\.py|/(http|urllib\d?|requests|httpx)/", "", "the network", _END),
)
#: (what the kernel's function has in its name, what it waits for, what to do)
_KERNEL = (
    ("lock_inode", "a lock on a file", "another process has it, see /proc/locks; try with LOCK_NB"),
    ("futex", "a lock", "who has it? one that this thread has itself must be an RLock"),
    ("nanosleep", "time to pass", "what does it wait for, in a loop? do so with a limit"),
    ("do_wait", "a child process", "what is the child at? wait with a limit"),
    ("wait_for_partner|pipe", "the other end of a pipe", _END),
    ("unix_|sk_wait|wait_woken|accept|poll", "a socket, a pipe or a terminal", _END),
    ("nfs|rpc_wait|fuse", "network storage", _MOUNT),
    ("folio|bit_wait_io|io_schedule", "storage", _MOUNT),
)


def explain_absent(case: Case, guilty: Sequence[int], waiting: Sequence[Facts]) -> Finding:
    never = [rank for rank in guilty if rank in case.never_started]
    suspects = [case.ranks[rank] for rank in guilty if rank in case.ranks]
    if never or not suspects:
        return _never_started(case, never or guilty, waiting)
    able = [f for f in suspects if not f.record.process.stopped and not f.silent]
    if len(able) == len(suspects):
        story = loop.explain(able, waiting) or collectives.explain_unsynced(able, waiting)
        if story is not None:
            return story
    suspects.sort(key=lambda f: (not f.record.process.stopped, not f.silent, not f.ended, f.rank))
    worst = suspects[0]
    alike = [f for f in suspects if _manner(f) == _manner(worst)]
    clause = waiting_clause(waiting)
    ranks = tuple(sorted(f.rank for f in alike))
    code, what, cause, fix = _manner_story(worst, waiting)
    enough = gave_up(waiting) if not worst.finished else ()
    if enough:
        fix += f"; {LATE_FIX}"
    return Finding(
        code=code,
        severity=Severity.STUCK,
        title=f"{they(what, alike)}; {clause}",
        ranks=ranks,
        evidence=(
            *positions(alike),
            *positions(waiting),
            *enough,
            *(_threads(worst) if code == "blocked" else ()),
        ),
        cause=cause,
        fix=fix,
        step=worst.record.global_step,
        site=worst.place,
    )


def explain_idle(case: Case) -> Finding | None:
    """No rank is in a collective, and none has done anything for longer than the limit."""
    live = case.live
    if not live or any(f.moved or f.idle < case.limit or f.computes for f in live):
        return None  # nobody waits, and somebody works: a long step is no hang
    worst = max(live, key=lambda f: (not _waits_unseen(f), f.idle))
    code, what, cause, fix = _manner_story(worst, ())
    alike = [f for f in live if _manner(f) == _manner(worst)]
    return Finding(
        code=code,
        severity=Severity.STUCK,
        title=they(what, alike),
        ranks=tuple(f.rank for f in alike),
        evidence=(*positions(live), *(_threads(worst) if worst.finished else ())),
        cause=cause,
        fix=fix,
        step=worst.record.global_step,
        site=worst.place,
    )


def _waits_unseen(facts: Facts) -> bool:
    """Whether it waits in torch for a message, as stages of a pipeline do: that is not recorded."""
    inner = next((frame for frame in facts.stack if "/miniray/" not in frame.file), None)
    return inner is not None and "/torch/distributed/" in inner.file


def _never_started(case: Case, never: Sequence[int], waiting: Sequence[Facts]) -> Finding:
    there = not set(never) & set(case.never_started)
    verb = "cannot be looked at: the box is damaged" if there else "never started"
    return Finding(
        code="missing-rank",
        severity=Severity.STUCK,
        title=f"{named(never)} {verb}; {waiting_clause(waiting)}",
        ranks=tuple(never),
        evidence=(
            f"world size {case.run.world_size}, boxes of {named(case.ranks)} only",
            *positions(waiting),
        ),
        cause="The others wait for all ranks to come together; a process was not launched, died "
        "before it could record anything, or has another RANK than it should.",
        fix="start as many processes as the world size says, each with its own RANK (miniray run "
        "or torchrun does)",
    )


def _manner(facts: Facts) -> tuple[object, ...]:
    record = facts.record
    return record.process.stopped, facts.silent, facts.ended, facts.place


def _manner_story(facts: Facts, waiting: Sequence[Facts]) -> tuple[str, str, str, str]:
    """(code, what the rank does, cause, fix)"""
    record, idle = facts.record, seconds(facts.idle)
    if record.process.stopped:
        return (
            "stopped",
            f"is stopped (SIGSTOP or a debugger), {idle} without a step",
            "A stopped process does nothing until it is continued.",
            f"kill -CONT {record.pid}, or end it",
        )
    if facts.finished and not waiting:
        return (
            "does-not-end",
            f"is done, but the process does not end ({idle})",
            "Something keeps the interpreter running: a thread that isn't a daemon, a loader's "
            f"worker process{', the process group' * facts.has_process_group}.",
            "end threads and pools before the script ends"
            + "; call dist.destroy_process_group()" * facts.has_process_group,
        )
    if facts.finished:
        fix = f"let all ranks make the call at {waiting[0].place}, or none of them"
        story = "It will never come to what the others wait for.", fix
        story = BUFFERS_STORY if waiting[0].wait_name == BUFFERS else story
        return "finished-early", f"finished after step {record.global_step} and left", *story
    if facts.silent:
        age = seconds(record.heartbeat_age(facts.now))
        return (
            "holds-gil",
            f"is stuck in C code that holds Python's lock{_at(facts)}, no heartbeat for {age}",
            "Not even its heartbeat thread can run: an extension does not release the GIL.",
            "look at the stack below; the innermost line calls the C code that does not return",
        )
    bar = _bar_between_barriers(facts)
    if bar is not None:
        return (
            "bar-between-barriers",
            f"is stuck at its progress bar ({bar}), made between two barriers",
            "tqdm takes a lock and writes to the terminal; between two barriers that blocks all "
            "ranks.",
            bars.FIX,
        )
    if record.section is not None:
        where = _at(facts)
        fix = "look at that line: what is it that this rank waits for, and the others do not?"
        if waiting and not any(f.wait_name == GRADIENTS for f in waiting):
            fix = "do such work before the process group exists or on all ranks, or give the "
            fix += "barrier a longer timeout"
        return (
            "slow-section",
            f"is still in {record.section.name} ({seconds(facts.until - record.section.since)}), "
            f"{'alive' * record.alive}{_busy(facts)}{',' * bool(where)}{where}",
            "The others wait until it is done. If it needs that long the limit is too short; if "
            "not, see its stack.",
            fix,
        )
    if record.phase.name == "data":
        return (
            "loader-stuck",
            f"waits for its DataLoader{_at(facts)} ({idle})",
            "The loader gives no batch: a worker process hangs (handles inherited by fork, a lock, "
            "slow storage).",
            "try num_workers=0; run doctor.check_dataset(dataset)",
        )
    if facts.computes:
        return (
            "busy",
            f"is busy{_at(facts)} ({idle}{_busy(facts)})",
            "It computes, or loops for ever, in code the others do not run.",
            "look at that line: is its end condition met on this rank?",
        )
    line = _source(facts.user_frame)
    lost = leaving.thread_error(record)
    if lost is not None:
        said = shortened(lost.op.partition("\n")[0], 60)
        return (
            "thread-lost",
            f"is blocked{_at(facts)} ({idle}), after a thread of it raised {said} at {lost.site}",
            "What it waits for was that thread's to do, and nobody does it now.",
            "fix the error at that line; let whoever waits for a thread hear of its end",
        )
    return (
        "blocked",
        f"is blocked{_at(facts)} ({idle}){f': {line}' if line else ''}",
        *_asleep(facts),
    )


def _asleep(facts: Facts) -> tuple[str, str]:
    """(cause, fix) of one that sleeps in its own code: in what?

    Only the innermost line of the user's own is the user's to change; what that called is the first
    line below it, or C code that shows in no stack. For that one the kernel names the function in
    which the main thread sleeps.
    """
    frames = facts.stack
    own = facts.user_frame
    called = frames[frames.index(own) - 1] if own in frames[1:] else None
    if called is not None:
        for path, function, what, fix in _CALLS:
            if re.search(path, called.file) and function in ("", called.function):
                return _told(what), fix
    sleeps = facts.record.process.sleeps_in
    for name, what, fix in _KERNEL:
        if re.search(name, sleeps):
            return _told(what), fix
    return (
        "It sleeps in something that is no collective: a lock, a queue, a file, the network, a "
        "child process.",
        "look at the innermost lines of its stack",
    )


def _told(what: str) -> str:
    return f"It waits for {what}, and that is no collective: the other ranks have no part in it."


def _threads(facts: Facts) -> Iterator[str]:
    """Where its threads are, but for the main one and our own."""
    for thread in facts.threads:
        frames = thread.frames
        if frames and frames[-1].function.startswith("_bootstrap") and not _is_ours(frames):
            inner = next((frame for frame in frames if is_users(frame.file)), frames[0])
            yield f"rank {facts.rank}: a thread is at {inner} in {inner.function}"


def _is_ours(frames: Sequence[Site]) -> bool:
    return any("/miniray/doctor/" in frame.file for frame in frames)


def _bar_between_barriers(facts: Facts) -> Site | None:
    """Where it makes the bar it is stuck in, if the last thing it did before was a barrier."""
    if not any("tqdm" in frame.file for frame in facts.stack):
        return None
    last = next((e for e in reversed(facts.record.events) if e.kind != BAR), None)
    return facts.user_frame if last is not None and bars.is_barrier(last) else None


def _busy(facts: Facts) -> str:
    return "" if facts.cpu is None else f", {facts.cpu:.0%} CPU"


def _at(facts: Facts) -> str:
    frame = facts.user_frame or facts.record.phase.site
    return f" at {frame} in {frame.function}" if frame.file else ""


def _source(frame: Site | None) -> str:
    """The line's text, where its file is at hand."""
    line = linecache.getline(frame.file, frame.line).strip() if frame is not None else ""
    return shortened(line, 60)
