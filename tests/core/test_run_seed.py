"""The run's seed in the driver's environment."""

import os

import miniray
from miniray.core import startup


def test_every_session_has_its_own_and_takes_it_away(monkeypatch):
    monkeypatch.delenv("MINIRAY_BACKEND", raising=False)
    seeds = set()
    for _ in range(2):
        with miniray.init(backend="inline"):
            seeds.add(os.environ[startup.RUN_SEED])
        assert startup.RUN_SEED not in os.environ
    assert len(seeds) == 2


def test_a_failed_start_leaves_none(monkeypatch):
    monkeypatch.setattr("miniray.core.inline.engine.start", lambda config: 1 / 0)
    try:
        miniray.init(backend="inline")
    except ZeroDivisionError:
        pass
    assert startup.RUN_SEED not in os.environ
