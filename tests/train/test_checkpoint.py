"""The checkpoint store: what is kept, what is read, what happens to damaged ones."""

import json
import math
import os
import threading
import warnings

import numpy as np
import pytest

from miniray.errors import CheckpointError
from miniray.train import CheckpointStore
from miniray.train.run.checkpoints import store as module


def state(epoch, **metrics):
    return {
        "weights": [np.full(100, float(epoch)), np.arange(3) + epoch],
        "workers": [{"step": epoch, "rng": (1, None)}],
        "metrics": metrics,
    }


def epochs(store):
    return [found.epoch for found in store.list()]


def flip_a_bit(path, position):
    data = bytearray(path.read_bytes())
    data[position % len(data)] ^= 1 << (position % 8)
    path.write_bytes(data)


def test_what_is_saved_is_loaded(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints")
    path = store.save(4, state(4, loss=0.5))
    assert path == tmp_path / "checkpoints" / "epoch-00000004"
    epoch, loaded = store.load()
    assert epoch == 4
    assert loaded["weights"][0].tolist() == [4.0] * 100
    assert loaded["workers"] == [{"step": 4, "rng": (1, None)}]
    assert loaded["metrics"] == {"loss": 0.5}
    assert store.loaded == path
    assert store.load(path)[0] == 4
    assert store.load(str(path))[0] == 4


def test_the_weights_are_a_file_of_their_own(tmp_path):
    path = CheckpointStore(tmp_path).save(0, state(0))
    assert sorted(p.name for p in path.iterdir()) == [
        "manifest.json",
        "state.json",
        "weights.safetensors",
    ]


def test_nothing_there_is_an_error_and_an_empty_list(tmp_path, raises):
    store = CheckpointStore(tmp_path / "none")
    assert store.list() == []
    assert store.newest() is None
    with raises(CheckpointError):
        store.load()
    with raises(CheckpointError):
        store.load(tmp_path / "epoch-00000001")
    assert not (tmp_path / "none").exists()  # looking makes nothing


def test_only_the_last_are_kept(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=2)
    for epoch in range(5):
        store.save(epoch, state(epoch))
    assert epochs(store) == [3, 4]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["epoch-00000003", "epoch-00000004"]


def test_all_are_kept_by_choice(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=None)
    for epoch in range(5):
        store.save(epoch, state(epoch))
    assert epochs(store) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("mode", "best"), [("min", 1), ("max", 3)])
def test_the_best_is_kept_too(tmp_path, mode, best):
    store = CheckpointStore(tmp_path, keep_last=1, keep_best=("loss", mode))
    for epoch, loss in enumerate([0.5, 0.1, 0.3, 0.9, math.nan, 0.4]):
        store.save(epoch, state(epoch, loss=loss))
    store.save(6, state(6))  # without the metric: no candidate
    assert epochs(store) == [best, 6]
    assert store.best() == tmp_path / f"epoch-0000000{best}"


def test_the_metric_is_also_found_in_the_history(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=1, keep_best=("loss", "min"))
    history = []
    for epoch, loss in enumerate([0.5, 0.1, np.float32(0.3)]):
        history.append({"epoch": epoch, "loss": loss})
        store.save(epoch, {"history": history})
    assert epochs(store) == [1, 2]


def test_an_epoch_saved_again_replaces_the_old_one(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(1, state(1))
    second = store.save(1, state(100))
    assert [found.path for found in store.list()] == [second]
    assert store.load()[1]["workers"][0]["step"] == 100


def test_latest_is_the_last_one_written_also_after_going_back(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=3)
    for epoch in range(4):
        store.save(epoch, state(epoch))
    store.save(2, state(200))  # resumed from epoch 1
    assert store.load()[0] == 2
    assert store.load()[1]["workers"][0]["step"] == 200
    assert epochs(store) == [1, 3, 2]


def test_a_refused_state_changes_nothing(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=1)
    store.save(0, state(0))
    with pytest.raises(CheckpointError, match=r"state\['bad'\]\[0\]"):
        store.save(1, {"bad": [object()]})
    assert epochs(store) == [0]
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("epoch", [-1, 1.0, True, None])
def test_an_epoch_is_a_number_from_zero(tmp_path, epoch):
    with pytest.raises(ValueError, match="epoch"):
        CheckpointStore(tmp_path).save(epoch, {})


@pytest.mark.parametrize(
    "options",
    [{"keep_last": 0}, {"keep_last": True}, {"keep_best": ("loss", "low")}, {"keep_best": 3}],
)
def test_bad_options_are_refused(tmp_path, options):
    with pytest.raises(ValueError, match="keep_"):
        CheckpointStore(tmp_path, **options)


def test_odd_keys_of_the_state(tmp_path):
    odd = {"../x": np.ones(1), "A": np.ones(2), "a": np.ones(3), 7: np.ones(4), "": None, "$": 1}
    path = CheckpointStore(tmp_path).save(0, odd)
    loaded = CheckpointStore(tmp_path).load()[1]
    assert list(loaded) == list(odd)
    assert [loaded[key].size for key in ("../x", "A", "a", 7)] == [1, 2, 3, 4]
    assert {p.parent for p in tmp_path.rglob("*.safetensors")} == {path}


def test_a_state_with_a_part_called_as_a_group_of_ours(tmp_path):
    odd = {"keys": np.zeros(1), "state": np.ones(1), "pickled-objects": np.ones(2)}
    CheckpointStore(tmp_path).save(0, odd)
    assert [v.tolist() for v in CheckpointStore(tmp_path).load()[1].values()] == [[0], [1], [1, 1]]


# -- damage ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "weights.safetensors"])
@pytest.mark.parametrize("damage", ["flip", "cut", "grow", "empty", "missing"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path, name, damage):
    events = []
    store = CheckpointStore(tmp_path, on_event=events.append)
    store.save(0, state(0))
    newest = store.save(1, state(1))
    victim = newest / name
    data = victim.read_bytes()
    if damage == "flip":
        flip_a_bit(victim, len(data) // 2)
    elif damage == "missing":
        victim.unlink()
    else:
        victim.write_bytes({"cut": data[:-2], "grow": data + b" x", "empty": b""}[damage])
    with pytest.warns(UserWarning, match="epoch-00000001"):
        epoch, loaded = store.load()
    assert epoch == 0
    assert loaded["weights"][0].tolist() == [0.0] * 100
    assert [(e["event"], e["path"]) for e in events] == [("checkpoint_corrupt", str(newest))]
    assert name in events[0]["reason"]
    with pytest.raises(CheckpointError, match=r"epoch-00000001.*epoch-00000000"):
        store.load(newest)
    assert [found.epoch for found in store.list(verify=True)] == [0]


def test_every_single_bit_counts(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(0, {"w": np.zeros(2)})
    newest = store.save(1, {"w": np.ones(2)})
    for victim in sorted(newest.iterdir()):
        whole = victim.read_bytes()
        for position in range(len(whole)):
            flip_a_bit(victim, position)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                epoch, loaded = store.load()
            # A flip of white space in the manifest is the one that changes nothing.
            assert (epoch, loaded["w"].tolist()) in [(0, [0, 0]), (1, [1, 1])]
            assert epoch == 0 or victim.name == "manifest.json"
            victim.write_bytes(whole)


def test_when_all_are_damaged_the_error_says_so(tmp_path, raises):
    store = CheckpointStore(tmp_path)
    for epoch in range(2):
        flip_a_bit(store.save(epoch, state(epoch)) / "state.json", 40)
    with (
        pytest.warns(UserWarning, match=r"epoch-0000000\d"),
        raises(CheckpointError),
    ):
        store.load()


def test_a_damaged_one_does_not_count_as_one_of_the_last(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=2)
    store.save(0, state(0))
    (store.save(1, state(1)) / "state.json").write_text("")
    store.save(2, state(2))
    assert epochs(store) == [0, 2]
    assert (tmp_path / "epoch-00000001").exists()  # for a person to look at


def test_unknown_files_are_let_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "epoch-best").mkdir()
    (tmp_path / "epoch-00000009").write_text("a file, not a directory")
    store = CheckpointStore(tmp_path, keep_last=1)
    store.save(0, state(0))
    path = store.save(1, state(1))
    (path / "README").write_text("mine too")
    with pytest.warns(UserWarning, match="epoch-00000009"):
        assert store.load()[0] == 1
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert (tmp_path / "epoch-best").exists()


def test_a_newer_format_is_not_guessed_at(tmp_path):
    path = CheckpointStore(tmp_path).save(0, {})
    manifest = json.loads((path / "manifest.json").read_text())
    from miniray.train.run.checkpoints.manifest import _checksum

    del manifest["checksum"]
    manifest["format"] = "miniray-checkpoint-2"
    text = json.dumps({**manifest, "checksum": _checksum(manifest)})
    (path / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match="'miniray-checkpoint-2'"):
        CheckpointStore(tmp_path).load(path)


def test_leftovers_of_the_dead_are_removed_and_of_the_living_kept(tmp_path):
    dead = tmp_path / ".partial-epoch-00000001-4194304999"  # above the largest process id
    alive = tmp_path / f".partial-epoch-00000001-{os.getppid()}"
    for path in (dead, alive):
        path.mkdir()
        (path / "state.json").write_text("half")
    store = CheckpointStore(tmp_path)
    assert store.list() == []
    store.save(0, {})
    assert not dead.exists()
    assert alive.exists()


def test_pickled_parts_are_not_read_without_consent(tmp_path):
    path = CheckpointStore(tmp_path, allow_pickle=True).save(4, {"x": range(3)})
    assert (path / "pickled-objects.safetensors").exists()
    with pytest.raises(CheckpointError) as caught:
        CheckpointStore(tmp_path).load()
    assert (caught.value.entry, caught.value.epoch) == ("x", 4)
    assert CheckpointStore(tmp_path, allow_pickle=True).load() == (4, {"x": range(3)})


# -- in the background -----------------------------------------------------------------------------


@pytest.fixture
def slow_writes(monkeypatch):
    """Writes wait for the returned event."""
    go = threading.Event()
    write = module.write_checkpoint

    def slowly(path, contents):
        assert go.wait(30)
        write(path, contents)

    monkeypatch.setattr(module, "write_checkpoint", slowly)
    yield go
    go.set()


def test_a_background_write_holds_what_was_there_at_the_call(tmp_path, slow_writes):
    store = CheckpointStore(tmp_path)
    weights = np.zeros(1000)
    settings = {"lr": 0.1}
    path = store.save_or_warn(0, {"weights": weights, "settings": settings})
    assert not path.exists()
    weights[:] = 7
    settings["lr"] = 9
    slow_writes.set()
    epoch, loaded = store.load()  # waits
    assert epoch == 0
    assert not loaded["weights"].any()
    assert loaded["settings"] == {"lr": 0.1}
    assert path.exists()


def test_the_next_save_waits_for_the_one_before(tmp_path, slow_writes):
    store = CheckpointStore(tmp_path)
    store.save_or_warn(0, state(0))
    threading.Timer(0.05, slow_writes.set).start()
    store.save_or_warn(1, state(1))
    assert (tmp_path / "epoch-00000000").exists()
    store.close()
    assert epochs(store) == [0, 1]


def test_failed_background_write_warns_once_and_loses_nothing(tmp_path):
    events, failures = [], []
    store = CheckpointStore(tmp_path / "c", on_event=events.append)
    store.save(0, state(0))
    in_the_way = [tmp_path / "c" / f".partial-epoch-0000000{i}-{os.getpid()}" for i in (1, 2)]
    for path in in_the_way:
        path.write_text("")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for epoch in (1, 2):
            store.save_or_warn(epoch, state(epoch), on_failure=lambda: failures.append(1))
            store.wait()
    assert [e["event"] for e in events] == ["checkpoint_failed"] * 2
    assert (len(failures), len(caught)) == (2, 1)
    assert store.load()[0] == 0
    for path in in_the_way:
        path.unlink(missing_ok=True)
    store.save_or_warn(2, state(2))
    assert store.load()[0] == 2


def test_a_refused_state_is_refused_at_once_in_the_background_too(tmp_path):
    store = CheckpointStore(tmp_path)
    with pytest.raises(CheckpointError, match=r"state\['f'\]"):
        store.save_or_warn(0, {"f": object()})
    store.close()
