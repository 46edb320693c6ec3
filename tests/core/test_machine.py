"""GPUs and identity of the machine, and how its cores and GPUs are assigned."""

import pytest

from miniray.core import machine
from miniray.core.machine import Resources
from miniray.errors import ActorUnschedulableError


@pytest.mark.parametrize(
    ("visible", "ids"),
    [
        ("", []),
        ("-1", []),
        ("0", ["0"]),
        ("3,1", ["3", "1"]),
        ("2,-1,4", ["2"]),
        ("GPU-a", ["GPU-a"]),
    ],
)
def test_gpus_by_environment(monkeypatch, visible, ids):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine.gpu_ids() == ids


def test_gpus_by_driver(monkeypatch, tmp_path):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(machine, "_NVIDIA", tmp_path / "none")
    assert machine.gpu_ids() == []
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / "cards" / name).mkdir(parents=True)
    monkeypatch.setattr(machine, "_NVIDIA", tmp_path / "cards")
    assert machine.gpu_ids() == ["0", "1"]


def test_the_node_has_a_stable_id():
    assert machine.node_id() == machine.node_id()
    assert len(bytes.fromhex(machine.node_id())) == 28


def test_what_was_taken_is_not_free_until_given_back():
    resources = Resources(4, 2)
    grant = resources.take(3, 1)
    assert (resources.free_cpus, resources.free_gpus) == (1, 1)
    assert resources.take(2, 0) is None
    assert resources.take(0, 2) is None
    resources.give_back(grant)
    assert (resources.free_cpus, resources.free_gpus) == (4, 2)


def test_fractions_fill_one_gpu_before_the_next():
    resources = Resources(0, 2)
    grants = [resources.take(0, 0.3) for _ in range(4)]
    assert [grant.gpus for grant in grants] == [(0,), (0,), (0,), (1,)]
    assert resources.take(0, 1) is None
    for grant in grants:
        resources.give_back(grant)
    assert resources.free_gpus == 2
    assert resources.take(0, 2).gpus == (0, 1)


def test_what_can_never_fit_is_told_with_what_there_is():
    with pytest.raises(ActorUnschedulableError, match=r"\bf\b.*5 CPU.*4 CPU.*1 GPU "):
        Resources(4, 1).check("f", 5, 0)
    Resources(4, 1).check("f", 4, 1)
