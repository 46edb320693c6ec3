"""Waiting for results, and Ctrl-C where it does no harm.

For one result a thread reads the connection itself; for several it sleeps until enough came. Both
can be interrupted (Ctrl-C) at any moment and leave no trace of the wait then.

Python raises ``KeyboardInterrupt`` in the main thread between any two of its steps. Between reading
a result off a connection and handing it over, that would lose the result, and whoever asks for it
later would wait for ever. So while the main thread is in the engine's own bookkeeping an interrupt
is noted, and raised as soon as it waits or goes back to the user's code: some microseconds later.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` makes enums of all it returns
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from miniray.core.local.objects import FAILED, PENDING, Entry
from miniray.errors import SessionEndedError

if TYPE_CHECKING:
    from miniray.core.local.node import Node

#: Makes what is entered around a wait: a task that waits gives its CPU back meanwhile.
OnBlock = Callable[[], Any]

#: Python's own handler only sets a flag. If that happens just before the main thread goes to sleep
#: in the kernel, nothing wakes it. So the main thread never sleeps longer than this many seconds.
LONGEST_SLEEP = 0.5

_main = threading.main_thread().ident
_held = False
_noted: Callable[[int, Any], Any] | None = None


def check_open(node: Node) -> None:
    """``SessionEndedError`` where nothing can be asked of ``node`` any more."""
    if node.closing:
        raise SessionEndedError(
            "this miniray session has ended (or belongs to the process this one was forked "
            "from): call miniray.init() and create what you need again"
        )


def wait_for_one(node: Node, entry: Entry, deadline: float | None, on_block: OnBlock) -> None:
    """Wait until ``entry`` has an outcome, or the deadline is past."""
    held = hold_interrupts()
    try:
        if node.dirty:
            node.flush_calls()
        with on_block():
            channel = entry.channel
            if (
                channel is not None
                and channel.lead_until(entry, deadline)
                and (entry.state != PENDING or (deadline and time.monotonic() >= deadline))
            ):
                return
            wait_for_many(node, [entry], 1, deadline, contextlib.nullcontext, stop_on_failure=True)
    finally:
        if held:
            release_interrupts()


def wait_for_many(
    node: Node,
    entries: Sequence[Entry],
    count: int,
    deadline: float | None,
    on_block: OnBlock,
    *,
    stop_on_failure: bool,
) -> None:
    """Wait until ``count`` of ``entries`` have an outcome, or (optionally) one failed."""
    pending = [entry for entry in entries if entry.state == PENDING]
    missing = count - (len(entries) - len(pending))
    failed = stop_on_failure and any(entry.state == FAILED for entry in entries)
    if missing <= 0 or failed:
        return
    held = hold_interrupts()
    done = threading.Lock()
    done.acquire()
    lock = threading.Lock()
    left = missing

    def notify(entry: Entry) -> None:
        nonlocal left
        with lock:
            left -= 1
            finished = left == 0 or (stop_on_failure and entry.state == FAILED)
            if finished and done.locked():
                done.release()

    waiters = [(entry, partial(notify, entry)) for entry in pending]
    try:
        node.flush_calls()
        for entry, waiter in waiters:
            node.fetch(entry)
            entry.add_waiter(waiter)
        with on_block():
            _sleep_until(done, deadline)
    finally:
        for entry, waiter in waiters:
            if entry.state == PENDING:
                entry.remove_waiter(waiter)
        if held:
            release_interrupts()
    check_open(node)


def _sleep_until(done: threading.Lock, deadline: float | None) -> None:
    """Until ``done`` is released or the deadline is past; an interrupt comes through."""
    paused = pause_interrupts()
    longest = LONGEST_SLEEP if paused else threading.TIMEOUT_MAX
    try:
        while True:
            left = longest if deadline is None else deadline - time.monotonic()
            if done.acquire(timeout=min(longest, max(0.0, left))):
                return
            if deadline is not None and time.monotonic() >= deadline:
                return
    finally:
        if paused:
            resume_interrupts()


# -- interrupts ------------------------------------------------------------------------------------


class _Guard:
    """A handler for SIGINT that calls the user's, later if need be."""

    def __init__(self, handler: Callable[[int, Any], Any]) -> None:
        self.handler = handler

    def __call__(self, signum: int, frame: Any) -> None:
        global _noted
        if _held:
            _noted = self.handler
        else:
            self.handler(signum, frame)


def hold_interrupts() -> bool:
    """True when ``release_interrupts`` must follow: in the main thread, the first time."""
    global _held
    if _held or threading.get_ident() != _main:
        return False
    # Looked at each time: notebooks install a handler of their own for every cell.
    handler: Any = _signal.getsignal(_signal.SIGINT)
    if type(handler) is not _Guard and callable(handler):
        _signal.signal(_signal.SIGINT, _Guard(handler))
    _held = True
    return True


def release_interrupts() -> None:
    """Let interrupts through again; one that came meanwhile is raised here."""
    global _held, _noted
    _held = False
    if _noted is not None:
        handler, _noted = _noted, None
        handler(_signal.SIGINT, sys._getframe())


def pause_interrupts() -> bool:
    """Let interrupts through while waiting. True when ``resume_interrupts`` must follow."""
    if not _held or threading.get_ident() != _main:
        return False
    release_interrupts()
    return True


def resume_interrupts() -> None:
    global _held
    _held = True


def restore_handler() -> None:
    """Give the user's handler its place back, at the end of a session."""
    handler: Any = _signal.getsignal(_signal.SIGINT)
    if type(handler) is _Guard and threading.get_ident() == _main:
        _signal.signal(_signal.SIGINT, handler.handler)


def _after_fork() -> None:
    global _main, _held, _noted
    _main = threading.main_thread().ident
    _held, _noted = False, None  # the state of a thread that is not there


os.register_at_fork(after_in_child=_after_fork)
