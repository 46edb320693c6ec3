"""Nodes that are lost during a run: one of them costs one of ``max_failures``."""

from __future__ import annotations

from miniray.core import session


class NodeLosses:
    """Tells replacements that failed with their node from those that failed for other reasons.

    The processes of a node don't end at the same moment. A replacement may be placed there after
    the first loss, and be lost with the node: that is the same failure, and is counted once.
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
