"""Every test has an assertion: a test that only runs code can fail only if that code raises."""

import ast
import functools
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent
FILES = sorted(ROOT.rglob("test_*.py"))


@functools.cache
def read_module(path):
    """Return the definitions in a file by name, and ``{name: (file, name there)}`` of imports."""
    definitions, imports = {}, {}
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            definitions.setdefault(node.name, []).append(node)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests"):
            source = ROOT.parent.joinpath(*node.module.split("."))
            for alias in node.names:
                is_module = (source / f"{alias.name}.py").exists()
                file = source / alias.name if is_module else source
                imports[alias.asname or alias.name] = file.with_suffix(".py"), alias.name
    return definitions, imports


def find_definitions(name, path):
    """Return ``(definition, file)`` pairs of what a name, or ``module.name``, in a file may be."""
    if not path.exists():
        return []
    definitions, imports = read_module(path)
    first, _, last = name.partition(".")
    if first in imports:
        file, original = imports[first]
        return find_definitions(last or original, file)
    if first == "self" or not last:
        found = [(node, path) for node in definitions.get(last or first, ())]
        return found or find_in_conftests(name, path)
    return []


def find_in_conftests(name, path):
    """Return the definitions of a fixture in the ``conftest.py`` files that apply to a file."""
    files = [file for folder in path.parents if (file := folder / "conftest.py").exists()]
    return [(node, file) for file in files for node in read_module(file)[0].get(name, ())]


def has_assertion(node, path, seen=frozenset()):
    """Return whether a function asserts something, itself or in a helper that it mentions.

    Nested functions and classes count, and so do classes that it names: their assertions may run
    in workers.
    """
    names = []
    for inner in ast.walk(node):
        if isinstance(inner, ast.Assert):
            return True
        if isinstance(inner, ast.Raise) and "AssertionError" in ast.unparse(inner):
            return True
        if isinstance(inner, (ast.Name, ast.Attribute)):
            names.append(ast.unparse(inner))
    if any(n in ("pytest.raises", "pytest.warns") or ".assert_" in n for n in names):
        return True
    helpers = [found for name in dict.fromkeys(names) for found in find_definitions(name, path)]
    return any(
        has_assertion(helper, file, seen | {helper})
        for helper, file in helpers
        if helper not in seen and helper is not node
    )


def find_tests_without_assertion(path):
    functions = [
        node
        for name, nodes in read_module(path)[0].items()
        for node in nodes
        if name.startswith("test_") and not isinstance(node, ast.ClassDef)
    ]
    return [node.name for node in functions if not has_assertion(node, path)]


@pytest.mark.parametrize("folder", sorted({path.parent for path in FILES}), ids=lambda p: p.name)
def test_every_test_has_an_assertion(folder):
    files = [path for path in FILES if path.parent == folder]
    assert {
        path.name: names for path in files if (names := find_tests_without_assertion(path))
    } == {}


SAMPLE = """
from tests.conformance.helpers import eventually

def check(value):
    assert value

class Worker:
    def step(self):
        assert True

def run(): pass
def test_bare(golden): run()
def test_of_a_method(tmp_path): tmp_path.check()
def test_with_assert(): assert True
def test_with_helper(): check(1)
def test_with_imported_helper(): eventually(run)
def test_with_worker(): run(Worker)
def test_with_fixture(golden): golden("name", "text")
"""


def test_a_test_without_assertion_is_found(tmp_path):
    (tmp_path / "conftest.py").write_text("def golden():\n    assert compare")
    path = tmp_path / "test_sample.py"
    path.write_text(SAMPLE)
    assert find_tests_without_assertion(path) == ["test_bare", "test_of_a_method"]
