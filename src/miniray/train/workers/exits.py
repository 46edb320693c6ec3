"""Record for the doctor how each worker process of a failed run ended.

The trainer terminates the workers, so they can't record this themselves. The error that stopped the
run is written to the flight recorder of its worker. The other workers are recorded as terminated by
their launcher, so that they aren't reported as the cause. Workers without a flight recorder, for
example on a different machine, are skipped. An exit that a worker has recorded itself is kept.
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
    """Record for each flight recorder in ``ranks`` how its process ended, after ``error``.

    Call it after the processes have exited.
    """
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
    """Write how the process ended, as seen by the launcher."""
    text = json.dumps({"code": None, "at": time.time(), **seen})
    runfile.replace_text(box.with_suffix(".exit"), text + "\n")


def _exception(error: BaseException) -> dict[str, Any]:
    """Return the record of ``error``, as its rank would write it, with the epoch and step added."""
    cause: Any = error
    while isinstance(cause, TaskError) and cause.cause is not None:
        cause = cause.cause
    trace = error.remote_traceback if isinstance(error, TaskError) else ""
    last = trace.rstrip().rpartition("\n")[2]
    # If the exception couldn't be pickled, the last line of its traceback has type and message.
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
    """Return the innermost frame of user code, or else the innermost frame."""
    frames = [(f["file"], int(f["line"]), f["function"]) for f in _FRAME.finditer(trace)]
    users = [frame for frame in frames if sites.is_users(frame[0])]
    return list((users or frames)[-1]) if frames else None


def _write(path: Path, end: dict[str, Any]) -> None:
    """Write ``end`` to the flight recorder of a process that has exited."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        box = Box(path, mmap.mmap(descriptor, layout.BOX_SIZE))
    finally:
        os.close(descriptor)
    if not box.ints[layout.Cell.EXITED]:
        box.write_exit(end)
    box.close()
