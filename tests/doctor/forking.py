"""Ranks as real processes, quickly: forked from one process that has torch loaded.

``Nursery`` starts that process. ``diagnosed`` has it fork the ranks of a script, each with the
environment that a launcher gives and with the recorder attached, and watches them as a launcher
does: until all have ended, or none moves any more. Then the run is diagnosed, and they are ended.
"""

import ctypes
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from miniray.doctor.diagnose import diagnose
from miniray.doctor.facts import gather
from miniray.doctor.reader import read_run

SCRIPTS = Path(__file__).parent / "scripts"


class Nursery:
    """The process that has torch loaded; one request a line, answered by the supervisor's pid."""

    def __init__(self):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.doctor.forking"],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._lock = threading.Lock()

    def start(self, script, run_dir, ranks, **env):
        """Start ``ranks``, each (number, RANK, WORLD_SIZE); give the supervisor."""
        request = {"script": str(script), "run_dir": str(run_dir), "ranks": ranks, "env": env}
        with self._lock:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            return int(self._process.stdout.readline())

    def close(self):
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._process.stdout.close()


def diagnosed(nursery, script, run_dir, ranks, still=2.5, computes=False, **env):
    """Start the script and diagnose it when all ranks have ended or none moves any more.

    Gives (diagnosis, seconds from the last movement to the verdict). ``still`` seconds without a
    movement are taken for a hang; the run itself says 1.5. A rank that computes, or would if it got
    a CPU, moves, unless ``computes`` says that this is its fault.
    """
    supervisor = nursery.start(SCRIPTS / f"{script}.py", run_dir, ranks, **env)
    watch = Watch(run_dir, len(ranks), computes)
    try:
        deadline = time.monotonic() + 50
        while watch.still() < still and time.monotonic() < deadline:
            time.sleep(0.05)
        if not watch.alive:
            gone(supervisor, deadline)  # only then is it written down how each rank ended
        asked = time.monotonic()
        diagnosis = diagnose(run_dir)
        return diagnosis, still + time.monotonic() - asked
    finally:
        end(supervisor)


class Watch:
    """Looks at the ranks from outside, as a launcher does."""

    def __init__(self, run_dir, count, computes):
        self._run_dir = Path(run_dir)
        self._count = count
        self._computes = computes
        self._cpu = {}
        self._moved = time.monotonic()
        self.alive = True

    def still(self):
        """Seconds since anything moved; infinite when all ranks have ended."""
        run = read_run(self._run_dir) if self._run_dir.is_dir() else None
        now = time.monotonic()
        if run is None or len(run.ranks) + len(run.duplicates) < self._count:
            self._moved = now
            return 0.0
        every = [*run, *run.duplicates]
        self.alive = any(record.alive for record in every)
        if not self.alive:
            return float("inf")
        last = max(facts.last_move for facts in gather(run))
        recorded = now - max(0.0, time.time() - last)
        self._moved = max(self._moved, recorded)
        working = [self._works(record) for record in every]
        if any(working) and not self._computes:
            self._moved = now
        return now - self._moved

    def _works(self, record):
        used = record.process.cpu_seconds or 0.0
        before, self._cpu[record.pid] = self._cpu.get(record.pid, used), used
        return record.process.state in ("R", "D") or used - before > 0.02


def gone(pid, deadline):
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)


def end(supervisor):
    """Kill all ranks, stopped ones too: they are the supervisor's process group."""
    try:
        os.killpg(supervisor, signal.SIGKILL)
    except ProcessLookupError:
        pass


# -- in the nursery ------------------------------------------------------------------------------


def serve():
    import torch
    import torch._dynamo  # DDP's constructor loads it: two seconds
    import torch.distributed.algorithms.join
    import torch.distributed.tensor
    import torch.optim
    import torch.utils.data.distributed  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setpgid(0, 0)
            die_with_parent()
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, 0)
            os.dup2(null, 1)
            supervise(**request)
        print(pid, flush=True)


def die_with_parent():
    """Whatever ends the test run, nothing of this stays."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def supervise(script, run_dir, ranks, env):
    """Fork the ranks, give them a store to meet at, and write down how each one ended."""
    from miniray.doctor import runfile

    folder = Path(run_dir)
    (folder / "ranks").mkdir(parents=True)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    size = max(size for _, _, size in ranks)
    runfile.write_run(folder, int(env.pop("RUN_SIZE", size)), "tests", hang_timeout=1.5)
    children = {}
    for rank, claimed, world_size in ranks:
        environment = {
            "RANK": str(claimed),
            "LOCAL_RANK": str(claimed),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "MINIRAY_LAUNCHER": "tests",
            "MINIRAY_RUN_DIR": run_dir,
            **env,
        }
        pid = os.fork()
        if pid == 0:
            die_with_parent()
            be_rank(script, environment, folder / "ranks" / f"{rank}.log")
        children[pid] = folder / "ranks" / f"{claimed}.exit"
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", port, is_master=True, master_listen_fd=listener.detach())
    while children:
        pid, status = os.wait()
        code = os.waitstatus_to_exitcode(status)
        name = signal.Signals(-code).name if code < 0 else ""
        seen = {"code": None if code < 0 else code, "signal": name, "at": time.time()}
        partial = children[pid].with_suffix(".partial")
        partial.write_text(json.dumps(seen))
        partial.rename(children.pop(pid))
    del store
    os._exit(0)


def be_rank(script, environment, log):
    """Run the script as an interpreter would, recorder attached; never returns."""
    os.environ.update(environment)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    import torch

    from miniray import doctor
    from miniray.doctor import recorder

    torch.set_num_threads(1)
    doctor.attach(heartbeat_interval=0.3)
    sys.argv = [script]
    sys.path.insert(0, os.path.dirname(script))
    code = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as stopped:
        code = stopped.code if isinstance(stopped.code, int) else 0
        if code:
            recorder.current().record_exit("exit", code=code)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    recorder.stop()
    os._exit(code)


if __name__ == "__main__":
    serve()
