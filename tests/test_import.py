"""`import miniray` stays light: what it does not need is not loaded."""

import json
import subprocess
import sys

HEAVY = ["torch", "ray", "numpy", "asyncio", "pyarrow", "multiprocessing", "rich", "tqdm", "click"]

#: Modules that `import miniray` may load beside those of a bare interpreter, and of them its own.
MOST_MODULES, MOST_OWN = 75, 15


def loaded_by(statement):
    code = f"{statement}; import sys, json; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    return json.loads(done.stdout)


def test_import_loads_nothing_heavy():
    own = [name for name in loaded_by("import miniray") if name.startswith("miniray.")]
    assert own == ["miniray.lazy"]
    modules = loaded_by("import miniray; miniray.init")
    assert "miniray.core.session" in modules
    assert [name for name in HEAVY if name in modules] == []


def test_every_name_is_there_before_it_is_loaded():
    import miniray

    assert set(miniray.__all__) <= set(dir(miniray))
    assert [name for name in miniray.__all__ if getattr(miniray, name) is None] == []


def test_import_stays_small():
    """What takes the time of an import is how many modules it loads: 40 ms are some 60 of them."""
    bare = loaded_by("pass")
    own = [name for name in loaded_by("import miniray; miniray.init") if name not in bare]
    assert len([name for name in own if name.split(".")[0] == "miniray"]) <= MOST_OWN
    assert len(own) <= MOST_MODULES, own


def test_import_starts_no_engine():
    modules = loaded_by("import miniray; miniray.init")
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


def test_the_check_sees_an_import():
    assert "numpy" in loaded_by("import numpy")
