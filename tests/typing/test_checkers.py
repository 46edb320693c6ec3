"""What mypy and pyright make of miniray: what they reveal and where they complain.

The files in ``cases`` say it themselves, line by line: ``# reveal: TYPE`` and ``# error``.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# A few seconds each, and many times that beside other tests.
pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent / "cases"
CASES = [HERE / "actors.py", HERE / "functions.py", HERE / "trainers.py"]
#: What mypy sees only with the plugin; pyright, which has none, sees handles of anything.
WITH_PLUGIN = [*CASES, HERE / "plain.py"]


def expected(path):
    """{line: what is revealed there, or "error"}."""
    found = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        reveal = re.search(r"  # reveal: (.+)$", line)
        if reveal:
            found[number] = reveal[1]
        elif re.search(r"  # error$", line):
            found[number] = "error"
    return found


def plain(revealed):
    """A type without the modules its parts are from."""
    return re.sub(r"\b(?:\w+\.)+(?=\w)", "", revealed)


def mypy(tmp_path, cases, plugins=""):
    """{file name: {line: ...}} by mypy."""
    settings = f"[mypy]\nstrict = true\nplugins = {plugins}\n"
    # With the sources of torch and transformers, mypy would need a minute.
    skipped = ("datasets", "fsspec", "numpy", "pandas", "pyarrow", "ray", "torch", "transformers")
    settings += f"[mypy-{','.join(f'{name}.*' for name in skipped)}]\nfollow_imports = skip\n"
    settings += "ignore_missing_imports = true\n"
    (tmp_path / "mypy.ini").write_text(settings)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "mypy", "--no-error-summary", "--no-pretty"),
            *("--config-file", "mypy.ini", "--cache-dir", str(tmp_path / "cache")),
            *map(str, cases),
        ],
        env={**os.environ, "MYPYPATH": str(ROOT / "src"), "PYTHONPATH": str(ROOT / "src")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = {path.name: {} for path in cases}
    for line in done.stdout.splitlines():
        where = re.match(r"(.+?):(\d+): (error|note): (.*)$", line)
        assert where, line
        name, number = Path(where[1]).name, int(where[2])
        revealed = re.match(r'Revealed type is "(.+)"$', where[4])
        if revealed:
            found[name][number] = plain(revealed[1])
        elif where[3] == "error":
            assert name in found, line
            found[name][number] = "error"
    return found


def pyright(tmp_path):
    """{file name: {line: ...}} by pyright."""
    command = shutil.which("pyright") or shutil.which("basedpyright")
    if command is None:
        pytest.skip("needs pyright on the PATH (npm install -g pyright)")
    settings = {"extraPaths": [str(ROOT / "src")], "typeCheckingMode": "standard"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    for path in CASES:
        shutil.copy(path, tmp_path)
    done = subprocess.run(
        [command, "--outputjson", "--pythonpath", sys.executable, *(p.name for p in CASES)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    found = {path.name: {} for path in CASES}
    for said in json.loads(done.stdout)["generalDiagnostics"]:
        lines = found[Path(said["file"]).name]
        number = said["range"]["start"]["line"] + 1
        revealed = re.match(r'Type of ".*" is "(.+)"$', said["message"])
        if revealed:
            lines[number] = revealed[1]
        elif said["severity"] == "error":
            lines[number] = "error"
    return found


def all_expected(cases):
    return {path.name: expected(path) for path in cases}


def test_every_file_expects_something():
    assert set(HERE.glob("*.py")) == set(WITH_PLUGIN)
    for path in WITH_PLUGIN:
        assert "error" in expected(path).values()


@pytest.mark.slow  # `make lint` runs it
def test_mypy(tmp_path):
    assert mypy(tmp_path, WITH_PLUGIN, "miniray.mypy_plugin") == all_expected(WITH_PLUGIN)


@pytest.mark.slow
def test_mypy_without_the_plugin(tmp_path):
    assert mypy(tmp_path, CASES) == all_expected(CASES)


@pytest.mark.slow
def test_pyright(tmp_path):
    assert pyright(tmp_path) == all_expected(CASES)
