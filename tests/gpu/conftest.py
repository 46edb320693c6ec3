"""All tests here need a GPU; ``MINIRAY_GPU_TESTS_ON=cpu`` runs what of them there is without."""

import importlib.util
from pathlib import Path

import pytest

import miniray

if importlib.util.find_spec("torch") is None:
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items):
    mine = [item for item in items if Path(__file__).parent in item.path.parents]
    if not mine:
        return
    from tests.gpu.gpu_for_tests import ON_GPU, WANTED  # needs torch

    for item in mine:
        item.add_marker(pytest.mark.gpu)
        item.add_marker(pytest.mark.timeout(120))
        if not ON_GPU and WANTED:
            item.add_marker(pytest.mark.skip(reason="torch finds no GPU"))


@pytest.fixture(autouse=True, scope="module")
def engine():
    """One engine for a module: its first worker loads torch for the others."""
    miniray.init(backend="local", num_workers=4)
    yield
    miniray.shutdown()


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
