"""A rank's process as the kernel shows it, without its help, and how it ended."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from miniray.doctor.model import NOWHERE, Exit, Process, RankRecord
from miniray.runs import files
from miniray.runs.typed import build

UNKNOWN = Process(None, "", None, None, None, None)
GONE = Process(False, "", None, None, None, None)


def look(pid: int, host: str, started: float | None) -> Process:
    """The state of process ``pid``, if it is of this machine and the one that began at ``started``.

    ``started`` is in clock ticks since boot, as ``start_ticks`` gives it: process ids are used
    again, and this tells two processes apart.
    """
    if not pid or host != socket.gethostname() or not Path("/proc/self/stat").exists():
        return UNKNOWN
    fields = _stat(pid)
    if fields is None or (started is not None and int(fields[19]) != int(started)):
        return GONE
    state = fields[0]
    if state in ("Z", "X"):
        return Process(False, state, None, None, None, None)
    children = _child_pids(pid)
    below = [work(child) for child in children or ()]
    return Process(
        alive=True,
        state=state,
        cpu_seconds=_cpu(fields),
        io_bytes=_io(pid),
        threads=int(fields[17]),
        children=None if children is None else len(children),
        below=(sum(cpu for cpu, _ in below), sum(moved for _, moved in below)),
        sleeps_in=_sleeps_in(pid),
    )


def hostname() -> str:
    return socket.gethostname()


def work(pid: int) -> tuple[float, int]:
    """(CPU seconds, bytes read and written) of a process and its living descendants."""
    fields = _stat(pid)
    if fields is None:
        return 0.0, 0
    below = [work(child) for child in _child_pids(pid) or ()]
    cpu, moved = _cpu(fields), _io(pid) or 0
    return cpu + sum(used for used, _ in below), moved + sum(more for _, more in below)


def start_ticks(pid: int) -> int | None:
    """When the process began, in the kernel's ticks since boot; None where that cannot be known."""
    fields = _stat(pid)
    return None if fields is None else int(fields[19])


def parent(pid: int) -> int | None:
    fields = _stat(pid)
    return None if fields is None else int(fields[1])


def catches(pid: int, signal_number: int) -> bool:
    """Whether the process has a handler for the signal. Sending it otherwise could end it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    for line in status.splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (signal_number - 1) & 1)
    return False


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the one that started it ends (Linux only)."""
    _prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ended (Linux only)."""
    _prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the state on: a name before it may hold anything."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return text.rpartition(")")[2].split()


def _io(pid: int) -> int | None:
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return None
    counts = dict(line.split(": ") for line in lines)
    return int(counts["rchar"]) + int(counts["wchar"])


def _sleeps_in(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/wchan").read_text()
    except OSError:  # another user's
        return ""


def _child_pids(pid: int) -> list[int] | None:
    """Children of any of its threads."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            children = Path(f"/proc/{pid}/task/{thread}/children").read_text()
            found += map(int, children.split())
    except OSError:  # it is gone, or the kernel does not show this
        return None
    return found


def _cpu(fields: list[str]) -> float:
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# -- its end: by its own word, by its launcher's, by the run's -------------------------------------


_SAID_NOTHING = {"kind": "exit", "code": None, "at": None} | dict.fromkeys(
    ("signal", "type", "message", "traceback"), ""
)


def exit_said(own: Mapping[str, Any]) -> Exit:
    """Return what the process itself recorded. Raise ``ValueError`` if a field is damaged."""
    return build(Exit, {**_SAID_NOTHING, **own, "site": own.get("site") or NOWHERE})


class _Seen(NamedTuple):
    code: int | None
    signal: str | None
    at: float | None
    by_launcher: bool


def exit_seen(box: Path) -> dict[str, Any] | None:
    """Return what the launcher noted about the end of the process; None without an intact note."""
    noted = files.read_json(box.with_suffix(".exit"))[0]
    try:
        return (
            build(
                _Seen, {"code": None, "at": None, "by_launcher": False, "signal": None, **noted}
            )._asdict()
            if noted
            else None
        )
    except ValueError:
        return None


def exit_of(said: Exit | None, seen: Mapping[str, Any] | None, process: Process) -> Exit | None:
    """The process's own word for why, the launcher's for how."""
    if seen is not None:
        signal, code = seen.get("signal") or "", seen.get("code")
        by_launcher = bool(seen.get("by_launcher"))
        if said is None:
            kind = "signal" if signal else "finished" if code == 0 else "code"
            return Exit(kind, code, signal, "", "", NOWHERE, "", seen.get("at"), by_launcher)
        kind = said.kind
        if kind == "finished" and (signal or code):  # it died after its last word
            kind = "signal" if signal else "code"
        at = said.at or seen.get("at")
        return dataclasses.replace(
            said, kind=kind, code=code, signal=signal, at=at, by_launcher=by_launcher
        )
    if said is None and process.alive is False:
        return Exit("gone", None, "", "", "", NOWHERE, "", None)
    if said is not None and said.kind == "finished" and process.alive:
        return None  # it is in its last lines, but it has not ended
    return said


def ended_well(record: RankRecord) -> RankRecord:
    """A worker that ended unseen, in a run that wrote a good end: its driver ended it.

    Where rank 0 itself is all that wrote it, nobody knows what became of the others.
    """
    driven = record.launcher in ("miniray", "ray")
    if record.exit is None or record.exit.kind != "gone" or not driven:
        return record
    ended = dataclasses.replace(record.exit, kind="finished", at=record.heartbeat)
    return dataclasses.replace(record, exit=ended)
