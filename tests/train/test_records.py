"""Lines of JSON: odd values, torn lines, a full disk."""

import fractions
import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miniray.train.run.records import (
    append_record,
    from_json,
    number,
    read_records,
    simplify,
    to_json,
)

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text()
    | st.sampled_from(["NaN", "Infinity", "-Infinity", "\\NaN", "\\\\-Infinity", "nan", "\\"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


def same(a, b):
    if isinstance(a, float) and isinstance(b, float):
        return a.hex() == b.hex()
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return type(a) is type(b) and a == b


@given(values)
def test_what_json_knows_comes_back_as_it_was_nan_included(value):
    text = json.dumps(to_json(value), allow_nan=False)
    assert same(from_json(json.loads(text)), value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, 1), (3, 3), (2.5, 2.5), (np.float32(0.5), 0.5), (np.int8(-3), -3),
        (np.bool_(True), 1), (np.array(4), 4), (torch.tensor(1.5), 1.5), (torch.tensor(2), 2),
        (torch.tensor(0.5, dtype=torch.bfloat16), 0.5), (fractions.Fraction(1, 4), 0.25),
        (fractions.Fraction(10**400), math.inf), (torch.tensor(1.0, requires_grad=True), 1.0),
        ("3", None), (None, None), (1j, None), (np.array([1]), None), (torch.ones(1), None),
        (np.array("x"), None), ([1], None),
    ],
)  # fmt: skip
def test_what_counts_as_a_number(value, expected):
    found = number(value)
    assert found == expected
    assert type(found) in (int, float, type(None))


def test_odd_values_are_named_and_never_refused():
    class Broken:
        def __repr__(self):
            raise RuntimeError

    record = {
        "tuple": (1, 2),
        "small": np.arange(3),
        "large": torch.zeros(5000),
        "sparse": torch.ones(3).to_sparse(),
        "object": Broken(),
        "long": "x" * 500,
        3: "a key",
        "huge": 10**5000,
    }
    found = to_json(record)
    assert found["tuple"] == [1, 2]
    assert found["small"] == [0, 1, 2]
    assert found["large"] == "<Tensor torch.float32 [5000]>"
    assert found["sparse"].startswith("<Tensor")
    assert found["object"] == "<Broken>"
    assert found["long"] == "x" * 500  # a text is not cut
    assert found["3"] == "a key"
    assert int(found["huge"], 16) == 10**5000
    json.dumps(found)


def test_simplified_is_what_a_record_would_give_back():
    found = simplify({"loss": np.float32("nan"), "ids": (1, 2), "where": fractions.Fraction(1, 2)})
    assert math.isnan(found["loss"])
    assert found["ids"] == [1, 2]
    assert found["where"] == 0.5


def test_to_json_replaces_a_record_inside_itself_by_text():
    record = {"loss": 1.0}
    record["self"] = record
    found, depth = json.loads(json.dumps(to_json(record))), 0
    while isinstance(found["self"], dict):
        found, depth = found["self"], depth + 1
    assert found == {"loss": 1.0, "self": repr(record)}
    assert 10 < depth < 100


def test_a_torn_last_line_is_passed_over_and_the_next_begins_anew(tmp_path):
    path = tmp_path / "m.jsonl"
    append_record(path, {"epoch": 0})
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"epoch": 1, "lo')
    assert read_records(path) == [{"epoch": 0}]
    append_record(path, {"epoch": 2})
    with pytest.warns(UserWarning, match=r"\[2\]"):
        assert read_records(path) == [{"epoch": 0}, {"epoch": 2}]


def test_every_prefix_of_a_file_can_be_read(tmp_path, recwarn):
    path = tmp_path / "m.jsonl"
    for epoch in range(3):
        append_record(path, {"epoch": epoch, "loss": math.inf, "name": "é\n"})
    whole = path.read_bytes()
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        found = read_records(path)
        assert [r["epoch"] for r in found] == list(range(len(found)))
        assert len(found) >= whole[:length].count(b"\n")
    assert not recwarn


def test_a_line_is_one_write(tmp_path):
    """Two processes that append at the same time do not mix their lines."""
    code = (
        "import sys; from pathlib import Path\n"
        "from miniray.train.run.records import append_record\n"
        "for i in range(300):\n"
        "    append_record(Path(sys.argv[1]), {'who': sys.argv[2], 'i': i, 'fill': 'x' * 200})"
    )
    path = tmp_path / "m.jsonl"
    command = [sys.executable, "-c", code, str(path)]
    processes = [subprocess.Popen([*command, who]) for who in "ab"]
    assert [process.wait(50) for process in processes] == [0, 0]
    found = read_records(path)
    for who in "ab":
        assert [r["i"] for r in found if r["who"] == who] == list(range(300))


def test_no_file_is_no_records(tmp_path):
    assert read_records(tmp_path / "absent.jsonl") == []


def test_a_full_device_is_an_error_with_the_path():
    from pathlib import Path

    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    with pytest.raises(OSError, match="/dev/full"):
        append_record(Path("/dev/full"), {"a": 1})
