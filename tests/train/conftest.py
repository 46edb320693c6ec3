"""Trainers start and stop their own engine; each test gets an empty folder for its runs."""

import pytest

import miniray


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    miniray.shutdown()


@pytest.fixture(params=["inline", "local", "ray"])
def backend(request):
    """For what must hold on every engine. Ray takes seconds to start: use it where that is so."""
    if request.param == "ray":
        pytest.importorskip("ray")
    return request.param
