"""Copies by two threads: every byte, and nobody writes any more when it has ended."""

import threading
import time

import numpy as np
import pytest

from miniray.core.local import mapped


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Two threads from 1,000 bytes on, in pieces of 70."""
    monkeypatch.setattr(mapped, "_LARGE", 1000)
    monkeypatch.setattr(mapped, "_PIECE", 70)
    monkeypatch.setattr(mapped, "_CORES", 2)


@pytest.mark.parametrize("size", [0, 1, 999, 1000, 1049, 1050, 1051, 123_457])
def test_every_byte_is_copied(size):
    source = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    memory = np.zeros(size + 2, np.uint8)
    mapped.copy(memory[1:-1], source)
    assert (memory[1:-1] == source).all()
    assert memory[0] == memory[-1] == 0
    assert "miniray-copy" not in {thread.name for thread in threading.enumerate()}


def test_an_interrupted_copy_leaves_nobody_writing():
    """The memory is used again then: a late write would be into somebody else's value."""
    at_work = threading.Event()
    main = threading.get_ident()
    written = []

    class Source:
        def __len__(self):
            return 100_000

        def __getitem__(self, piece):
            if threading.get_ident() == main:
                at_work.wait()
                raise KeyboardInterrupt
            at_work.set()
            return piece.start

    class Target:
        def __setitem__(self, piece, value):
            written.append(value)
            time.sleep(0.01)

    with pytest.raises(KeyboardInterrupt):
        mapped.copy(Target(), Source())
    assert "miniray-copy" not in {thread.name for thread in threading.enumerate()}
    assert written == sorted(set(written))
    assert len(written) < 700  # of 1,429 pieces: it did not go on to the end either
