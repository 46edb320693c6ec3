"""`miniray status`: what is found, and what is said when something is missing."""

import json
import os

import pytest

import miniray
from miniray import limits
from miniray.cli import status


def test_json_is_for_programs(miniray_cli):
    done = miniray_cli("status", "--json")
    found = json.loads(done.stdout)
    assert found["miniray"] == miniray.__version__
    assert found["cpus"] == limits.cpu_count()
    assert found["memory_bytes"] == limits.memory_total()
    assert [b["name"] for b in found["backends"]] == ["inline", "local", "ray"]


@pytest.mark.parametrize(
    ("version", "available", "reason"),
    [
        (None, False, "not installed"),
        ("2.9.3", False, "2.9.3"),
        ("2.39.0", False, "2.40"),
        ("2.40.0", True, "Ray 2.40.0"),
        ("3.0.0.dev0", True, "Ray 3.0.0.dev0"),
    ],
)
def test_ray_is_usable_from_2_40_on(monkeypatch, version, available, reason):
    monkeypatch.setattr(status, "_version", {"ray": version}.get)
    ray = status.backends()[-1]
    assert (ray["name"], ray["available"]) == ("ray", available)
    assert reason in ray["reason"]


def test_what_is_not_installed_is_listed(monkeypatch, capsys):
    real = status._version
    monkeypatch.setattr(status, "_version", lambda name: None if name == "ray" else real(name))
    status._show(status.collect())
    shown = capsys.readouterr().out
    assert "not installed" in shown
    assert "miniray[ray]" in shown


def fake_nvidia_smi(folder, monkeypatch, script):
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_gpus_are_those_the_engine_may_use(tmp_path, monkeypatch):
    lines = "0, GPU-aa, Model A, 1024\n1, GPU-bb, Model B, 2048\n2, GPU-cc, Model C, 4096"
    fake_nvidia_smi(tmp_path, monkeypatch, f"cat <<'END'\n{lines}\nEND")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-bb")
    assert status.gpus() == [
        {"id": "2", "name": "Model C", "memory_bytes": 4096 * 2**20},
        {"id": "GPU-bb", "name": "Model B", "memory_bytes": 2048 * 2**20},
    ]


@pytest.mark.parametrize("script", ["exit 9", "echo 'Failed to initialize NVML, x, y, z'"])
def test_a_broken_nvidia_smi_leaves_the_ids(tmp_path, monkeypatch, script):
    fake_nvidia_smi(tmp_path, monkeypatch, script)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert status.gpus() == [{"id": "0", "name": None, "memory_bytes": None}]
