"""Weights on a GPU: on their way to the host, and through a whole sync."""

import numpy as np
import pytest

import miniray
from miniray.ps import create_parameter_server, to_host
from tests.ps.helpers import call, weights_of, workers

torch = pytest.importorskip("torch")


def test_what_is_on_the_host_stays_as_it_is():
    weights = {"a": [torch.ones(2), np.zeros(3)], "b": (1.5, None)}
    moved = to_host(weights)
    assert moved["a"][0] is weights["a"][0]
    assert moved["a"][1] is weights["a"][1]
    assert moved["b"] == (1.5, None)


@pytest.mark.gpu
def test_to_host():
    weights = torch.nn.Linear(300, 200).cuda().state_dict()
    moved = to_host(weights)
    assert type(moved) is type(weights)
    for name, tensor in weights.items():
        assert moved[name].device.type == "cpu"
        assert moved[name].is_pinned()
        assert torch.equal(moved[name], tensor.cpu())


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(3,), (1000, 700)])
def test_cuda_tensors_arrive_on_the_host(engine, shape):
    tensor = torch.randn(shape, device="cuda").t() if len(shape) == 2 else torch.ones(3).cuda()
    back = miniray.get(miniray.put([tensor, torch.nn.Parameter(tensor), tensor.bfloat16()]))
    assert [t.device.type for t in back] == ["cpu"] * 3
    assert torch.equal(back[0], tensor.cpu())
    assert torch.equal(back[2], tensor.bfloat16().cpu())
    assert isinstance(back[1], torch.nn.Parameter)


@pytest.mark.gpu
def test_a_sync_of_cuda_weights(engine):
    server = create_parameter_server()
    handles = workers([torch.zeros(500_000)], [torch.full((500_000,), 2.0)])

    @miniray.remote
    class OnGpu:
        def get_weights(self):
            return [torch.full((500_000,), 4.0, device="cuda")]

        def set_weights(self, weights):
            self.weights = weights

    assert call(server, "sync_from_workers", [*handles, OnGpu.remote()])["synced"]
    assert (weights_of(handles)[0][0] == 2).all()
