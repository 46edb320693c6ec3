"""Arguments are checked in one place, and unknown options come with a suggestion."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from miniray import checks


def test_check_int_accepts_numpy_and_rejects_bool_and_float():
    assert checks.check_int("n", np.int64(3), 1) == 3
    for value in (True, 2.0, "2", None, 0):
        with pytest.raises(ValueError, match="n must be an int >= 1"):
            checks.check_int("n", value, 1)


def test_check_number_respects_open_and_closed_bounds():
    assert checks.check_number("rate", 1, 0, 1) == 1.0
    assert checks.check_number("rate", 0.5, 0, 1, open_low=True, open_high=True) == 0.5
    for value in (1, 0, float("nan"), "0.5", True):
        with pytest.raises(ValueError, match="> 0 and < 1"):
            checks.check_number("rate", value, 0, 1, open_low=True, open_high=True)


def test_check_bool_rejects_text():
    assert checks.check_bool("flag", True) is True
    for value in ("no", 1, None):
        with pytest.raises(ValueError, match="flag must be True or False"):
            checks.check_bool("flag", value)


def test_check_path_returns_text(tmp_path: Path):
    assert checks.check_path("run_dir", tmp_path) == str(tmp_path)
    for value in ("", 3, None):
        with pytest.raises(ValueError, match="run_dir must be a path"):
            checks.check_path("run_dir", value)


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("shufle", "'shuffle'"),
        ("max_epochs", "train(epochs=...)"),
        ("devices", "num_workers="),
        ("every_n_train_steps", "Checkpoint("),
        ("gradient_accumulation_steps", "accumulate="),
        ("xyz", "shuffle"),  # nothing similar: the error lists the options
    ],
)
def test_unknown_option_suggests(name: str, suggestion: str):
    error = checks.unknown_option("Owner", name, ["shuffle", "seed"])
    assert f"Owner has no option {name!r}" in str(error)
    assert suggestion in str(error)


def test_suggest_options_keeps_signature_and_names_subclass():
    @checks.suggest_options({"num_workers": "Use decode_workers=."})
    @dataclasses.dataclass
    class Loader:
        batch_size: int = 1
        decode_workers: int = 0

    class Special(Loader):
        pass

    assert Loader(batch_size=2) == Loader(2)
    with pytest.raises(
        TypeError, match=r"Loader has no option 'num_workers'\. Use decode_workers="
    ):
        Loader(num_workers=4)
    with pytest.raises(TypeError, match=r"Special has no option 'batch_sise'.*'batch_size'"):
        Special(batch_sise=4)
