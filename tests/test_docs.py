"""Run the code of the documentation and check its links.

Each Python block runs on the default engine in an empty folder; equal blocks run once. The blocks
of a page run in order in one new interpreter, because starting it takes most of their time; those
that need torch in a process that has it loaded. ``<!-- no-run -->`` on the line before a block
skips it. ``<!-- output -->`` before the block that follows marks the expected output of the Python
block above it (``...`` matches anything).
"""

import ast
import dataclasses
import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
RUNNER = Path(__file__).with_name("scripts") / "run_blocks.py"
README, CHINESE = ROOT / "README.md", ROOT / "README.zh-CN.md"
PAGES = [
    README,
    CHINESE,
    ROOT / "CONTRIBUTING.md",
    *sorted(page for page in DOCS.rglob("*.md") if page.parent.name != "api_templates"),
    *sorted((ROOT / "src").rglob("README.md")),
]

#: Seconds a block may take: a few, unless the machine is busy with other things.
LIMIT = 180

FENCE = re.compile(
    r"^(?:<!-- (?P<mark>[a-z-]+) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")
HEADING = re.compile(r"^(#+) (.*)$", re.MULTILINE)
#: A test named in a page: ``tests/x/test_y.py``, also with ``::test_z``; ``::test_z`` alone is of
#: the file named before it.
TEST_NAME = re.compile(r"`(tests/[\w/]+\.py)?(?:::(\w+))?`")
COMMAND = re.compile(r"^(?:\w+=\S+ )*miniray ([a-z]+)", re.MULTILINE)


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


def once(blocks):
    """The first of equal blocks."""
    return list({(block.code, block.output): block for block in reversed(blocks)}.values())[::-1]


BLOCKS = once([block for page in PAGES for block in blocks_of(page, page.read_text("utf-8"))])


def by_page(blocks):
    pages = dict.fromkeys(block.page for block in blocks)
    return {page: [block for block in blocks if block.page == page] for page in pages}


WITH_TORCH = by_page([block for block in BLOCKS if "torch" in block.code])
WITHOUT_TORCH = by_page([block for block in BLOCKS if "torch" not in block.code])


def run_interpreter(script, *arguments, **options):
    return subprocess.run(
        [sys.executable, script, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        **options,
    )


def run(blocks, folder, start=run_interpreter):
    """Run blocks in one process and compare what each prints with its expected output."""
    folders = []
    for number, block in enumerate(blocks):
        folders.append(folder / str(number))
        folders[-1].mkdir()
        # Empty lines in front: line numbers in a traceback are those of the page.
        (folders[-1] / "block.py").write_text("\n" * (block.line - 1) + block.code, "utf-8")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MINIRAY_")}
    done = start(RUNNER, *folders, cwd=folder, env=environment, timeout=LIMIT * len(blocks))
    started = [
        (block, *((place / name).read_text("utf-8") for name in ("out", "err")))
        for block, place in zip(blocks, folders, strict=True)
        if (place / "err").exists()
    ]
    if done.returncode != 0:
        block, out, err = started[-1] if started else (blocks[0], done.stdout, done.stderr)
        raise AssertionError(f"{block} exits with {done.returncode}\n{out}\n{err}")
    assert len(started) == len(blocks), f"the process ended in {started[-1][0]}"
    checker = doctest.OutputChecker()
    for block, out, _ in started:
        expected = block.output
        if expected is not None and not checker.check_output(expected, out, doctest.ELLIPSIS):
            raise AssertionError(f"{block} should print\n{expected}\nbut prints\n{out}")


@pytest.mark.timeout(2 * LIMIT)
@pytest.mark.parametrize("page", WITHOUT_TORCH, ids=lambda page: os.path.relpath(page, ROOT))
def test_blocks_run(page, tmp_path):
    run(WITHOUT_TORCH[page], tmp_path)


@pytest.mark.timeout(2 * LIMIT)
@pytest.mark.parametrize("page", WITH_TORCH, ids=lambda page: os.path.relpath(page, ROOT))
def test_blocks_with_torch_run(page, tmp_path, run_script):
    run(WITH_TORCH[page], tmp_path, run_script)


def test_the_guides_have_blocks():
    pages = {block.page.name for block in BLOCKS}
    assert {"README.md", "engine.md", "quickstart.md", "migrate.md", "failures.md"} <= pages


# -- links ----------------------------------------------------------------------------------------


def prose(page):
    return FENCE.sub("", page.read_text("utf-8"))


def anchors_of(text):
    """The anchors GitHub and our site give the headings of a page."""
    found = set()
    for _, heading in HEADING.findall(text):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        found.add(re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-"))
    return found


def broken_links(page, text):
    """Links of a page that lead nowhere: no such file, or no such heading in it."""
    broken = []
    for target in (match["target"] for match in LINK.finditer(text)):
        if "://" in target or target.startswith("mailto:"):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        # The site has these two as pages of its own; see docs/hooks.py.
        there = path.exists() or (
            path.parent == DOCS and path.stem in ("changelog", "contributing")
        )
        if not there or (anchor and anchor not in anchors_of(prose(path))):
            broken.append(target)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: os.path.relpath(page, ROOT))
def test_links_within_the_project_lead_somewhere(page):
    assert broken_links(page, prose(page)) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: os.path.relpath(page, ROOT))
def test_tests_that_a_page_names_are_there(page):
    file = None
    for path, name in TEST_NAME.findall(prose(page)):
        file = ROOT / path if path else file
        if file is None or not (path or name):
            continue
        assert file.exists(), path
        assert not name or f"def {name}(" in file.read_text("utf-8"), f"{file.name}::{name}"


def test_commands_that_pages_name_are_there():
    from miniray.cli import COMMANDS

    for page in PAGES:
        for match in FENCE.finditer(page.read_text("utf-8")):
            if match["language"] == "bash":
                unknown = set(COMMAND.findall(match["text"])) - set(COMMANDS)
                assert not unknown, f"{page.name}: {unknown}"


# -- the two READMEs ------------------------------------------------------------------------------


def test_the_readmes_say_the_same():
    english, chinese = README.read_text("utf-8"), CHINESE.read_text("utf-8")
    each_other = {README.name, CHINESE.name}

    def shape(text):
        plain = FENCE.sub("", text)
        return {
            "headings": [len(level) for level, _ in HEADING.findall(plain)],
            "blocks": [without_words(match) for match in FENCE.finditer(text)],
            "links": sorted({m["target"] for m in LINK.finditer(plain)} - each_other),
            "tests": TEST_NAME.findall(plain),
            "table rows": len(re.findall(r"^\|", plain, re.MULTILINE)),
            "figures": figures_of(plain),
        }

    assert shape(chinese) == shape(english)


def without_words(block):
    """A block of code whose comments, each in its page's language, are still where they were."""
    return block["mark"], block["language"], re.sub(r" +# .*", " # ...", block["text"])


def figures_of(text):
    """Numbers in the tables of a page, line by line; each language has its own order of words."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [sorted(re.findall(r"\d[\d.,]*", re.sub(r"`[^`]*`", "", line))) for line in lines]


# -- the site -------------------------------------------------------------------------------------

API = {
    "miniray.md": "miniray",
    "train.md": "miniray/train",
    "ps.md": "miniray/ps",
    "data.md": "miniray/data",
    "rl.md": "miniray/rl",
    "doctor.md": "miniray/doctor",
}


@pytest.mark.parametrize(("page", "package"), API.items(), ids=list(API))
def test_the_reference_lists_everything_public(page, package):
    tree = ast.parse((ROOT / "src" / package / "__init__.py").read_text("utf-8"))
    public = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    text = (DOCS / "api_templates" / page).read_text("utf-8")
    listed = re.findall(rf"^::: {package.replace('/', '.')}\.(\w+)", text, re.MULTILINE)
    # Errors have a page of their own.
    missing = {n for n in public if n not in listed and not n.endswith("Error")}
    assert missing <= {"__version__", "errors"}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site: strict, and without a warning."""
    pytest.importorskip("mkdocs", reason="needs miniray[docs]")
    site = tmp_path_factory.mktemp("docs") / "site"
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    return site


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_site_is_whole_and_fetches_nothing_from_another_host(site):
    pages = {path.relative_to(site).as_posix() for path in site.rglob("*.html")}
    assert {"index.html", "quickstart.html", "api/train.html", "changelog.html"} <= pages
    for path in site.rglob("*.html"):
        text = path.read_text("utf-8")
        assert not re.findall(
            r"<(?:script|img|link rel=\"stylesheet\")[^>]*(?:src|href)=\"https?:", text
        )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_site_can_be_searched_from_disk(site, browser):
    page = browser.new_page()
    page.goto((site / "api" / "train.html").as_uri())
    page.keyboard.press("/")
    page.keyboard.type("hang_timeout")
    found = page.locator(".md-search-result__link").first
    found.wait_for()
    found.click()
    page.wait_for_url("file://**")
    assert "hang_timeout" in page.content()
    page.close()


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


def test_equal_blocks_are_run_once():
    first, second = (blocks_of(Path(name), PAGE) for name in ("a.md", "b.md"))
    assert [str(b.page) for b in once(first + second)] == ["a.md", "a.md"]


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
        run([Block(Path("page.md"), 7, code, output)], tmp_path)


def test_output_without_a_block_is_an_error():
    with pytest.raises(ValueError, match="output without"):
        blocks_of(Path("page.md"), "<!-- output -->\n```text\nx\n```\n")


def test_an_unknown_mark_is_an_error():
    with pytest.raises(ValueError, match="unknown mark"):
        blocks_of(Path("page.md"), "<!-- norun -->\n```python\nx\n```\n")


def test_links_that_lead_nowhere_are_found(tmp_path):
    page = tmp_path / "page.md"
    (tmp_path / "other.md").write_text("# A title, with `code` × more\n")
    page.write_text("## Here\n")
    text = (
        "[a](other.md) [b](other.md#a-title-with-code--more) [c](#here) [d](https://example.org/x)"
        "[e](none.md) [f](other.md#nothing) [g](#there) ![h](none.png)"
    )
    assert broken_links(page, text) == ["none.md", "other.md#nothing", "#there", "none.png"]
