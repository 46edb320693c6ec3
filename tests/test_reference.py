"""The reference is made from docstrings: every public name on its pages has one."""

import functools
import importlib
import inspect
import re
from pathlib import Path

import pytest

PAGES = Path(__file__).resolve().parent.parent / "docs" / "api"


def listed():
    """Every name the pages of the reference ask for."""
    for page in sorted(PAGES.glob("*.md")):
        yield from re.findall(r"^::: (\S+)", page.read_text("utf-8"), re.MULTILINE)


def resolve(name):
    """The object of a dotted name: a module, or something in one."""
    module, rest = name, []
    while True:
        try:
            found = importlib.import_module(module)
            break
        except ModuleNotFoundError:
            module, _, last = module.rpartition(".")
            rest.insert(0, last)
    for attribute in rest:
        found = getattr(found, attribute)
    return found


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
    assert [each for name in listed() for each in undocumented(name, resolve(name))] == []


#: What users call on these and their bases bring, which have no page of their own.
INHERITED = {
    "miniray.rl.PPOTrainer": "train evaluate load_checkpoint",
}


@pytest.mark.parametrize(("name", "members"), INHERITED.items())
def test_what_comes_from_a_base_without_a_page_is_on_that_of_the_class(name, members):
    pytest.importorskip("torch")
    pages = "\n".join(page.read_text("utf-8") for page in PAGES.glob("*.md"))
    asked = re.search(rf"^::: {name}\n    options:\n      inherited_members: \[(.*)\]", pages, re.M)
    assert asked is not None
    for member in members.split():
        assert member in asked[1].split(", ")
        assert member not in vars(resolve(name))
        assert inspect.getdoc(getattr(resolve(name), member))


class Base:
    """Documented."""

    def told(self):
        """Told."""


class Derived(Base):
    """Documented."""

    def told(self): ...
    def untold(self): ...
    @property
    def empty(self): ...
    @classmethod
    def make(cls): ...
    def _private(self): ...


def test_the_check_sees_what_is_missing():
    assert list(undocumented("D", Derived)) == ["D.untold", "D.empty", "D.make"]
