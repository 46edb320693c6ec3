"""`import miniray` stays light: what it does not need is not loaded."""

import json
import subprocess
import sys

import pytest

HEAVY = ["torch", "ray", "numpy", "asyncio", "pyarrow", "multiprocessing", "rich", "tqdm", "click"]


def loaded_by(statement):
    code = f"{statement}; import sys, json; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    return json.loads(done.stdout)


def test_import_loads_nothing_heavy():
    modules = loaded_by("import miniray")
    assert "miniray.core.session" in modules
    assert [name for name in HEAVY if name in modules] == []


def test_import_starts_no_engine():
    modules = loaded_by("import miniray")
    assert [
        m
        for m in modules
        if m.startswith("miniray.core.") and m.split(".")[2] in ("inline", "local", "ray")
    ] == []


def test_the_command_line_loads_no_command():
    modules = loaded_by("import miniray.cli")
    assert "click" in modules
    light = [name for name in HEAVY if name != "click"]
    assert [name for name in light if name in modules] == []
    assert [m for m in modules if m.startswith("miniray.demos")] == []


@pytest.mark.parametrize("module", ["numpy", "torch"])
def test_the_check_sees_an_import(module):
    pytest.importorskip(module)
    assert module in loaded_by(f"import {module}")
