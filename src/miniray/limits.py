"""Limits on this process: cores, memory, processes and file descriptors.

Every number is what this process may use, not what the machine has. A container, a batch scheduler
or systemd limits a process by control groups, and each group is limited by its parents as well. The
numbers of version 1 are in one hierarchy per controller, those of version 2 in a single one; a
machine may mount both. Needs neither torch nor psutil.
"""

from __future__ import annotations

import errno
import math
import os
import resource
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from miniray.errors import EngineStartError

#: Where the kernel describes this process and the machine.
_PROC = Path("/proc")
#: Below this number of free processes, a failed start is blamed on the limit.
_FEW = 16
#: CAP_SYS_ADMIN and CAP_SYS_RESOURCE: RLIMIT_NPROC doesn't apply to processes with either.
_EXEMPT = 1 << 21 | 1 << 24


def cpu_count() -> int:
    """Return how many cores this process may use: its affinity, limited by the CPU quota."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        cores = os.cpu_count() or 1
    return math.ceil(min([cores, *map(_cpu_quota, _control_groups("cpu"))]))


def memory_total() -> int:
    """Return how many bytes of memory this process may use, together with those in its group."""
    return memory_limit() or _physical_memory()


def memory_limit() -> int | None:
    """Return the limit of the control groups in bytes; None if they allow all memory there is."""
    return min((limit for _, limit in _memory_limits()), default=None)


def memory_available() -> int:
    """Return how many bytes can still be allocated before a process is killed or swapped out."""
    free = [_machine_available()]
    for group, limit in _memory_limits():
        used = _number(group / "memory.current") or _number(group / "memory.usage_in_bytes") or 0
        free.append(limit - used + _reclaimable(group))
    return max(0, min(free))


# -- control groups -------------------------------------------------------------------------------


def _control_groups(controller: str) -> list[Path]:
    """Return the directories of this process's group and its parents, as far as they're mounted."""
    paths = {}  # of this process, by controller; version 2 has no name
    for line in _read(_PROC / "self" / "cgroup").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        paths.update(dict.fromkeys(controllers.split(","), path or "/"))
    found: list[Path] = []
    for name, root, mount_point in _mounted_hierarchies(controller):
        if name not in paths:
            continue
        # A container may see its own group as the root, and its path as the host sees it.
        inside = os.path.relpath(paths[name], root)
        group = mount_point if inside.startswith("..") else mount_point / inside
        found.append(group)
        while group != mount_point:
            group = group.parent
            found.append(group)
    return found


def _mounted_hierarchies(controller: str) -> Iterator[tuple[str, str, Path]]:
    """Yield (key in ``/proc/self/cgroup``, root, mount point) of the controller's hierarchies."""
    for line in _read(_PROC / "self" / "mountinfo").splitlines():
        mount, _, filesystem = line.partition(" - ")
        kind, _, options = filesystem.partition(" ")
        if kind == "cgroup2":
            key = ""
        elif kind == "cgroup" and controller in options.rpartition(" ")[2].split(","):
            key = controller
        else:
            continue
        root, mount_point = map(_unescape, mount.split(" ")[3:5])
        yield key, root, Path(mount_point)


def _unescape(field: str) -> str:
    """Return a path of ``mountinfo``, in which the kernel writes a space as ``\\040``."""
    return field.encode().decode("unicode_escape").encode("latin-1").decode(errors="replace")


def _cpu_quota(group: Path) -> float:
    """Return how many cores' worth of time the group may use per period; infinite if unlimited."""
    fields = _read(group / "cpu.max").split()  # version 2: "max 100000" or "150000 100000"
    if len(fields) != 2:  # version 1, where -1 means no limit
        fields = [_read(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    if all(field.isdigit() for field in fields) and int(fields[1]) > 0:
        return int(fields[0]) / int(fields[1])
    return math.inf


def _memory_limits() -> Iterator[tuple[Path, int]]:
    for group in _control_groups("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            limit = _number(group / name)
            if limit is not None and limit < _physical_memory():  # version 1: huge if unlimited
                yield group, limit


def _reclaimable(group: Path) -> int:
    """Return the bytes of cached files that the kernel drops before it kills a process."""
    fields = dict(line.partition(" ")[::2] for line in _read(group / "memory.stat").splitlines())
    # In version 1, the name without "total" doesn't count the children.
    return int(fields.get("total_inactive_file", fields.get("inactive_file", 0)))


def _physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _machine_available() -> int:
    for line in _read(_PROC / "meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return _physical_memory()  # macOS


def _number(path: Path) -> int | None:
    """Return the number in a file; None for ``max`` or if there's no such file."""
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _read(path: Path) -> str:
    """Return the file's text. A file that can't be read is empty, which means no limit."""
    try:
        return path.read_text()
    except OSError:
        return ""


# -- processes, threads and descriptors -----------------------------------------------------------


class Limit(NamedTuple):
    """A limit, how much of it is unused, and a sentence about how to raise it."""

    name: str
    value: int
    free: int
    remedy: str


def check_room(processes: int, descriptors: int) -> None:
    """Raise ``EngineStartError`` if limits leave less room than requested.

    Threads count as processes, as they do for the kernel.
    """
    for limit in _process_limits(processes):
        if limit.free < processes:
            raise _start_error(
                limit, f"the local engine needs {processes} more processes and threads"
            )
    limit = _descriptor_limit()
    if limit.free < descriptors:
        raise _start_error(limit, f"the local engine needs {descriptors} more file descriptors")


def to_start_error(error: BaseException) -> EngineStartError:
    """Return the error for a start that failed with ``error``, which names the limit reached."""
    limit = limit_reached(error)
    if limit is None:
        return EngineStartError(f"the local engine couldn't start: {error}")
    return _start_error(limit, f"the local engine couldn't start: {error}")


def limit_reached(error: BaseException) -> Limit | None:
    """Return the limit that a failed system call ran into; None if it's a different problem."""
    code = getattr(error, "errno", None)
    if code == errno.EMFILE:
        return _descriptor_limit()
    if code == errno.EAGAIN or is_thread_failure(error):
        limits = [limit for limit in _process_limits() if limit.free < _FEW]
        return min(limits, key=lambda limit: limit.free, default=None)
    return None


def describe_reached(error: BaseException) -> str:
    """Return the error's text and the limit that it ran into, if any."""
    limit = limit_reached(error)
    return str(error) if limit is None else f"{error} ({limit.name}={limit.value}). {limit.remedy}"


def is_thread_failure(error: BaseException) -> bool:
    """Return whether ``threading`` couldn't start a thread; it raises a plain ``RuntimeError``."""
    return type(error) is RuntimeError and "start new thread" in str(error)


def _start_error(limit: Limit, problem: str) -> EngineStartError:
    return EngineStartError(
        f"{problem}. {limit.name} is {limit.value}, and {max(0, limit.free)} of them are free. "
        f"{limit.remedy}",
        limit=limit.name,
        limit_value=limit.value,
    )


def _descriptor_limit() -> Limit:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:  # macOS
        soft = sys.maxsize
    try:
        used = len(os.listdir("/dev/fd")) - 1  # without the one that lists them
    except OSError:  # none is left for that
        used = soft
    remedy = "Raise it with `ulimit -n`, or close files that this program holds open."
    return Limit("RLIMIT_NOFILE", soft, soft - used, remedy)


def _process_limits(count: int = _FEW) -> Iterable[Limit]:
    """Yield the limits on processes and threads. Those far above ``count`` may be left out."""
    for group in _control_groups("pids"):
        most = _number(group / "pids.max")
        if most is not None:
            used = _number(group / "pids.current") or 0
            remedy = (
                f"It is the limit of the control group {group}: raise the container's or service's "
                "limit on processes (docker --pids-limit, systemd TasksMax=), or start fewer."
            )
            yield Limit("pids.max", most, most - used, remedy)
    most, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if most != resource.RLIM_INFINITY and not _ignores_process_limit():
        # All threads of the machine are an upper bound, and cheaper to read than those of the user.
        everything = _read(_PROC / "loadavg").split()
        if not everything or int(everything[3].split("/")[1]) + count > most:
            remedy = "Raise it with `ulimit -u`, or end other processes of this user."
            yield Limit("RLIMIT_NPROC", most, most - _count_threads_of_user(), remedy)


def _ignores_process_limit() -> bool:
    """Return whether the kernel lets this process exceed RLIMIT_NPROC."""
    for line in _read(_PROC / "self" / "status").splitlines():
        if line.startswith("CapEff:"):
            return os.getuid() == 0 or bool(int(line.split()[1], 16) & _EXEMPT)
    return os.getuid() == 0


def _count_threads_of_user() -> int:
    count = 0
    for entry in os.scandir(_PROC):
        if entry.name.isdigit():
            try:
                if entry.stat().st_uid == os.getuid():
                    count += len(os.listdir(f"{entry.path}/task"))
            except OSError:  # it has ended
                continue
    return count
