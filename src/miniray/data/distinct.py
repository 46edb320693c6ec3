"""Different values of an array. ``numpy.unique`` would load ``numpy.ma``, at every start."""

from __future__ import annotations

import numpy as np

from miniray.data.permutation import Positions


def distinct(values: Positions) -> Positions:
    """The different values, ascending."""
    found: Positions = np.sort(values)
    return found[_begins(found)]


def first_places(values: Positions) -> Positions:
    """Where each value stands for the first time, in the order in which they come."""
    order = np.argsort(values, kind="stable")
    found: Positions = np.sort(order[_begins(values[order])])
    return found


def _begins(ascending: Positions) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Where another value begins."""
    begins = np.ones(len(ascending), dtype=bool)
    np.not_equal(ascending[1:], ascending[:-1], out=begins[1:])
    return begins
