"""The run's seed in the driver's environment, and the seed of an actor."""

import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch

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


@pytest.mark.parametrize(
    ("backend", "library", "draw"),
    [
        ("local", "numpy", "numpy.random.random()"),
        ("inline", "numpy", "numpy.random.random()"),
        pytest.param("local", "torch", "torch.rand(1).item()", marks=pytest.mark.slow),
    ],
)
def test_actor_seed_reaches_library_imported_late(backend, library, draw):
    """A new interpreter, because this one has the library, which workers would inherit."""
    script = f"""
        import sys
        import miniray
        from miniray.core import startup

        @miniray.remote
        class Late:
            def draw(self):
                was_loaded = {library!r} in sys.modules
                import {library}

                return was_loaded, {draw}

        miniray.init(backend={backend!r}, num_cpus=1)
        with startup.actors_with(seed=7):
            late = Late.remote()
        print(*miniray.get(late.draw.remote()))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=50
    )
    assert not done.returncode, done.stderr
    was_loaded, number = done.stdout.split()
    expected = {
        "numpy": np.random.RandomState(7).random_sample(),
        "torch": torch.rand(1, generator=torch.Generator().manual_seed(7)).item(),
    }
    assert (was_loaded, float(number)) == ("False", expected[library])
