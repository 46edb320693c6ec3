"""The reference is generated from docstrings, and every public name on its pages has one."""

import functools
import importlib.util
import inspect
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parent.parent / "docs"


def load_generator():
    spec = importlib.util.spec_from_file_location("generate_api", DOCS / "generate_api.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GENERATOR = load_generator()
TEMPLATES = "\n".join(path.read_text("utf-8") for path in GENERATOR.TEMPLATES.glob("*.md"))


def listed():
    """Every name the pages of the reference ask for."""
    return [match["name"] for match in GENERATOR.ENTRY.finditer(TEMPLATES)]


def undocumented(name, thing):
    """The public names of ``thing`` that say nothing of themselves, itself among them.

    A method that overrides one with a docstring has said enough. What a class only inherits is its
    base's affair.
    """
    if not inspect.getdoc(thing):
        yield name
    if inspect.ismodule(thing):
        own = {k: v for k, v in vars(thing).items() if inspect.getmodule(v) is thing}
    elif inspect.isclass(thing):
        own = vars(thing)
    else:
        return
    for attribute, value in own.items():
        if attribute.startswith("_"):
            continue
        value = inspect.unwrap(getattr(value, "__func__", value))
        if inspect.isroutine(value) or inspect.isclass(value):
            yield from undocumented(f"{name}.{attribute}", getattr(thing, attribute))
        elif isinstance(value, (property, functools.cached_property)) and not inspect.getdoc(value):
            yield f"{name}.{attribute}"


def test_every_public_name_of_the_reference_has_a_docstring():
    pytest.importorskip("torch")
    assert [each for name in listed() for each in undocumented(name, GENERATOR.resolve(name))] == []


def test_pages_are_current():
    pytest.importorskip("torch")
    pytest.importorskip("pyarrow")
    stale = [
        path.name
        for path, text in GENERATOR.generate().items()
        if not path.exists() or path.read_text("utf-8") != text
    ]
    assert stale == [], "Run python docs/generate_api.py"


def test_inherited_methods_without_a_page_are_listed():
    pytest.importorskip("torch")
    for match in GENERATOR.ENTRY.finditer(TEMPLATES):
        for method in (match["inherited"] or "").split():
            thing = GENERATOR.resolve(match["name"])
            assert method not in vars(thing)
            assert inspect.getdoc(getattr(thing, method))
    assert re.search(r"^::: miniray\.rl\.PPOTrainer: train evaluate", TEMPLATES, re.MULTILINE)


class Example:
    """Hold ``rows`` *unchanged*.

    Args:
        first, second: Names of two columns, which
            are kept.

    Raises:
        ValueError: If ``first`` is ``**``.
    """

    def __init__(self, first: str, *, second: "list[int] | None" = None) -> None:
        pass

    def count(self, *names: str, key=len) -> int:
        """Return a number.

        For example::

            Example("a").count()

        All ``names`` count.
        """


def test_signatures_and_docstrings_become_markdown():
    text = "\n".join(GENERATOR.describe("miniray.Example", Example, []))
    assert "class miniray.Example(first: str, *, second: list[int] | None = None)" in text
    assert "Hold `rows` *unchanged*." in text
    assert "- `first`, `second`: Names of two columns, which are kept.\n" in text
    assert "**Raises**\n- `ValueError`: If `first` is `**`." in text
    assert "#### Example.count" in text
    assert "Example.count(*names: str, key=len) -> int" in text
    assert '```py\nExample("a").count()\n```' in text
