"""Waiting for results: for one, reading its connection oneself; for several, until enough came.

Both can be interrupted (Ctrl-C) at any moment and leave no trace of the wait then.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from miniray.core.local import interrupts
from miniray.core.local.node import Node
from miniray.core.local.objects import FAILED, PENDING, Entry
from miniray.errors import SessionEndedError

#: Makes what is entered around a wait: a task that waits gives its CPU back meanwhile.
OnBlock = Callable[[], Any]


def check_open(node: Node) -> None:
    """``SessionEndedError`` where nothing can be asked of ``node`` any more."""
    if node.closing:
        raise SessionEndedError(
            "this miniray session has ended (or belongs to the process this one was forked "
            "from): call miniray.init() and create what you need again"
        )


def wait_for_one(node: Node, entry: Entry, deadline: float | None, on_block: OnBlock) -> None:
    """Wait until ``entry`` has an outcome, or the deadline is past."""
    held = interrupts.hold()
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
            interrupts.release()


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
    held = interrupts.hold()
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
            interrupts.release()
    check_open(node)


def _sleep_until(done: threading.Lock, deadline: float | None) -> None:
    """Until ``done`` is released or the deadline is past; an interrupt comes through."""
    paused = interrupts.pause()
    longest = interrupts.LONGEST_SLEEP if paused else threading.TIMEOUT_MAX
    try:
        while True:
            left = longest if deadline is None else deadline - time.monotonic()
            if done.acquire(timeout=min(longest, max(0.0, left))):
                return
            if deadline is not None and time.monotonic() >= deadline:
                return
    finally:
        if paused:
            interrupts.resume()
