"""Golden files of messages have entries of tests that use them, and no others."""

import ast
from pathlib import Path

import pytest

from tests.messages import read_messages, update_messages

ROOT = Path(__file__).resolve().parent
#: Fixtures that compare messages.
FIXTURES = {"check_message", "raises", "warns"}


@pytest.mark.parametrize("path", sorted(ROOT.glob("*/golden/messages.txt")), ids=str)
def test_each_entry_belongs_to_a_test(path):
    tests = {
        f"{file.name}::{node.name}"
        for file in path.parent.parent.glob("test_*.py")
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef) and FIXTURES & {arg.arg for arg in node.args.args}
    }
    names = {name.partition("[")[0].partition(" (")[0] for name in read_messages(path)}
    assert names
    assert names - tests == set()


def test_update_replaces_the_entries_of_one_test(tmp_path):
    path = tmp_path / "golden" / "messages.txt"
    update_messages(path, "test_b.py::test_b", {"test_b.py::test_b": "KeyError: 2\n\nmore"})
    update_messages(path, "test_a.py::test_a", {f"test_a.py::test_a{n}": n for n in ("", " (2)")})
    update_messages(path, "test_a.py::test_a", {"test_a.py::test_a": "ValueError: [1]"})
    assert list(read_messages(path).items()) == [
        ("test_a.py::test_a", "ValueError: [1]"),
        ("test_b.py::test_b", "KeyError: 2\n\nmore"),
    ]
