"""Time limits in tests: shorter than a user's, so that tests don't wait for seconds.

Multiply the limits of a watcher or launcher by ``TIME_SCALE``. ``with_real_limits`` runs a test
with the scaled limits in ``make test`` and with the real ones in ``make test-slow``; one test per
kind of limit uses it.
"""

import pytest

TIME_SCALE = 0.4

with_real_limits = pytest.mark.parametrize(
    "scale", [TIME_SCALE, pytest.param(1.0, marks=pytest.mark.slow)]
)
