"""What a rank does now, as it is written into its box: events, collectives, phases.

Code that runs once a step runs cold, and there every object that is looked at costs more than what
is done with it. So what one line of the user's says is prepared when it runs for the first time,
and afterwards it is one ``pack_into`` or one store.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

from miniray.doctor import model
from miniray.doctor.box import Begin, Box
from miniray.doctor.layout import MOMENT, Cell

_monotonic_ns = time.monotonic_ns
_MOST_CALLS = 4096  # shapes may differ at every call

#: Of a phase at one line: what ``ints[Cell.PHASE]`` gets in it and after it, and by the model that
#: takes part, if one does, the collective it makes there.
Place = tuple[int, int, dict[Any, Begin]]


class Events:
    """Events and phases of one rank. Any thread may write them."""

    def __init__(self, box: Box) -> None:
        self.box = box
        self.ints = box.ints
        #: By phase and site. Whoever writes a phase looks here and then asks ``place_of``.
        self.places: dict[str, dict[str, Place]] = {
            name: {} for name in ("data", "forward", "backward", "optimizer")
        }
        self._phases: dict[tuple[str, str], int] = {}
        self._sections = [0]  # the innermost last; 0 for none
        self._replaced = 0
        self._calls: dict[tuple[Any, ...], Begin] = {}
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
    ) -> int:
        """Add an event by its words and return its number; see ``model.Event``.

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
        kind: str = model.COLLECTIVE,
    ) -> Begin:
        """A collective as one line calls it. To be kept, and called whenever that line does.

        It takes the time of the monotonic clock and gives the event's number, for ``end``.
        """
        key = (name, op, group, shape, dtype, site, blocking, kind)
        begin = self._calls.get(key)
        if begin is None:
            what = self.box.what(kind, name, op, group, dtype, site, shape, blocking)
            next_one = self._sequences.setdefault((group, kind), itertools.count().__next__)
            begin = self.box.beginner(what, next_one, blocking)
            if len(self._calls) < _MOST_CALLS:
                self._calls[key] = begin
        return begin

    def end(self, number: int) -> None:
        """The collective (or other open event) has ended."""
        self.box.end_event(number)

    # -- phases -----------------------------------------------------------------------------------

    def set_phase(self, name: str, site: str) -> None:
        phase = self._phases.get((name, site))
        if phase is None:
            phase = self._phases[name, site] = self.box.intern(f"{name}\0{site}")
        self.ints[2] = _monotonic_ns() & MOMENT | phase  # Cell.PHASE

    def place_of(self, name: str, site: str) -> Place:
        """The phase at this site, and "compute", which comes after it."""
        intern = self.box.intern
        place: Place = intern(f"{name}\0{site}"), intern(f"compute\0{site}"), {}
        return self.places[name].setdefault(site, place)

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
