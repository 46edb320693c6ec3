"""One engine for the tests of a module: its first worker loads torch for the others."""

import pytest

import miniray


@pytest.fixture(scope="module")
def engine():
    yield lambda: miniray.is_initialized() or miniray.init(backend="local", num_workers=4)
    miniray.shutdown()


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
