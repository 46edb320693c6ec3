"""What tasks need, what is known of their functions, and the queue of those that need the same."""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import TYPE_CHECKING

from miniray.core.local.calls import Call, Channel
from miniray.core.local.objects import Blob

if TYPE_CHECKING:
    from miniray.core.local.node import Node
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

    @property
    def short(self) -> bool:
        return self.seconds is not None and self.seconds < _SHORT_SECONDS


class Lane:
    """The queue and the leased workers of one kind of demand."""

    def __init__(self) -> None:
        self.queue: deque[Call] = deque()
        self.leased: dict[int, Channel] = {}
        self.asked = 0
        self.stillborn = 0  # workers that died before they got a task, since the last result
        self.last_event: dict[int, float] = {}
        self.stealing: set[int] = set()
        self.recalled: set[int] = set()  # workers the driver wants back for somebody else
        self.blocked: set[int] = set()  # workers whose task waits for others


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
