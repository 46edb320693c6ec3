"""Where in the user's code a call came from: the first frame outside of torch and miniray.

Looking costs some hundred nanoseconds: a frame's code object is judged once, and an instruction is
turned into a text once.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
import sysconfig
from types import CodeType, FrameType
from typing import Any

from miniray.doctor.model import Site

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STDLIB = (sysconfig.get_path("stdlib") + os.sep, sysconfig.get_path("platstdlib") + os.sep)
#: Packages whose lines say nothing to a user while one of their own lines is on the stack.
_FRAMEWORKS = (
    "lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities", "accelerate",
    "ray", "transformers", "tqdm", "torchmetrics",
)  # fmt: skip
#: miniray's own loops: said where no line of the user's is on the stack.
_LOOPS = tuple(os.path.join(_HERE, name, "") for name in ("train", "rl"))
#: What forks the workers of actors. It was started by ``python -c``: no line of the user's.
_ZYGOTE = os.path.join("miniray", "core", "local", "zygote.py")
#: What torch.compile has written: modules of inductor's cache, named by their hash, and graphs.
_GENERATED = re.compile(r"[/\\](\w\w)[/\\]c\1\w{40,}\.py$|<eval_with_key>")
_DEEPEST = 80

#: Whose a line of code is.
OWN, FRAMEWORK, USERS = 0, 1, 2
# By the id of the code object, which is kept so that the id stays its own: to hash a code object is
# to hash all that is in it, every time. Of ours: None; else the texts of its lines, by instruction
# (to find an instruction's line takes longer), the user's in a dict, a framework's in a _Framework.
_codes: dict[int, dict[int, str] | None] = {}
_kept: list[CodeType] = []


class _Framework(dict[int, str]):
    """Lines that are said only where none of the user's is further out."""


def kind_of(filename: str) -> int:
    """Whose a file is: ours or Python's or torch's, another framework's, or the user's."""
    inside = "site-packages" + os.sep
    installed = filename.rpartition(inside)
    package = installed[2].partition(os.sep)[0].partition(".")[0] if installed[1] else ""
    if package in _FRAMEWORKS or filename.startswith(_LOOPS):
        return FRAMEWORK
    if filename.startswith((_HERE, "<frozen")) or package == "torch":
        return OWN
    if not package and (filename.startswith(_STDLIB) or _GENERATED.search(filename)):
        return OWN
    return USERS


def is_users(filename: str) -> bool:
    return kind_of(filename) == USERS


def short(site: Site) -> str:
    """``train.py``; of code that is not the user's with its folder: ``distributed/run.py``"""
    parts = site.file.replace("\\", "/").split("/")
    return "/".join(parts[-1:] if is_users(site.file) else parts[-2:])


def without_boot(stack: tuple[Site, ...]) -> tuple[Site, ...]:
    """A stack, innermost first, without the command line that started a miniray worker."""
    booted = len(stack) > 1 and stack[-1].file == "<string>" and stack[-2].file.endswith(_ZYGOTE)
    return stack[:-1] if booted else stack


def call_site(frame: FrameType | None) -> str:
    """The site of a call, from ``frame`` outwards, as "file\\0line\\0function"; "" for none."""
    first: Any = frame
    try:
        # What happens each time, all lines being known: ours and torch's are left out, until the
        # user's. The rest is for a line that is met for the first time and for other frameworks.
        lines = _codes[id(first.f_code)]
        while lines is None:
            first = first.f_back
            lines = _codes[id(first.f_code)]
        if lines.__class__ is dict:
            return lines[first.f_lasti]
    except (KeyError, AttributeError):  # AttributeError: no frame is left
        pass
    return _find(frame)


def is_at(frame: FrameType, site: str) -> bool:
    """Whether the site that ``call_site`` gave is this frame's, and of the user's own code."""
    lines = _codes.get(id(frame.f_code))
    return lines.__class__ is dict and lines is not None and lines.get(frame.f_lasti) == site


def _find(frame: FrameType | None) -> str:
    outer: FrameType | None = None
    inner = frame
    for _ in range(_DEEPEST):
        if frame is None:
            break
        code = frame.f_code
        try:
            lines = _codes[id(code)]
        except KeyError:
            lines = _judge(code, inner)
        if lines is not None:
            if lines.__class__ is dict:
                return lines.get(frame.f_lasti) or _line(frame, lines)
            if outer is None:
                outer = frame
        inner, frame = frame, frame.f_back
    lines = _codes[id(outer.f_code)] if outer is not None else None
    if outer is None or lines is None:
        return ""
    return lines.get(outer.f_lasti) or _line(outer, lines)


def _judge(code: CodeType, inner: FrameType | None) -> dict[int, str] | None:
    kind = kind_of(code.co_filename)
    if code.co_filename == "<string>" and inner is not None:
        kind = OWN if inner.f_code.co_filename.endswith(_ZYGOTE) else kind
    _kept.append(code)
    lines = None if kind == OWN else _Framework() if kind == FRAMEWORK else {}
    _codes[id(code)] = lines
    return lines


def _line(frame: FrameType, lines: dict[int, str]) -> str:
    code = frame.f_code
    text = f"{os.path.abspath(code.co_filename)}\0{frame.f_lineno}\0{code.co_name}"
    lines[frame.f_lasti] = text
    return text


def here() -> str:
    """The site of whoever called the function that calls this."""
    return call_site(sys._getframe(2))


def definition_site(function: Any) -> str:
    """Return the site of a function's definition; "" for one without Python code."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return ""
    return f"{os.path.abspath(code.co_filename)}\0{code.co_firstlineno}\0{code.co_name}"


def error_site(error: BaseException) -> Site:
    """The innermost line of the user's own code in the traceback, else the innermost line."""
    found = innermost = Site("", 0, "")
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        innermost = Site(os.path.abspath(code.co_filename), trace.tb_lineno, code.co_name)
        if kind_of(code.co_filename) == USERS:
            found = innermost
        trace = trace.tb_next
    return found if found.file else innermost
