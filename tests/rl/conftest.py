"""Each test gets an empty folder for its runs, and one thread: models are too small for more."""

import pytest

import miniray

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def local_engine():
    """One engine for all tests of a module: its zygote loads torch once."""
    with miniray.init(backend="local"):
        yield
