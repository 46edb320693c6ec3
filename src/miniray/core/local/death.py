"""Saying how a process ended: exit code or signal by name, and its last words."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from miniray.core.local.objects import Blob
from miniray.errors import ActorDiedError

if TYPE_CHECKING:
    from miniray.core.local.node import Node

#: Wait status of a worker that was killed together with the zygote.
KILLED_WITH_ZYGOTE = signal.SIGKILL


def describe(
    name: str, pid: int, status: int, lines: list[str], log_path: str, by_us: bool = False
) -> str:
    """One paragraph: who, how, the last lines of output, where the rest is."""
    who = f"{name} (pid {pid})"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        how = f"was killed by {_signal_name(number)}"
        if number == signal.SIGKILL and not by_us:
            how += " (by somebody, or by the kernel because memory ran out)"
    else:
        how = f"exited with code {os.WEXITSTATUS(status)}"
    text = f"{who} {how}"
    if lines:
        text += "\nIts last output:\n" + "\n".join(f"    {line}" for line in lines)
    if log_path:
        text += f"\nIts whole output is in {log_path}"
    return text


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have no name
        return f"signal {number}"


def actor_died(node: Node, text: str, restarting: bool = False, in_init: bool = False) -> Blob:
    """The error callers get."""
    if restarting:
        text += "\nIt is being restarted; this call was not retried (max_task_retries is used up)."
    return Blob.of(node, ActorDiedError(text, in_init))
