"""What tasks need, what is known of their functions, and who runs those that need the same."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from miniray.core.local.calls import Call
from miniray.core.local.channel import Channel
from miniray.core.local.objects import Blob

if TYPE_CHECKING:
    from miniray.core.local.node import Node
    from miniray.core.options import Options
    from miniray.core.remote import FunctionSpec

#: Tasks shorter than this are sent several at a time.
_SHORT_SECONDS = 0.002
_DEPTH = 32


@dataclasses.dataclass(frozen=True)
class Demand:
    """What a task needs of its worker; tasks that need the same share workers."""

    cpus: float
    gpus: float
    env: tuple[tuple[str, str], ...]


class Function:
    """A user's function as this session ships it: pickled once, sent once to each worker."""

    def __init__(self, node: Node, spec: FunctionSpec) -> None:
        self.id = next(node.ids)
        self.name = spec.name
        self.blob = Blob.of(node, spec.function, f"function {spec.name}")
        self.seconds: float | None = None  # running mean of how long it takes
        #: Where its last call went, and the options that said so: mostly the next one's, too.
        self.chosen: tuple[Options, Lane] | None = None

    @property
    def short(self) -> bool:
        return self.seconds is not None and self.seconds < _SHORT_SECONDS


class Lane:
    """The queue and the leased workers of one kind of demand."""

    def __init__(self, demand: Demand) -> None:
        self.demand = demand
        self.queue: deque[Call] = deque()
        self.leased: dict[int, Leased] = {}
        self.asked = 0
        self.stillborn = 0  # workers that died before they got a task, since the last result


class Leased(Channel):
    """A worker of the pool; the connection is kept from one lease to the next."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.lane: Lane | None = None  # None while it is not leased
        self.functions: set[int] = set()  # those it knows
        self.last_event = 0.0  # when it got its first task, or gave a result
        self.stealing = False  # idle, it waits for tasks of a busy one
        self.recalled = False  # the driver wants it back for somebody else
        self.blocked = False  # its task waits for others

    def measure(self) -> None:
        """Results came: how long did each take?"""
        now = time.monotonic()
        elapsed, self.last_event = now - self.last_event, now
        function = self.last_function
        if function is not None:
            seconds = elapsed / max(self.taken, 1)
            known = function.seconds
            function.seconds = seconds if known is None else 0.7 * known + 0.3 * seconds


def has_room(channel: Channel, call: Call) -> bool:
    """Whether to send ``call`` there now: to an idle worker, or behind tasks as short as it is."""
    pending = channel.pending
    if not pending:
        return True
    if len(pending) >= _DEPTH or not call.spec.short:
        return False
    # Only the first can be a long one: nothing else is sent to a worker that is busy.
    try:
        first = next(iter(pending.values()), None)
    except RuntimeError:  # it was answered in this very moment, by another thread
        return True
    return first is None or first.spec.short
