"""The processes of a run seen from outside: who is what, how much they hold, what they leave."""

import contextlib
import os
import signal
import statistics
import time

import psutil

#: In the environment of every process of a soak.
MARK = "MINIRAY_SOAK_MARK"


def marked(mark):
    """Commands of live processes that carry ``mark``, by pid. A zombie is its parent's affair."""
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found[process.pid] = " ".join(process.cmdline())
    return found


def kill(pid, number=signal.SIGKILL):
    """Send a signal to a process that may have ended by itself."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def roles(driver, folder):
    """Pids below a driver as {"zygote": [...], "worker": [...], "server": [...]}, if there yet."""
    found = {"zygote": [], "worker": [], "server": []}
    with contextlib.suppress(psutil.Error):
        for zygote in psutil.Process(driver).children():
            found["zygote"].append(zygote.pid)
            for child in zygote.children():
                known = (folder / "pids" / str(child.pid)).exists()
                found["worker" if known else "server"].append(child.pid)
    return found


def sample(driver):
    """(seconds, megabytes of the driver's own, open files) or None where it is gone."""
    try:
        process = psutil.Process(driver)
        return time.monotonic(), process.memory_full_info().uss / 2**20, process.num_fds()
    except psutil.Error:
        return None


def named_memory(pids):
    """Files in /dev/shm that processes have open or mapped; miniray needs none."""
    names = set()
    for pid in pids:
        with contextlib.suppress(psutil.Error, OSError):
            maps = [entry.path for entry in psutil.Process(pid).memory_maps()]
            opened = [os.readlink(entry) for entry in os.scandir(f"/proc/{pid}/fd")]
            names.update(p for p in maps + opened if p.startswith("/dev/shm/"))
    return names


def growth(samples, warm=20.0):
    """(megabytes a minute, median) of a life's samples after ``warm`` seconds; None: too short.

    By the medians of its thirds: a sync or a checkpoint under way is a spike, and no growth.
    """
    later = [s for s in samples if s[0] - samples[0][0] >= warm]
    if len(later) < 15:
        return None
    third = len(later) // 3
    first, last = later[:third], later[-third:]
    between = statistics.median(s[0] for s in last) - statistics.median(s[0] for s in first)
    rise = statistics.median(s[1] for s in last) - statistics.median(s[1] for s in first)
    return 60 * rise / between, statistics.median(s[1] for s in later)


def left_behind(mark, folder, *, directories=True, limit=15.0):
    """What is left of a run that has ended, after ``limit`` seconds at the latest.

    Where all its processes were killed at once there is nobody to remove its directory of sockets;
    the next run does, and until then ``directories`` do not count.
    """
    deadline = time.monotonic() + limit
    while True:
        runtime = folder / "runtime" / f"miniray-{os.getuid()}"
        sockets = [p.name for p in runtime.glob("*") if p.name != "logs" and directories]
        # torch makes a folder for its compiler's cache as soon as that is imported.
        temporary = [
            path.name
            for path in (folder / "tmp").iterdir()
            if not path.name.startswith("torchinductor_")
        ]
        processes = [f"process {pid} ({command[:80]})" for pid, command in marked(mark).items()]
        left = [
            *processes,
            *(f"directory {name}" for name in sockets),
            *(f"temporary file {name}" for name in temporary),
        ]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)
