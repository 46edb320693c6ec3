"""The recipe's folder on the path, as when its scripts are run by hand, and a few rows."""

import sys
from pathlib import Path

import pytest

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "geoguessr"


@pytest.fixture(scope="session", autouse=True)
def recipe():
    sys.path.insert(0, str(RECIPE))
    yield RECIPE
    sys.path.remove(str(RECIPE))


@pytest.fixture(scope="session")
def files(recipe):
    pytest.importorskip("pyarrow")
    pytest.importorskip("PIL")
    import checks

    with checks.some_rows(None, 60) as paths:
        yield paths
