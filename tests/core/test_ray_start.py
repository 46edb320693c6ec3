"""What a Ray is started with, and which cluster is joined; nothing is started here."""

import pytest

pytest.importorskip("ray")

from miniray import limits
from miniray.core import ray as ray_engine
from miniray.core.engine import InitConfig


@pytest.mark.parametrize(
    ("config", "cpus"),
    [({}, 3), ({"num_workers": 2}, 3), ({"num_workers": 8}, 8), ({"num_cpus": 1.0}, 1)],
)
def test_ray_has_the_cores_of_this_process(monkeypatch, config, cpus):
    monkeypatch.setattr(limits, "cpu_count", lambda: 3)
    assert ray_engine._init_arguments(InitConfig(**config), None)["num_cpus"] == cpus


@pytest.mark.parametrize(
    ("limit", "asked", "size"),
    [
        (None, None, None),
        (1_000_000_000, None, 300_000_000),
        (100_000_000, None, 75 << 20),  # the least that Ray accepts
        (1_000_000_000, 400_000_000, 400_000_000),
    ],
)
def test_rays_object_store_respects_the_memory_limit(monkeypatch, limit, asked, size):
    monkeypatch.setattr(limits, "memory_limit", lambda: limit)
    arguments = ray_engine._init_arguments(InitConfig(object_store_memory=asked), None)
    assert arguments["object_store_memory"] == size
