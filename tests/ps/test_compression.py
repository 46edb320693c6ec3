"""Compression of pushes: how exact, how small, and that nothing is lost in the long run."""

import numpy as np
import pytest

from miniray.errors import NonFiniteWeightsError, WeightsMismatchError
from miniray.ps import Client, create_parameter_server
from miniray.ps.compression import Compressed, decode, encode
from tests.ps.helpers import call


def test_bf16_by_hand():
    numbers = np.array([1.0, -2.5, 1 + 2**-8, 1 + 3 * 2**-8, 0.0], np.float32)
    (bits,) = encode("bf16", numbers)
    assert bits.dtype == np.uint16
    # 8 bits of precision; exactly between two it goes to the even one.
    assert decode("bf16", (bits,), 5).tolist() == [1, -2.5, 1, 1 + 2**-6, 0]


def test_int8_by_hand():
    numbers = np.array([127.0, -63.4, 0.6, 0.0], np.float32)
    levels, scale = encode("int8", numbers)
    assert (levels.tolist(), scale.tolist()) == ([127, -63, 1, 0], [1.0])
    assert decode("int8", (levels, scale), 4).tolist() == [127, -63, 1, 0]


@pytest.mark.parametrize("codec", ["bf16", "int8"])
@pytest.mark.parametrize("size", [0, 1, 4096, 10_001])
def test_the_error_is_bounded(codec, size):
    numbers = np.random.default_rng(1).normal(size=size).astype(np.float32)
    back = decode(codec, encode(codec, numbers), size)
    assert back.shape == numbers.shape
    largest = np.abs(numbers).max(initial=0)
    bound = np.abs(numbers) * 2**-8 if codec == "bf16" else largest / 127 / 2 * 1.001
    assert (np.abs(back - numbers) <= bound).all()


@pytest.mark.parametrize("codec", ["bf16", "int8"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_arrives(codec, bad):
    numbers = np.array([1, bad], np.float32)
    assert not np.isfinite(decode(codec, encode(codec, numbers), 2)).all()


@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_a_push_is_the_change_in_fewer_bytes(engine, codec):
    server = create_parameter_server(compression=codec)
    base = {"w": np.linspace(0, 1, 8192, dtype=np.float32), "n": 3}
    call(server, "set_weights", base)
    clients = [Client(server, i) for i in range(2)]
    all_pulled = [client.pull() for client in clients]
    for i, (client, pulled) in enumerate(zip(clients, all_pulled, strict=True)):
        parcel = client._compressed({"w": pulled["w"] + (i + 1), "n": 5}, *client._base)
        sent = sum(array.nbytes for array in parcel.entries[0])
        assert sent < base["w"].nbytes / (1.9 if codec == "bf16" else 3.9)
        client.push({"w": pulled["w"] + (i + 1), "n": 5})
    result = call(server, "pull_weights")
    assert np.allclose(result["w"], base["w"] + 1.5, atol=0.01)
    assert result["n"] == 5


@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_what_rounding_leaves_goes_with_the_next_push(engine, codec):
    """A small change beside a large one is rounded away each time; its sum is not."""
    server = create_parameter_server(compression=codec, mode="async")
    call(server, "set_weights", [np.zeros(2, np.float32)])
    client = Client(server, 0)
    for _ in range(200):
        weights = client.pull()[0]
        client.push([weights + np.array([1.0, 0.0017], np.float32)])
    assert client.pull()[0].tolist() == pytest.approx([200, 0.34], rel=0.02)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64"])
def test_torch(engine, dtype):
    torch = pytest.importorskip("torch")
    server = create_parameter_server(compression="bf16")
    start = [torch.zeros(4, 3, dtype=getattr(torch, dtype))]
    call(server, "set_weights", start)
    client = Client(server, 0)
    client.pull()
    client.push([start[0] + 2])
    result = client.pull()[0]
    assert result.dtype == start[0].dtype
    assert (result == 2).all()


def test_without_compression_a_client_forwards(engine):
    server = create_parameter_server()
    client = Client(server, "a")
    client.push([np.array([1.5])])
    assert client.pull()[0].tolist() == [1.5]


def test_nan_is_found_behind_compression(engine):
    server = create_parameter_server(compression="int8")
    call(server, "set_weights", [np.zeros(3)])
    client = Client(server, "a")
    client.pull()
    client.push([np.array([0, np.nan, 1])])
    with pytest.raises(NonFiniteWeightsError) as caught:
        client.pull()
    assert caught.value.workers == ("a",)


def test_a_parcel_for_a_server_without_weights(engine):
    server = create_parameter_server()
    with pytest.raises(ValueError, match="first push"):
        call(server, "push_weights", 0, Compressed("bf16", []))


@pytest.mark.parametrize("weights", [[np.zeros(4)], [np.zeros(3), np.zeros(3)], {"w": np.zeros(3)}])
def test_weights_unlike_those_pulled_are_refused_before_they_travel(engine, weights):
    server = create_parameter_server(compression="int8")
    call(server, "set_weights", [np.zeros(3)])
    client = Client(server, "a")
    client.pull()
    with pytest.raises(WeightsMismatchError):
        client.push(weights)
