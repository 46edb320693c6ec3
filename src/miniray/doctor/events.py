"""What a rank does now, as it is written into its box: events, collectives, phases.

Code that runs once a step runs cold, and there every object that is looked at costs more than what
is done with it. So what one line of the user's says is prepared when it runs for the first time,
and afterwards it is a few stores.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from miniray.doctor import layout, model, sites
from miniray.doctor.box import Added, Box, Call
from miniray.doctor.layout import MOMENT, Cell

_monotonic_ns = time.monotonic_ns
_MOST_CALLS = 4096  # shapes may differ at every call

#: Of a phase at one line: what ``ints[Cell.PHASE]`` gets in it and after it; by the model that
#: takes part, if one does, the collective it makes there; the line.
Place = tuple[int, int, dict[Any, Call], str]
#: The code object of the caller, the instruction in it, and the place.
LastPlace = tuple[CodeType | None, int, Place]
_NOWHERE: Place = (0, 0, {}, "")


class Events:
    """Events and phases of one rank. Any thread may write them."""

    def __init__(self, box: Box) -> None:
        self.box = box
        self.ints = box.ints
        # For those who write an event themselves, as ``Box.begin`` does.
        self.next_event = box.next_event
        #: Where these were called from last, as a rule the place they are called from next. Who
        #: finds another instruction there asks ``place_at``.
        self.last_forward: LastPlace = (None, 0, _NOWHERE)
        self.last_backward: LastPlace = (None, 0, _NOWHERE)
        self.last_optimizer: LastPlace = (None, 0, _NOWHERE)
        self._known: dict[tuple[str, int, int], Place] = {}  # by phase and instruction
        self._places: dict[tuple[str, str], Place] = {}
        self._phases: dict[tuple[str, str], int] = {}
        self._sections = [0]  # the innermost last; 0 for none
        self._replaced = 0
        self._calls: dict[tuple[Any, ...], Call] = {}
        self._sequences: dict[tuple[str, str], Callable[[], int]] = {}

    # -- events -----------------------------------------------------------------------------------

    def event(
        self,
        kind: str,
        name: str,
        op: str = "",
        *,
        site: str = "",
        number: int = -1,
        is_open: bool = False,
    ) -> Added:
        """Add an event by its words; see ``model.Event``.

        Words stay in the box for ever and there is room for some thousand. What counts up goes into
        ``number``.
        """
        what = self.box.what(kind, name, op, site=site, blocking=is_open)
        return self.box.event(what, number, is_open, is_open)

    def collective(
        self,
        name: str,
        op: str = "",
        group: str = "",
        shape: tuple[int, ...] = (),
        dtype: str = "",
        site: str = "",
        *,
        blocking: bool = True,
        functional: bool = False,
        kind: str = model.COLLECTIVE,
    ) -> Call:
        """A collective as one line calls it. To be kept, and given to ``begin`` each time."""
        key = (name, op, group, shape, dtype, site, blocking, functional, kind)
        call = self._calls.get(key)
        if call is None:
            what = self.box.what(kind, name, op, group, dtype, site, shape, blocking, functional)
            first, second, *sizes = layout.WORDS_OF_WHAT.unpack(what)
            next_one = self._sequences.setdefault((group, kind), itertools.count().__next__)
            cell = 1 if blocking else 0  # Cell.OPEN, Cell.EVENTS
            call = first, second, tuple(sizes[: len(shape)]), next_one, cell
            if len(self._calls) < _MOST_CALLS:
                self._calls[key] = call
        return call

    def begin(self, call: Call, now: int) -> Added:
        """The line makes its call, at ``now`` (``monotonic_ns``). To be given to ``end``."""
        return self.box.begin(call, now)

    def end(self, added: Added) -> None:
        """The collective (or other open event) has ended."""
        self.box.end_event(added, _monotonic_ns())

    # -- phases -----------------------------------------------------------------------------------

    def set_phase(self, name: str, site: str) -> None:
        phase = self._phases.get((name, site))
        if phase is None:
            phase = self._phases[name, site] = self.box.intern(f"{name}\0{site}")
        self.ints[2] = _monotonic_ns() & MOMENT | phase  # Cell.PHASE

    def place_of(self, name: str, site: str) -> Place:
        """The phase at this site, and "compute", which comes after it."""
        place = self._places.get((name, site))
        if place is None:
            intern = self.box.intern
            place = intern(f"{name}\0{site}"), intern(f"compute\0{site}"), {}, site
            self._places[name, site] = place
        return place

    def place_at(self, name: str, frame: FrameType, caller: FrameType) -> LastPlace:
        """The place of the user's line that is found from ``frame`` outwards.

        Where that line is ``caller``'s, it need not be looked for again.
        """
        code, at = caller.f_code, caller.f_lasti
        place = self._known.get((name, id(code), at))
        if place is None:
            site = sites.call_site(frame)
            place = self.place_of(name, site)
            if not sites.is_at(caller, site):
                return None, 0, place
            self._known[name, id(code), at] = place
        return code, at, place

    # -- sections ---------------------------------------------------------------------------------

    def set_section(self, name: str, site: str) -> None:
        """``doctor.phase`` was called; without ``with`` it takes the place of the one before."""
        phase = self.box.intern(f"{name}\0{site}")
        self._replaced = self._sections[-1]
        self._sections[-1] = _monotonic_ns() & MOMENT | phase
        self.ints[Cell.SECTION] = self._sections[-1]
        self.event(model.PHASE, name, "begin", site=site)

    def set_work(self, name: str) -> None:
        """The same for what is said many times a step: it is no event."""
        phase = self._phases.get((name, ""))
        if phase is None:
            phase = self._phases[name, ""] = self.box.intern(f"{name}\0")
        self._sections[-1] = self.ints[3] = _monotonic_ns() & MOMENT | phase  # Cell.SECTION

    def open_section(self) -> None:
        """It was called with ``with``: the one before comes back after it."""
        self._sections.insert(-1, self._replaced)

    def close_section(self, name: str, site: str) -> None:
        self._sections.pop()
        self.ints[Cell.SECTION] = self._sections[-1]
        self.event(model.PHASE, name, "end", site=site)
