"""Write docs/benchmarks.md, its plots, and all measured figures in the docs.

    python benchmarks/page.py            after a benchmark has written benchmarks/results/NAME.json
    python benchmarks/page.py --check    fails if a page is not what the results give
    python benchmarks/page.py --list     all figures by name, for quoting

The page's prose is in ``benchmarks/page/*.md``, a file a section, to be edited by hand. Figures in
it are placeholders: ``{{ engine.put.ratio }}``, ``{{ table: engine }}``, ``{{ plot: bench-ps }}``.
The first lines of a section say which results it needs and how to get them; without them the page
says so in its place. In any other page a measured figure is written as
``<!-- figure: engine.put.ratio -->0.9×<!-- /figure -->``, and a table stands between
``<!-- table: readme -->`` and ``<!-- /table -->``: this program keeps what is in between.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from pathlib import Path

import common
from page_figures import MAKERS, Record, figures, load
from page_plots import PLOTS
from page_tables import tables

ROOT = common.ROOT
SECTIONS = Path(__file__).with_name("page")
PAGE = "docs/benchmarks.md"
IMAGES = "docs/images"
NOTICE = (
    "<!-- Written by benchmarks/page.py from benchmarks/results; the prose is in "
    "benchmarks/page. Edits made here are lost. -->\n\n"
)

NEEDS = re.compile(r"\A<!-- results: (?P<results>[\w ]*) -->\n<!-- run: (?P<run>.*?) -->\n")
PLACEHOLDER = re.compile(r"\{\{ (?:(?P<kind>table|plot): )?(?P<name>[\w.=-]+) \}\}")
FIGURE = re.compile(r"(<!-- figure: ([\w.=-]+) -->)(.*?)(<!-- /figure -->)", re.DOTALL)
TABLE = re.compile(r"(<!-- table: ([\w-]+) -->\n)(.*?)(<!-- /table -->)", re.DOTALL)


class UnknownFigureError(KeyError):
    """A page quotes a figure that no result gives."""

    def __init__(self, where: str, name: str) -> None:
        super().__init__(name)
        self.where, self.name = where, name

    def __str__(self) -> str:
        return (
            f"{self.where} quotes {self.name}, which benchmarks/results does not give; "
            "`python benchmarks/page.py --list` shows what it gives"
        )


class Writer:
    """What all pages should be, given the results."""

    def __init__(self, results: dict[str, Record], root: Path = ROOT) -> None:
        self.root = root
        self.results = results
        self.figures = figures(results)
        self.tables = tables(results)
        self.plots = {
            name: drawn
            for name, (source, draw) in PLOTS.items()
            if source in results and (drawn := draw(results[source])) is not None
        }

    def files(self) -> dict[str, str]:
        """Text by path below the root: the page, its plots, and pages with marked figures."""
        found = {PAGE: self.page()}
        found |= {f"{IMAGES}/{name}.svg": text for name, text in self.plots.items()}
        for path in self.marked_pages():
            name = path.relative_to(self.root).as_posix()
            found[name] = self.marked(name, path.read_text("utf-8"))
        return found

    def unwanted(self) -> list[str]:
        """Plots of results that are not there any more."""
        drawn = (self.root / IMAGES).glob("bench-*.svg")
        return [p.relative_to(self.root).as_posix() for p in drawn if p.stem not in self.plots]

    def marked_pages(self) -> list[Path]:
        pages = [*self.root.glob("*.md"), *(self.root / "docs").rglob("*.md")]
        pages += [*(self.root / "recipes").rglob("*.md")]
        return sorted(page for page in pages if page != self.root / PAGE)

    def page(self) -> str:
        paths = sorted(SECTIONS.glob("*.md"))
        return NOTICE + "\n".join(self.section(p.name, p.read_text("utf-8")) for p in paths)

    def section(self, name: str, text: str) -> str:
        needs = NEEDS.match(text)
        if needs is None:
            raise ValueError(f"benchmarks/page/{name} must begin with the results it needs")
        text = text[needs.end() :]
        missing = [r for r in needs["results"].split() if r not in self.results]
        if missing:
            heading = next(line for line in text.splitlines() if line.startswith("#"))
            files = " and ".join(f"`{result}.json`" for result in missing)
            return (
                f"{heading}\n\nNot measured yet: there is no {files} in `benchmarks/results`. "
                f"`{needs['run']}` writes it, `python benchmarks/page.py` then this section.\n"
            )

        def fill(match: re.Match[str]) -> str:
            kind, key = match["kind"], match["name"]
            if kind == "plot":
                return self._plot(key)
            known = self.tables if kind == "table" else self.figures
            if key not in known:
                raise UnknownFigureError(f"benchmarks/page/{name}", key)
            return known[key]

        return PLACEHOLDER.sub(fill, text)

    def _plot(self, name: str) -> str:
        if name not in self.plots:  # the results have no peer to draw it against
            return ""
        title = re.search(r"<text [^>]*>(.*?)</text>", self.plots[name])
        assert title is not None
        return f"![{title[1]}](images/{name}.svg)"

    def marked(self, where: str, text: str) -> str:
        """``text`` with the figures and tables between its marks as the results give them."""

        def figure(match: re.Match[str]) -> str:
            if match[2] not in self.figures:
                raise UnknownFigureError(where, match[2])
            return match[1] + self.figures[match[2]] + match[4]

        def table(match: re.Match[str]) -> str:
            source = match[2].partition("-")[0]
            if match[2] in self.tables:
                return f"{match[1]}{self.tables[match[2]]}\n{match[4]}"
            if source not in MAKERS:
                raise UnknownFigureError(where, match[2])
            return f"{match[1]}Not measured yet: `make bench` measures it.\n{match[4]}"

        return TABLE.sub(table, FIGURE.sub(figure, text))


def differences(writer: Writer) -> str:
    """What a check complains of; empty if all pages are as they should be."""
    complaints = []
    for name, wanted in writer.files().items():
        path = writer.root / name
        there = path.read_text("utf-8") if path.exists() else ""
        if there != wanted:
            lines = difflib.unified_diff(
                there.splitlines(), wanted.splitlines(), name, "from the results", lineterm="", n=0
            )
            complaints.append("\n".join(list(lines)[:40]))
    complaints += [f"{name}: there are no results for it" for name in writer.unwanted()]
    return "\n".join(complaints)


def write(writer: Writer) -> list[str]:
    """Writes what differs and says what it wrote."""
    written = []
    for name, wanted in writer.files().items():
        path = writer.root / name
        if not path.exists() or path.read_text("utf-8") != wanted:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(wanted, "utf-8")
            written.append(name)
    for name in writer.unwanted():
        (writer.root / name).unlink()
        written.append(f"{name} (removed)")
    return written


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; fail if it would")
    parser.add_argument("--list", action="store_true", help="print all figures and tables by name")
    arguments = parser.parse_args()
    writer = Writer(load())
    if arguments.list:
        for name, text in writer.figures.items():
            print(f"{name:50} {text}")
        print("tables:", *writer.tables)
        return 0
    try:
        if arguments.check:
            found = differences(writer)
            if found:
                print(f"{found}\n\nrun `python benchmarks/page.py` to write them", file=sys.stderr)
            return 1 if found else 0
        for name in write(writer):
            print(f"wrote {name}")
    except UnknownFigureError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
