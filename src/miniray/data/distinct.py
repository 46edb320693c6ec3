"""Different values of an array. ``numpy.unique`` would load ``numpy.ma``, at every start."""

from __future__ import annotations

import numpy as np

from miniray.data.permutation import Positions


def distinct(values: Positions) -> Positions:
    """The different values, ascending."""
    found: Positions = np.sort(values)
    begins = np.ones(len(found), dtype=bool)
    np.not_equal(found[1:], found[:-1], out=begins[1:])
    return found[begins]
