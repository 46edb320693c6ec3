"""A manifest names regular files in its own directory, and nothing else is opened."""

import hashlib
import json
import os

import numpy as np
import pytest

from miniray.errors import CheckpointError
from miniray.train import CheckpointStore
from miniray.train.run.checkpoints.manifest import _checksum, inspect_checkpoint


@pytest.fixture
def saved(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints")
    path = store.save(0, {"weights": [np.ones(3)]})
    assert store.load(path)[0] == 0
    return store, path


def rewrite(path, change):
    """Change the manifest, and give it a valid checksum."""
    content = json.loads((path / "manifest.json").read_text())
    content.pop("checksum")
    change(content)
    text = json.dumps({**content, "checksum": _checksum(content)})
    (path / "manifest.json").write_text(text)


def assert_rejected(store, path, golden=None, name=""):
    problem = inspect_checkpoint(path)
    assert isinstance(problem, str)
    with pytest.raises(CheckpointError):
        store.load(path)
    if golden:
        golden(name, problem + "\n")


@pytest.mark.parametrize(
    ("label", "name"),
    [
        ("parent", "../../secret.safetensors"),
        ("device", "/dev/zero"),
        ("folder", "inner/file"),
        ("self", "."),
        ("up", ".."),
    ],
)
def test_names_outside_are_rejected(saved, tmp_path, label, name, golden):
    store, path = saved
    (tmp_path / "secret.safetensors").write_bytes(b"")
    rewrite(path, lambda content: content["files"].update({name: {"bytes": 0, "blake2b": ""}}))
    assert_rejected(store, path, golden, f"manifest_{label}.txt")


@pytest.mark.parametrize("name", ["weights.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_files_that_are_not_regular_are_rejected(saved, tmp_path, name, kind):
    store, path = saved
    aside = tmp_path / "aside"
    os.rename(path / name, aside)
    if kind == "link":
        (path / name).symlink_to(aside)
    elif kind == "pipe":
        os.mkfifo(path / name)
    else:
        (path / name).mkdir()
    assert_rejected(store, path)


def test_state_that_the_manifest_does_not_list_is_rejected(saved):
    store, path = saved
    rewrite(path, lambda content: content["files"].pop("state.json"))
    assert_rejected(store, path)


@pytest.mark.parametrize("name", ["epoch", "serial"])
def test_numbers_of_the_manifest_are_checked(saved, name):
    store, path = saved
    rewrite(path, lambda content: content.update({name: "first"}))
    assert_rejected(store, path)


@pytest.mark.parametrize("name", ["manifest.json", "state.json"])
def test_deep_json_is_passed_over(saved, name):
    store, path = saved
    newer = store.save(1, {"weights": [np.ones(3)]})
    deep = b"[" * 100_000
    (newer / name).write_bytes(deep)
    if name == "state.json":
        entry = {"bytes": len(deep), "blake2b": hashlib.blake2b(deep, digest_size=32).hexdigest()}
        rewrite(newer, lambda content: content["files"].update({name: entry}))
    with pytest.raises(CheckpointError):
        store.load(newer)
    with pytest.warns(UserWarning, match="epoch-00000001"):
        assert store.load("latest")[0] == 0
    assert store.loaded == path
