"""A few rows for the checks of this folder when pytest runs them."""

import checks
import pytest


@pytest.fixture(scope="session")
def files():
    with checks.some_rows(None, 60) as paths:
        yield paths
