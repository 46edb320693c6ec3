"""What is released: one version everywhere, a wheel and an sdist that are whole and small."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import miniray

pytestmark = pytest.mark.timeout(180)  # builds are quick, but not beside many others

ROOT = Path(__file__).resolve().parents[2]
#: Bytes. The wheel contains Python files only. A third of them are docstrings and comments.
LARGEST_WHEEL = 1_090_000
PYTHONS = ("3.10", "3.11", "3.12", "3.13")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A wheel and an sdist of the working tree: (wheel, sdist)."""
    pytest.importorskip("hatchling")
    return build(ROOT, tmp_path_factory.mktemp("dist"))


def build(tree, where, *options):
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(where), *options],
        cwd=tree,
        check=True,
        capture_output=True,
    )
    return next(where.glob("*.whl")), next(where.glob("*.tar.gz"), None)


def names(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        path = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(path).decode())


# -- one version ----------------------------------------------------------------------------------


def test_the_citation_has_the_version():
    text = (ROOT / "CITATION.cff").read_text()
    assert re.search(r"^version: (.+)$", text, re.MULTILINE)[1] == miniray.__version__


def test_the_changelog_has_the_version_or_what_comes():
    text = (ROOT / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## \[(.+?)\]", text, re.MULTILINE)
    assert headings[0] == "Unreleased" or headings[0] == miniray.__version__
    released = [heading for heading in headings if heading != "Unreleased"]
    assert not released or released[0] == miniray.__version__


def test_the_wheel_has_the_version_and_the_oldest_python(built):
    found = metadata(built[0])
    assert found["Version"] == miniray.__version__
    assert found["Requires-Python"] == ">=3.10"
    core = [line for line in found.get_all("Requires-Dist") if "extra ==" not in line]
    wanted = ["click", "cloudpickle", "numpy", "psutil", "rich", "safetensors", "tqdm"]
    assert sorted(re.match(r"[\w-]+", line)[0] for line in core) == wanted


def test_the_pythons_we_speak_of_are_those_we_try():
    project = (ROOT / "pyproject.toml").read_text()
    assert tuple(re.findall(r"Python :: (3\.\d+)", project)) == PYTHONS
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert "run: .ci/run" in workflow
    assert all(re.search(rf"\b{re.escape(version)}\b", workflow) for version in PYTHONS)


# -- what is in it --------------------------------------------------------------------------------


def test_the_wheel_is_small(built):
    assert built[0].stat().st_size < LARGEST_WHEEL


def test_the_wheel_has_all_of_the_package_and_nothing_else(built):
    found = names(built[0])
    packaged = {name for name in found if name.startswith("miniray/")}
    sources = {
        str(path.relative_to(ROOT / "src"))
        for path in (ROOT / "src" / "miniray").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    # What a demo is an example of comes along, so that `miniray demo` works without the sources.
    project = (ROOT / "pyproject.toml").read_text()
    scripts = set(re.findall(r'^"\S+" = "(miniray/demos/scripts/\S+)"$', project, re.MULTILINE))
    assert packaged == sources | scripts
    assert "miniray/py.typed" in packaged
    assert {name.split("/")[0].split("-")[0] for name in found} == {"miniray"}


def test_a_wheel_made_from_the_sdist_is_the_same(built, tmp_path):
    with tarfile.open(built[1]) as archive:
        archive.extractall(tmp_path, filter="data")
    tree = next(tmp_path.glob("miniray-*"))
    assert {"tests", "docs", "examples", "LICENSE", "CHANGELOG.md"} <= {
        p.name for p in tree.iterdir()
    }
    assert names(build(tree, tmp_path / "dist", "-t", "wheel")[0]) == names(built[0])


def test_the_wheel_works_where_nothing_else_of_the_project_is(built, tmp_path):
    with zipfile.ZipFile(built[0]) as archive:
        archive.extractall(tmp_path / "lib")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "sys.path = [p for p in sys.path if not p.endswith('/src')]\n"
        f"sys.path.insert(0, {str(tmp_path / 'lib')!r})\n"
        "import miniray\n"
        f"assert miniray.__file__.startswith({str(tmp_path)!r}), miniray.__file__\n"
        "@miniray.remote\n"
        "def double(x):\n"
        "    return 2 * x\n"
        "miniray.init(backend='inline')\n"
        "print(miniray.get(double.remote(21)))\n"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "MINIRAY"))}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.stdout == "42\n", done.stderr


# -- installed ------------------------------------------------------------------------------------


def interpreter(version):
    """An interpreter of that version that really starts, or None."""
    found = shutil.which(f"python{version}")
    if found is None:
        return None
    done = subprocess.run([found, "-c", "import venv"], capture_output=True, check=False)
    return found if done.returncode == 0 else None


USE = """
import miniray, numpy

class Adder(miniray.Actor):
    @miniray.method
    def add(self, x, y):
        return x + y

@miniray.remote
def total(array):
    return float(array.sum())

if __name__ == "__main__":
    miniray.init(num_workers=2)
    assert miniray.get(Adder.remote().add.remote(1, 2)) == 3
    assert miniray.get(total.remote(miniray.put(numpy.ones(200_000)))) == 200_000.0
    miniray.shutdown()
    print(miniray.__version__)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("version", PYTHONS)
def test_it_installs_clean_and_runs(built, tmp_path, version):
    """In an environment of its own, with what its metadata asks for and nothing else."""
    python = interpreter(version)
    if python is None:
        pytest.skip(f"no python{version} here")
    subprocess.run([python, "-m", "venv", str(tmp_path / "venv")], check=True)
    inside = str(tmp_path / "venv" / "bin" / "python")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "MINIRAY"))}
    subprocess.run(
        [inside, "-m", "pip", "install", "--quiet", str(built[0])], check=True, env=environment
    )
    subprocess.run([inside, "-m", "pip", "check"], check=True, env=environment)
    (tmp_path / "use.py").write_text(USE)
    done = subprocess.run(
        [inside, "use.py"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.stdout == f"{miniray.__version__}\n", done.stderr
    command = str(tmp_path / "venv" / "bin" / "miniray")
    assert subprocess.run([command, "--help"], capture_output=True, check=False).returncode == 0
