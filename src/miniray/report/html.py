"""Build HTML elements.

Plain strings of type ``str`` are escaped, and ``Markup`` objects are inserted unchanged.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

#: Terminal escape sequences: colors and cursor moves (CSI), titles and links (OSC).
_ESCAPE_SEQUENCES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\))")


class Markup(str):
    """Text that is already valid HTML and must not be escaped."""


def strip_escapes(text: str) -> str:
    """Remove terminal escape sequences, such as those for colors and cursor movements."""
    return _ESCAPE_SEQUENCES.sub("", text)


def render_terminal_line(line: str) -> str:
    """Return a line of output as a terminal would display it, but without colors.

    If the line contains several updates of a progress bar, only the last update is kept.
    """
    return strip_escapes(line.rstrip("\r").rpartition("\r")[2])


def escape(value: Any) -> str:
    """Convert ``value`` to HTML.

    HTML doesn't allow control characters, so they are replaced by visible replacement characters.
    """
    if isinstance(value, Markup):
        return value
    text = "".join(
        c if c >= " " or c in "\n\t" else "\N{REPLACEMENT CHARACTER}"
        for c in strip_escapes(str(value))
    )
    return html.escape(text.encode("utf-8", "replace").decode())


def format_number(value: float) -> str:
    """Format a number in a compact form, such as ``0.0173``, ``1.44k`` or ``2.5e-07``."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    for unit, factor in (("G", 1e9), ("M", 1e6), ("k", 1e4)):
        if factor <= size < 1e13:
            return f"{value / (factor if unit != 'k' else 1e3):.4g}{unit}"
    if size and size < 1e-4:
        return f"{value:.2g}"
    return f"{round(value, 12):.4g}"


def render_code_spans(text: str) -> Markup:
    """Escape the text, and convert the parts in backquotes to ``<code>`` elements."""
    return Markup(re.sub(r"`([^`\n]+)`", r"<code>\1</code>", escape(text)))


# -- elements -------------------------------------------------------------------------------------


def tag(name: str, *inside: Any, **attributes: Any) -> Markup:
    """Return an HTML element. For example, ``tag("p", "text", cls="soft")`` returns a paragraph."""
    rendered = "".join(
        f' {"class" if key == "cls" else key}="{escape(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{rendered}>{''.join(map(escape, inside))}</{name}>")


def table(
    head: Sequence[Any], rows: Sequence[Sequence[Any]], *, texts: Sequence[int] = (0,)
) -> Markup:
    """Return a table that scrolls horizontally if it is too wide for the page.

    Columns that contain only None are omitted. ``texts`` contains the indices of the columns that
    are aligned to the left.
    """
    used = [i for i in range(len(head)) if any(row[i] is not None for row in rows)]

    def line(cells: Sequence[Any], kind: str) -> Markup:
        left = ["s" if i in texts else None for i in used]
        return tag(
            "tr",
            *(tag(kind, format_cell(cells[i]), cls=s) for i, s in zip(used, left, strict=True)),
        )

    body = tag("tbody", *(line(cells, "td") for cells in rows))
    return tag("div", tag("table", tag("thead", line(head, "th")), body), cls="wide", tabindex="0")


def format_cell(value: Any) -> Any:
    """Format a value for display in a table."""
    if value is None:
        return Markup('<span class="soft">–</span>')
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return format_number(value) if math.isfinite(value) else tag("b", str(value), cls="bad")
    if isinstance(value, int):
        return f"{value:,}" if abs(value) < 10**15 else str(value)
    return value


def definition_list(pairs: Iterable[tuple[Any, Any]]) -> Markup:
    """Return a description list of names and values. Pairs whose value is None are omitted."""
    rows = [
        tag("div", tag("dt", _add_line_breaks(name)), tag("dd", format_cell(value)))
        for name, value in pairs
        if value is not None
    ]
    return tag("dl", *rows)


def _add_line_breaks(name: Any) -> Markup:
    """Escape a name, and allow line breaks after its dots and underscores."""
    return Markup(re.sub(r"([._])(?=\w)", r"\1<wbr>", escape(name)))


def section(name: str, title: str, *inside: Any, note: str = "") -> Markup:
    """Return a section with an ID and a heading, or an empty string if it has no content."""
    if not any(inside):
        return Markup()
    paragraph = tag("p", note, cls="soft") if note else ""
    return tag("section", tag("h2", title), paragraph, *inside, id=name)


def collapsible(title: str, inside: Markup) -> Markup:
    """Return an element that shows only its title until the user expands it."""
    return tag("details", tag("summary", title), inside)


def figure(title: Any, drawing: str, legend: Iterable[tuple[str, str, str]] = ()) -> Markup:
    """Return a chart with a title and a legend.

    ``legend`` contains a ``(color, name, value)`` tuple for each curve.
    """
    keys = [
        tag("span", Markup(f'<i style="background:{color}"></i>'), name, " ", tag("b", value))
        for color, name, value in legend
    ]
    shown = tag("div", *keys, cls="keys") if keys else ""
    return tag("figure", tag("figcaption", title), shown, Markup(drawing))


def bar(parts: Sequence[tuple[str, float, str, str]], total: float) -> Markup:
    """Return a stacked bar.

    Each part is a ``(CSS class, size, tooltip, text)`` tuple. The text is shown inside the bar if
    the part is large enough.
    """
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
