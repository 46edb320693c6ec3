"""Pieces of the page. A plain ``str`` is text and is escaped, ``Markup`` goes in as it is."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

#: Of terminals: colours and the cursor (CSI), titles and links (OSC).
_SEQUENCES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\))")


class Markup(str):
    """Text that is HTML already."""


def uncoloured(text: str) -> str:
    """Without what colours a terminal or moves its cursor."""
    return _SEQUENCES.sub("", text)


def on_screen(line: str) -> str:
    """A line as a terminal leaves it: of a progress bar what was written last, in no colour."""
    return uncoloured(line.rstrip("\r").rpartition("\r")[2])


def escape(value: Any) -> str:
    """``value`` as HTML. Control characters, which no page may have, become visible."""
    if isinstance(value, Markup):
        return value
    text = "".join(
        c if c >= " " or c in "\n\t" else "\N{REPLACEMENT CHARACTER}"
        for c in uncoloured(str(value))
    )
    return html.escape(text.encode("utf-8", "replace").decode())


def short(value: float) -> str:
    """A number in at most seven characters: ``0.0173``, ``1.44k``, ``2.5e-07``."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    for unit, factor in (("G", 1e9), ("M", 1e6), ("k", 1e4)):
        if factor <= size < 1e13:
            return f"{value / (factor if unit != 'k' else 1e3):.4g}{unit}"
    if size and size < 1e-4:
        return f"{value:.2g}"
    return f"{round(value, 12):.4g}"


# -- elements -------------------------------------------------------------------------------------


def tag(name: str, *inside: Any, **attributes: Any) -> Markup:
    """``tag("p", "a < b", cls="soft")``"""
    named = "".join(
        f' {"class" if key == "cls" else key}="{escape(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{named}>{''.join(map(escape, inside))}</{name}>")


def table(
    head: Sequence[Any], rows: Sequence[Sequence[Any]], *, texts: Sequence[int] = (0,)
) -> Markup:
    """A table that scrolls sideways where it must. ``texts`` are the columns set to the left.

    A column of nothing but None is left out.
    """
    used = [i for i in range(len(head)) if any(row[i] is not None for row in rows)]

    def line(cells: Sequence[Any], kind: str) -> Markup:
        left = ["s" if i in texts else None for i in used]
        return tag(
            "tr", *(tag(kind, cell(cells[i]), cls=s) for i, s in zip(used, left, strict=True))
        )

    body = tag("tbody", *(line(cells, "td") for cells in rows))
    return tag("div", tag("table", tag("thead", line(head, "th")), body), cls="wide", tabindex="0")


def cell(value: Any) -> Any:
    """A value as a table shows it."""
    if value is None:
        return Markup('<span class="soft">–</span>')
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return short(value) if math.isfinite(value) else tag("b", str(value), cls="bad")
    if isinstance(value, int):
        return f"{value:,}" if abs(value) < 10**15 else str(value)
    return value


def facts(pairs: Iterable[tuple[Any, Any]]) -> Markup:
    """Names and values, side by side; nothing where the value is None."""
    rows = [
        tag("div", tag("dt", _breakable(name)), tag("dd", cell(value)))
        for name, value in pairs
        if value is not None
    ]
    return tag("dl", *rows)


def _breakable(name: Any) -> Markup:
    """A name that may go on in the next line after a dot or an underscore."""
    return Markup(re.sub(r"([._])(?=\w)", r"\1<wbr>", escape(name)))


def section(title: str, *inside: Any, note: str = "") -> Markup:
    """A part of the page; nothing where there is nothing in it."""
    if not any(inside):
        return Markup()
    said = tag("p", note, cls="soft") if note else ""
    anchor = "".join(c if c.isalnum() else "-" for c in title.lower())
    return tag("section", tag("h2", title), said, *inside, id=anchor)


def folded(title: str, inside: Markup) -> Markup:
    return tag("details", tag("summary", title), inside)


def figure(title: Any, drawing: str, legend: Iterable[tuple[str, str, str]] = ()) -> Markup:
    """A chart under its title; the legend is (colour, name, value) a line."""
    keys = [
        tag("span", Markup(f'<i style="background:{colour}"></i>'), name, " ", tag("b", value))
        for colour, name, value in legend
    ]
    shown = tag("div", *keys, cls="keys") if keys else ""
    return tag("figure", tag("figcaption", title), shown, Markup(drawing))


def bar(parts: Sequence[tuple[str, float, str, str]], total: float) -> Markup:
    """One bar of several parts: (class, size, title, text inside it)."""
    pieces = [
        tag(
            "i",
            text if size > 0.09 * total else "",
            cls=kind,
            title=title,
            style=f"width:{100 * size / total:.2f}%",
        )
        for kind, size, title, text in parts
        if total > 0 and size > 0
    ]
    return tag("div", *pieces, cls="bar")
