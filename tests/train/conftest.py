"""Trainers start and stop their own engine; each test gets an empty folder for its runs."""

import pytest

import miniray


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    miniray.shutdown()


@pytest.fixture
def _light_workers(monkeypatch):
    """For workers of numpy alone. Test modules have torch loaded, and what is loaded here the local
    engine would load for its workers, too: seconds for every start of it."""
    monkeypatch.setattr("miniray.core.local.spawner.PRELOAD", ("numpy",))
    monkeypatch.setattr("miniray.train.workers.process.PRELOADED_WITH", {})
