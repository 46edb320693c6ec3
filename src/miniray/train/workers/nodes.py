"""Nodes that are lost during a run: one of them costs one of ``max_failures``."""

from __future__ import annotations

from miniray.core import session


class NodeLosses:
    """Decides whether the loss of a replacement belongs to the failure before it.

    The processes of a node don't end at the same moment. A replacement may be placed there after
    the first loss and be lost with the node: that is the same failure, counted once.
    """

    def __init__(self) -> None:
        self._known: frozenset[str] = frozenset()

    def settle(self) -> None:
        """Wait until lost nodes are known, so that no replacement is placed on them."""
        self._known = session.engine().lost_nodes()

    def explain_failure(self) -> bool:
        """Return whether a node was lost since ``settle``. Each node explains one failure."""
        lost = session.engine().lost_nodes()
        new, self._known = lost - self._known, self._known | lost
        return bool(new)
