"""A rank that sleeps in its own code: in what? What its line called tells, or the kernel does.

Only the innermost line of the user's own is the user's to change; what that called is the first
line below it, or C code that shows in no stack. For that one the kernel names the function in which
the main thread sleeps.
"""

from __future__ import annotations

import re

from miniray.doctor.facts import Facts

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


def story(facts: Facts) -> tuple[str, str]:
    """(cause, fix)"""
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
