"""What the driver calls on an actor that is a rank."""

from __future__ import annotations

from typing import Any


class MemberMethods:
    """For worker classes: passes the driver's calls on to ``_member``, the rank it is.

    The rank is made when the driver prepares it, before the ranks meet.
    """

    _member: Any = None

    def _rank_join(self, spec: Any, agreed: Any, one_machine: bool) -> Any:
        return self._mine().join(spec, agreed, one_machine)

    def _rank_epoch(self, epoch: int) -> Any:
        return self._mine().epoch(epoch)

    def _rank_shared_state(self) -> Any:
        return self._mine().shared_state()

    def _rank_load_shared(self, state: Any) -> None:
        self._mine().load_shared(state)

    def _rank_leave(self) -> None:
        if self._member is not None:
            self._member.leave()

    def _mine(self) -> Any:
        assert self._member is not None, "the worker is no rank yet"
        return self._member
