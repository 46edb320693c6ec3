"""Where in the user's code a call came from: the first frame outside of torch and miniray.

Looking costs some hundred nanoseconds: a frame's code object is judged once, and an instruction is
turned into a text once.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from types import CodeType, FrameType

from miniray.doctor.model import Site

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STDLIB = (sysconfig.get_path("stdlib") + os.sep, sysconfig.get_path("platstdlib") + os.sep)
#: Packages whose lines say nothing to a user while one of their own lines is on the stack.
_FRAMEWORKS = (
    "lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities", "accelerate",
    "ray", "transformers", "tqdm", "torchmetrics",
)  # fmt: skip
_DEEPEST = 80

#: Whose a line of code is.
OWN, FRAMEWORK, USERS = 0, 1, 2
# By the id of the code object, which is kept so that the id stays its own: to hash a code object is
# to hash all that is in it, every time.
_kinds: dict[int, int] = {}
_kept: list[CodeType] = []
_sites: dict[tuple[int, int], str] = {}


def kind_of(filename: str) -> int:
    """Whose a file is: ours or Python's or torch's, another framework's, or the user's."""
    inside = "site-packages" + os.sep
    installed = filename.rpartition(inside)
    package = installed[2].partition(os.sep)[0].partition(".")[0] if installed[1] else ""
    if filename.startswith((_HERE, "<frozen")) or package == "torch":
        return OWN
    if package in _FRAMEWORKS:
        return FRAMEWORK
    if not package and filename.startswith(_STDLIB):
        return OWN
    return USERS


def is_users(filename: str) -> bool:
    return kind_of(filename) == USERS


def call_site(frame: FrameType | None) -> str:
    """The site of a call, from ``frame`` outwards, as "file\\0line\\0function"; "" for none."""
    outer: FrameType | None = None
    for _ in range(_DEEPEST):
        if frame is None:
            break
        code = frame.f_code
        kind = _kinds.get(id(code))
        if kind is None:
            _kept.append(code)
            kind = _kinds[id(code)] = kind_of(code.co_filename)
        if kind == USERS:
            outer = frame
            break
        if kind == FRAMEWORK and outer is None:
            outer = frame
        frame = frame.f_back
    if outer is None:
        return ""
    code = outer.f_code
    key = id(code), outer.f_lasti  # the instruction: to find its line takes longer
    text = _sites.get(key)
    if text is None:
        text = f"{os.path.abspath(code.co_filename)}\0{outer.f_lineno}\0{code.co_name}"
        _sites[key] = text
    return text


def here() -> str:
    """The site of whoever called the function that calls this."""
    return call_site(sys._getframe(2))


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
