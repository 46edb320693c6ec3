"""How each worker's process of a failed run ended, where the doctor looks for it.

The workers are ended by the trainer, so none of them can say. The one whose error ended the run
gets that error into its black box; the others are noted as ended by their launcher, so that nobody
takes them for the cause. Called when the processes are gone. A worker without a box (on another
machine, say) is left out; one that wrote its own end is believed.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import time
from pathlib import Path
from typing import Any

from miniray.counting import format_epoch
from miniray.doctor import layout, runfile, sites
from miniray.doctor.box import Box
from miniray.errors import MinirayError, TaskError

_FRAME = re.compile(r'^ *File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)$', re.M)


def record_ends(ranks: Path, error: BaseException) -> None:
    """Write down for every box in ``ranks`` how its process ended in a run that ``error`` ended."""
    fields = vars(error) if isinstance(error, MinirayError) else {}
    guilty = fields.get("rank", fields.get("worker"))
    signal, code = fields.get("signal"), fields.get("exit_code")
    for path in ranks.glob("*.box"):
        if not path.stem.isdigit():
            continue
        if int(path.stem) != guilty:
            _note(path, signal="SIGKILL", by_launcher=True)
            continue
        if isinstance(error, TaskError) or (signal is None and code is None):
            _write(path, _exception(error))
        else:
            _note(path, signal=signal or "", code=code, by_launcher=False)


def _note(box: Path, **seen: Any) -> None:
    """What the launcher saw of the process's end."""
    text = json.dumps({"code": None, "at": time.time(), **seen})
    runfile.replace_text(box.with_suffix(".exit"), text + "\n")


def _exception(error: BaseException) -> dict[str, Any]:
    """``error`` as a rank would have written it, with worker and epoch in its first line."""
    cause: Any = error
    while isinstance(cause, TaskError) and cause.cause is not None:
        cause = cause.cause
    trace = error.remote_traceback if isinstance(error, TaskError) else ""
    last = trace.rstrip().rpartition("\n")[2]
    # One that could not travel is known by the last line of its traceback.
    kind, message = type(cause).__qualname__, str(cause)
    if isinstance(cause, TaskError):
        kind, _, message = last.partition(": ")
    if isinstance(error, TaskError):
        fields = vars(error)
        where = [format_epoch(fields["epoch"])] if "epoch" in fields else []
        where += [f"step {fields['step']}"] if "step" in fields else []
        first, line_break, rest = message.partition("\n")
        message = f"{first} (in {', '.join(where)}){line_break}{rest}" if where else message
    return {
        "kind": "exception",
        "at": time.time(),
        "type": kind,
        "message": message[:2000],
        "site": _site(trace),
        "traceback": trace[-4000:],
    }


def _site(trace: str) -> list[Any] | None:
    """The innermost line of the user's own code, else the innermost line."""
    frames = [(f["file"], int(f["line"]), f["function"]) for f in _FRAME.finditer(trace)]
    users = [frame for frame in frames if sites.is_users(frame[0])]
    return list((users or frames)[-1]) if frames else None


def _write(path: Path, end: dict[str, Any]) -> None:
    """Into the box of a process that is gone: nobody else writes to it any more."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        box = Box(path, mmap.mmap(descriptor, layout.BOX_SIZE))
    finally:
        os.close(descriptor)
    if not box.ints[layout.Cell.EXITED]:
        box.write_exit(end)
    box.close()
