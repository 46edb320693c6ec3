"""What the documentation shows is run: every Python block, each in a process of its own.

A block runs on the default engine in an empty folder. ``<!-- no-run -->`` on the line before leaves
it out. ``<!-- output -->`` before a block that follows says what the Python block above it prints
(``...`` stands for anything).
"""

import dataclasses
import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    p
    for p in [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *sorted((ROOT / "docs").glob("*.md")),
        *sorted((ROOT / "src").rglob("README.md")),
    ]
    if p.exists()
]

#: Seconds a block may take, start of an engine included.
LIMIT = 50

FENCE = re.compile(
    r"^(?:<!-- (?P<mark>[a-z-]+) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")


@dataclasses.dataclass
class Block:
    page: Path
    line: int
    code: str
    output: str | None = None

    def __str__(self):
        return f"{os.path.relpath(self.page, ROOT)}:{self.line}"


def blocks_of(page, text):
    """The Python blocks to run, with the output announced for them."""
    blocks, last = [], None
    for match in FENCE.finditer(text):
        mark, language, content = match["mark"], match["language"], match["text"]
        if mark not in (None, "no-run", "output"):
            raise ValueError(f"{page}: unknown mark <!-- {mark} -->")
        line = text.count("\n", 0, match.start("text")) + 1
        if mark == "output":
            if last is None:
                raise ValueError(f"{page}:{line}: output without a Python block that is run")
            last.output = content
        elif language == "python":
            last = None
            if mark != "no-run":
                last = Block(page, line, content)
                blocks.append(last)
    return blocks


BLOCKS = [block for page in PAGES for block in blocks_of(page, page.read_text("utf-8"))]


def run(block, folder):
    script = folder / "block.py"
    # Empty lines in front: line numbers in a traceback are those of the page.
    script.write_text("\n" * (block.line - 1) + block.code, "utf-8")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MINIRAY_")}
    done = subprocess.run(
        [sys.executable, script.name],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    if done.returncode != 0:
        raise AssertionError(f"{block} exits with {done.returncode}\n{done.stdout}\n{done.stderr}")
    if block.output is not None:
        flags = doctest.ELLIPSIS
        if not doctest.OutputChecker().check_output(block.output, done.stdout, flags):
            raise AssertionError(f"{block} should print\n{block.output}\nbut prints\n{done.stdout}")


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_block_runs(block, tmp_path):
    run(block, tmp_path)


def test_the_guides_have_blocks():
    pages = {block.page.name for block in BLOCKS}
    assert {"README.md", "engine.md"} <= pages


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_within_the_project_lead_somewhere(page):
    text = FENCE.sub("", page.read_text("utf-8"))
    targets = [m["target"].partition("#")[0] for m in LINK.finditer(text)]
    inside = [t for t in targets if t and "://" not in t and not t.startswith("mailto:")]
    assert [t for t in inside if not (page.parent / t).exists()] == []


# -- the checker itself --------------------------------------------------------------------------

PAGE = """
```python
print("one")
```
<!-- output -->
```text
one
```
<!-- no-run -->
```python
never
```
```bash
not python
```
```python
print("two")
```
"""


def test_blocks_are_found_with_line_and_output():
    found = blocks_of(Path("page.md"), PAGE)
    assert [(b.line, b.code, b.output) for b in found] == [
        (3, 'print("one")\n', "one\n"),
        (17, 'print("two")\n', None),
    ]


@pytest.mark.parametrize(
    ("code", "output", "complaint"),
    [
        ("print('one')", "two\n", "should print"),
        ("raise SystemExit(3)", None, "exits with 3"),
        ("\n1 / 0", None, "line 8"),
    ],
)
def test_a_block_that_is_wrong_fails(code, output, complaint, tmp_path):
    with pytest.raises(AssertionError, match=complaint):
        run(Block(Path("page.md"), 7, code, output), tmp_path)


def test_output_without_a_block_is_an_error():
    with pytest.raises(ValueError, match="output without"):
        blocks_of(Path("page.md"), "<!-- output -->\n```text\nx\n```\n")


def test_an_unknown_mark_is_an_error():
    with pytest.raises(ValueError, match="unknown mark"):
        blocks_of(Path("page.md"), "<!-- norun -->\n```python\nx\n```\n")
