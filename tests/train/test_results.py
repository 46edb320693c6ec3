"""The return value of train()."""

import builtins
import math
import pickle
import sys

import pytest

from miniray.train import TrainResult
from miniray.train.run.result import Best, better_direction

HISTORY = [
    {"epoch": 0, "seconds": 1.0, "loss": 0.9, "accuracy": 0.1, "note": "first"},
    {"epoch": 1, "seconds": 1.0, "loss": math.nan, "accuracy": 0.8},
    {"epoch": 2, "seconds": 1.0, "loss": 0.3, "accuracy": 0.7, "val_loss": 0.4},
    {"epoch": 3, "seconds": 1.0, "loss": 0.3, "accuracy": 0.8},
]


def result(tmp_path, history=HISTORY):
    return TrainResult(
        history=history,
        epochs=len(history),
        wall_time=2.5,
        sync={"num_syncs": 4},
        run_dir=tmp_path,
        checkpoint=tmp_path / "checkpoints" / "epoch-00000003",
    )


def test_it_is_a_mapping_of_the_last_epoch(tmp_path, raises):
    found = result(tmp_path)
    assert found["loss"] == 0.3
    assert dict(found) == HISTORY[-1]
    assert found.get("absent", 5) == 5
    assert "accuracy" in found
    with raises(KeyError):
        found["absent"]


def test_its_attributes(tmp_path):
    found = result(tmp_path)
    assert found.metrics == HISTORY[-1]
    assert found.epochs == 4
    assert found.wall_time == 2.5
    assert found.sync == {"num_syncs": 4}
    assert found.run_dir == tmp_path
    assert found.checkpoint.name == "epoch-00000003"


def test_the_best_of_each_metric_by_its_kind_and_the_first_of_equals(tmp_path):
    assert result(tmp_path).best == {
        "loss": Best(0.3, 2),
        "accuracy": Best(0.8, 1),
        "val_loss": Best(0.4, 2),
    }


def test_the_best_epoch_by_choice(tmp_path, raises):
    found = result(tmp_path)
    assert found.best_epoch("loss") == HISTORY[2]
    assert found.best_epoch("loss", mode="max") == HISTORY[0]
    with raises(KeyError):
        found.best_epoch("note")
    with pytest.raises(ValueError, match="mode"):
        found.best_epoch("loss", mode="best")


@pytest.mark.parametrize(
    ("name", "direction"),
    [
        ("loss", "min"), ("g_loss", "min"), ("val_accuracy", "max"), ("valAcc", "max"),
        ("accident_rate", "min"), ("perplexity", "min"), ("top5", "max"), ("mean_reward", "max"),
        ("F1", "max"), ("mse", "min"), ("map", "max"), ("bitmap_error", "min"),
    ],
)  # fmt: skip
def test_which_way_is_better(name, direction):
    assert better_direction(name) == direction


def test_a_run_of_no_epochs(tmp_path, raises):
    found = result(tmp_path, [])
    assert found
    assert dict(found) == found.best == found.metrics == {}
    assert "0 epochs" in repr(found)
    with raises(ValueError):
        found.plot()


def test_it_says_what_it_is_and_travels(tmp_path, check_message):
    found = result(tmp_path)
    check_message(repr(found))
    assert pickle.loads(pickle.dumps(found)).best == found.best


def test_the_plot_is_a_picture_in_the_run_directory(tmp_path, raises):
    pytest.importorskip("matplotlib")
    from PIL import Image

    path = result(tmp_path).plot()
    assert path == tmp_path / "curves.png"
    with Image.open(path) as image:
        assert image.size == (1248, 768)  # 2 columns and 2 rows of 5.2 x 3.2 inches
        assert len(image.convert("RGB").getcolors(1 << 20)) > 10
    chosen = result(tmp_path).plot(tmp_path / "deep" / "one.svg", metrics=["loss"])
    assert "<svg" in chosen.read_text()
    with raises(ValueError):
        result(tmp_path).plot(metrics=["note"])


def test_the_frame_has_a_row_an_epoch(tmp_path):
    pytest.importorskip("pandas")
    frame = result(tmp_path).to_frame()
    assert list(frame.index) == [0, 1, 2, 3]
    assert frame.loc[2, "val_loss"] == 0.4
    assert math.isnan(frame.loc[0, "val_loss"])


@pytest.mark.parametrize(("call", "module"), [("plot", "matplotlib"), ("to_frame", "pandas")])
def test_what_is_missing_is_named(tmp_path, monkeypatch, call, module, raises):
    original = builtins.__import__

    def without(name, *arguments, **options):
        if name.split(".")[0] == module:
            raise ImportError(name)
        return original(name, *arguments, **options)

    for loaded in [name for name in sys.modules if name.split(".")[0] == module]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setattr(builtins, "__import__", without)
    with raises(ImportError):
        getattr(result(tmp_path), call)()
