"""Text for the page: everything that is not markup goes through ``escape``, in HTML and in SVG.

``Markup`` is what may go into the page as it is; anything else is text.
"""

from __future__ import annotations

import html
import math
import re
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
