"""Model files: compatibility with other readers, round trips and rejected values."""

import json
import struct
import subprocess
import sys

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch

from miniray.errors import CheckpointError
from miniray.train import load_model, save_model
from miniray.train.run.tensors import tensorfile

TYPES = [getattr(torch, name) for name in sorted(tensorfile.TORCH_TYPES) if hasattr(torch, name)]


def example(dtype, shape=(3, 5)):
    bits = torch.arange(shape[0] * shape[1] * 16, dtype=torch.uint8)
    if dtype is torch.bool:
        return (bits[: shape[0] * shape[1]] % 2).bool().reshape(shape)
    return bits[: shape[0] * shape[1] * dtype.itemsize].view(dtype).reshape(shape)


def same(a, b):
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(
            a.contiguous().reshape(-1).view(torch.uint8),
            b.contiguous().reshape(-1).view(torch.uint8),
        )
    )


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_type_goes_both_ways(dtype, tmp_path):
    weights = {"a": example(dtype), "b": example(torch.bool), "none": torch.empty(0, dtype=dtype)}
    ours = save_model(tmp_path / "ours.safetensors", weights)
    safetensors.torch.save_file(weights, tmp_path / "theirs.safetensors", {"format": "pt"})
    for read in (safetensors.torch.load_file(ours), load_model(tmp_path / "theirs.safetensors")):
        assert set(read) == set(weights)
        assert all(same(read[name], weights[name]) for name in weights)


def test_numpy_files_go_both_ways(tmp_path):
    weights = {"w": np.arange(6, dtype=np.float64).reshape(2, 3), "n": np.array(7, np.int64)}
    ours = save_model(tmp_path / "ours.safetensors", weights)
    read = safetensors.numpy.load_file(ours)
    safetensors.numpy.save_file(weights, tmp_path / "theirs.safetensors")
    again = load_model(tmp_path / "theirs.safetensors")
    for found in (read, again):
        assert isinstance(found["w"], np.ndarray)
        np.testing.assert_array_equal(found["w"], weights["w"])
        assert found["n"].shape == ()
        assert found["n"] == 7


def test_a_model_comes_back_in_the_form_it_had(tmp_path):
    first, second = torch.ones(2), torch.zeros(1, dtype=torch.bfloat16)
    for weights in ([first, second], (first, second), {"a": {"b": [first]}, "c": second}):
        read = load_model(save_model(tmp_path / "m.safetensors", weights))
        assert type(read) is type(weights)
    assert same(read["a"]["b"][0], first)
    assert same(read["c"], second)


def test_names_are_positions_in_a_list_and_keys_in_a_dict(tmp_path):
    save_model(tmp_path / "list.safetensors", [np.ones(1), np.ones(2)])
    save_model(tmp_path / "dict.safetensors", {"encoder": [np.ones(1)], "a.b": np.ones(1)})
    assert set(safetensors.numpy.load_file(tmp_path / "list.safetensors")) == {"0", "1"}
    assert set(safetensors.numpy.load_file(tmp_path / "dict.safetensors")) == {"encoder.0", "a.b"}


def test_equal_names_do_not_collide(tmp_path):
    weights = {"a": {"b": np.zeros(1)}, "a.b": np.ones(1), "__metadata__": np.full(1, 2.0)}
    read = load_model(save_model(tmp_path / "m.safetensors", weights))
    assert read["a"]["b"][0] == 0
    assert read["a.b"][0] == 1
    assert read["__metadata__"][0] == 2


def test_loaded_arrays_are_writable_and_apart(tmp_path):
    read = load_model(save_model(tmp_path / "m.safetensors", [np.zeros(2), torch.zeros(2)]))
    read[0][0] = 5
    read[1][0] = 6
    assert read[0].tolist() == [5, 0]
    assert read[1].tolist() == [6, 0]


def header_of(path):
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def with_header(path, header, data):
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h["0"].update(data_offsets=[8, 40]),
        lambda h: h["0"].update(shape=[10**12]),
        lambda h: h["0"].update(shape=[-4]),
        lambda h: h["0"].update(dtype="F99"),
        lambda h: h["0"].pop("dtype"),
        lambda h: h.update(more={"dtype": "U8", "shape": [10**15], "data_offsets": [32, 10**15]}),
        lambda h: h.update({"0": 5}),
        lambda h: h.update(__metadata__=3),
    ],
)
def test_an_inconsistent_header_is_refused_before_memory_is_taken(change, tmp_path):
    path = save_model(tmp_path / "m.safetensors", [np.arange(4.0)])
    header, data = header_of(path)
    change(header)
    with pytest.raises(CheckpointError) as caught:
        load_model(with_header(path, header, data))
    assert caught.value.entry == str(path)


def test_a_file_cut_anywhere_is_refused(tmp_path):
    path = save_model(tmp_path / "m.safetensors", [np.arange(4.0)])
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"m\.safetensors"):
            load_model(path)
    path.write_bytes(whole + b"x")
    with pytest.raises(CheckpointError):
        load_model(path)


def test_no_file_is_said_so(tmp_path):
    with pytest.raises(CheckpointError) as caught:
        load_model(tmp_path / "absent.safetensors")
    assert isinstance(caught.value.__cause__, FileNotFoundError)


def test_a_failed_write_leaves_the_model_before(tmp_path):
    path = save_model(tmp_path / "m.safetensors", [np.ones(1)])
    with pytest.raises(CheckpointError, match=r"state\['f'\]"):
        save_model(path, {"f": open})
    assert load_model(path)[0][0] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["m.safetensors"]


def test_others_may_read_it(tmp_path):
    path = save_model(tmp_path / "m.safetensors", [np.ones(1)])
    (tmp_path / "plain").write_text("")
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_views_that_overlap_are_stored_apart(tmp_path):
    base = torch.arange(6.0)
    read = load_model(save_model(tmp_path / "m.safetensors", [base[:4], base[2:], base[::2]]))
    assert [t.tolist() for t in read] == [[0, 1, 2, 3], [2, 3, 4, 5], [0, 2, 4]]


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # as if it were not installed
import numpy as np
from miniray.errors import CheckpointError
from miniray.train import load_model, save_model
read = load_model(save_model("numpy.safetensors", {"w": np.arange(3.0), "flag": np.array(True)}))
assert read["w"].tolist() == [0, 1, 2] and read["flag"].dtype == bool
for name in ("bf16", "list"):
    try:
        load_model(f"{name}.safetensors")
    except CheckpointError as error:
        assert error.entry == f"{name}.safetensors"
        print(error)
"""


def test_numpy_needs_no_torch_and_torch_is_asked_for_by_name(tmp_path):
    safetensors.torch.save_file({"a": torch.ones(2).bfloat16()}, tmp_path / "bf16.safetensors")
    save_model(tmp_path / "list.safetensors", [torch.ones(2)])
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], cwd=tmp_path, capture_output=True, text=True,
        timeout=50, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    asked = [line for line in done.stdout.splitlines() if "pip install torch" in line]
    assert [line.split()[2] for line in asked] == ["bf16.safetensors", "list.safetensors"]
