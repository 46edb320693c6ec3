"""Limits of cores, memory, processes and descriptors: real ones, and version 2 from files."""

import contextlib
import errno
import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

from miniray import limits
from miniray.errors import EngineStartError

GB = 1 << 30


@pytest.fixture
def control_groups(tmp_path, monkeypatch):
    """Sets the process's path per hierarchy and writes files of groups below ``tmp_path``."""
    monkeypatch.setattr(limits, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    monkeypatch.setattr(limits, "_physical_memory", lambda: 64 * GB)
    myself = tmp_path / "proc" / "self"
    myself.mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 1 kB\nMemAvailable: 41943040 kB\n")

    def describe(cgroup, mounts, files):
        (myself / "cgroup").write_text(cgroup)
        (myself / "mountinfo").write_text(
            "".join(
                f"31 23 0:28 {root} {tmp_path}/{place} rw shared:9 - {kind} {kind} {opts}\n"
                for kind, opts, root, place in mounts
            )
        )
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    return describe


V2 = ("cgroup2", "rw", "/", "fs")


def v1(controller, root="/"):
    return ("cgroup", f"rw,{controller}", root, f"fs/{controller}")


@pytest.mark.parametrize(
    ("cgroup", "mounts", "files", "cpus"),
    [
        pytest.param("", [], {}, 16, id="none"),
        pytest.param("0::/a/b\n", [V2], {"fs/a/b/cpu.max": "150000 100000"}, 2, id="v2-own"),
        pytest.param("0::/a/b\n", [V2], {"fs/a/cpu.max": "300000 100000"}, 3, id="v2-parent"),
        pytest.param(
            "0::/a/b\n",
            [V2],
            {"fs/a/cpu.max": "300000 100000", "fs/a/b/cpu.max": "max 100000"},
            3,
            id="v2-parent-only",
        ),
        pytest.param("0::/\n", [V2], {"fs/cpu.max": "50000 100000"}, 1, id="v2-root"),
        pytest.param("0::/a\n", [V2], {"fs/cpu.max": "max 100000"}, 16, id="v2-unlimited"),
        pytest.param(
            "0::/../up\n", [V2], {"fs/cpu.max": "200000 100000"}, 2, id="v2-outside-the-namespace"
        ),
        pytest.param(
            "3:cpu,cpuacct:/a/b\n",
            [v1("cpu")],
            {"fs/cpu/a/cpu.cfs_quota_us": "400000", "fs/cpu/a/cpu.cfs_period_us": "100000"},
            4,
            id="v1-parent",
        ),
        pytest.param(
            "3:cpu,cpuacct:/a\n",
            [v1("cpu")],
            {"fs/cpu/a/cpu.cfs_quota_us": "-1", "fs/cpu/a/cpu.cfs_period_us": "100000"},
            16,
            id="v1-unlimited",
        ),
        pytest.param(
            "3:cpu:/docker/x/job\n",
            [v1("cpu", root="/docker/x")],
            {"fs/cpu/job/cpu.cfs_quota_us": "100000", "fs/cpu/job/cpu.cfs_period_us": "100000"},
            1,
            id="v1-container",
        ),
        pytest.param(
            "3:memory:/a\n0::/b\n",
            [v1("memory"), V2],
            {"fs/b/cpu.max": "200000 100000", "fs/a/cpu.max": "100000 100000"},
            2,
            id="hybrid",
        ),
    ],
)
def test_cpus_by_quota_of_the_group_and_its_parents(control_groups, cgroup, mounts, files, cpus):
    control_groups(cgroup, mounts, files)
    assert limits.cpu_count() == cpus


@pytest.mark.parametrize(
    ("cgroup", "mounts", "files", "total", "available"),
    [
        pytest.param("", [], {}, 64 * GB, 40 * GB, id="none"),
        pytest.param("0::/a/b\n", [V2], {"fs/a/b/memory.max": "max"}, 64 * GB, 40 * GB, id="v2"),
        pytest.param(
            "0::/a/b\n",
            [V2],
            {
                "fs/a/memory.max": str(8 * GB),
                "fs/a/memory.current": str(5 * GB),
                "fs/a/memory.stat": f"anon 7\ninactive_file {2 * GB}\n",
                "fs/a/b/memory.max": str(9 * GB),
                "fs/a/b/memory.current": str(4 * GB),
            },
            8 * GB,
            5 * GB,
            id="v2-parent",
        ),
        pytest.param(
            "9:memory:/a/b\n",
            [v1("memory")],
            {
                "fs/memory/memory.limit_in_bytes": "9223372036854771712",
                "fs/memory/a/memory.limit_in_bytes": str(8 * GB),
                "fs/memory/a/memory.usage_in_bytes": str(5 * GB),
                "fs/memory/a/memory.stat": f"inactive_file 0\ntotal_inactive_file {GB}\n",
                "fs/memory/a/b/memory.limit_in_bytes": str(3 * GB),
                "fs/memory/a/b/memory.usage_in_bytes": str(4 * GB),
            },
            3 * GB,
            0,
            id="v1",
        ),
    ],
)
def test_memory_of_the_group_and_its_parents(
    control_groups, cgroup, mounts, files, total, available
):
    control_groups(cgroup, mounts, files)
    assert limits.memory_total() == total
    assert limits.memory_available() == available


def test_a_mount_point_with_spaces_is_found(control_groups):
    mount = ("cgroup2", "rw", "/", "my\\040größe")
    control_groups("0::/a\n", [mount], {"my größe/a/cpu.max": "100000 100000"})
    assert limits.cpu_count() == 1


def test_files_of_unusual_kernels_mean_no_limit(control_groups, tmp_path):
    files = {"fs/memory.max": "", "fs/memory.stat": "what\n\n", "fs/cpu.max": "100000 0"}
    control_groups("\nodd\n7:cpu\n0::/\n", [V2], files)
    with open(tmp_path / "proc" / "self" / "mountinfo", "a") as file:
        file.write("\nodd\n1 2 3:4 - cgroup\n1 2 3:4 / /x rw - cgroup\n")
    assert limits.cpu_count() == 16
    assert (limits.memory_total(), limits.memory_available()) == (64 * GB, 40 * GB)


# -- real limits of a new process -----------------------------------------------------------------


def run(code, *, before=None, prefix=()):
    """Run ``code`` in a process that ``before`` prepares; return what it printed as JSON."""
    done = subprocess.run(
        [*prefix, sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=50,
        preexec_fn=before,
        env={k: v for k, v in os.environ.items() if k != "MINIRAY_BACKEND"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def real_group():
    """Creates a group with a limited parent for a controller; its processes are in the child."""
    with contextlib.ExitStack() as stack:

        def create(controller, name, value):
            for mounted in (Path("/sys/fs/cgroup", controller), Path("/sys/fs/cgroup")):
                parent = mounted / f"miniray-test-{os.getpid()}"
                try:
                    (parent / "child").mkdir(parents=True)
                except OSError:
                    continue
                stack.callback(parent.rmdir)
                stack.callback((parent / "child").rmdir)
                if (parent / name).exists():
                    (parent / name).write_text(str(value))
                    return parent / "child"
            pytest.skip(f"no control group of {controller} can be created here")

        yield create


def enter(group):
    def before():
        (group / "cgroup.procs").write_text(str(os.getpid()))

    return before


#: Starts an engine and prints the error's fields, or null.
START = """
import json, os, threading
import miniray
from miniray.errors import EngineStartError
threads, files = threading.active_count(), set(os.listdir("/dev/fd"))
try:
    miniray.init(num_workers=2)
    found = None
except EngineStartError as error:
    found = [error.code, error.limit, error.limit_value]
    assert not miniray.is_initialized()
    assert threading.active_count() == threads
    error.__traceback__ = error.__cause__ = error.__context__ = None
    assert set(os.listdir("/dev/fd")) == files, os.listdir("/dev/fd")
print(json.dumps(found))
"""


def test_puts_beyond_a_memory_limit_go_to_disk(real_group):
    """Objects of 240 MB don't fit under 160 MB: an engine that ignores the limit is killed."""
    group = real_group("memory", "memory.limit_in_bytes", 160_000_000)
    code = """
    import json
    import numpy as np
    import miniray
    from miniray import limits
    miniray.init(num_workers=1)
    refs = [miniray.put(np.full(30_000_000 // 8, float(i))) for i in range(8)]
    values = [float(miniray.get(ref)[-1]) for ref in refs]
    print(json.dumps([values, limits.memory_total(), limits.memory_available()]))
    """
    values, total, available = run(code, before=enter(group))
    assert values == [float(i) for i in range(8)]
    assert 159_000_000 < total <= 160_000_000
    assert 0 <= available < total


@pytest.mark.parametrize("most", [8, 28])
def test_too_few_descriptors_are_named(most):
    def before():
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

    assert run(START, before=before) == ["engine-start", "RLIMIT_NOFILE", most]


@pytest.mark.parametrize("most", [2, 4])
def test_too_few_processes_of_a_group_are_named(real_group, most):
    group = real_group("pids", "pids.max", most)
    assert run(START, before=enter(group)) == ["engine-start", "pids.max", most]


@pytest.mark.parametrize("most", [1, 4])
def test_too_few_processes_of_a_user_are_named(most, monkeypatch):
    """As a different user, since the limit doesn't apply to root."""
    if os.getuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root and setpriv to become a user without other processes")
    keeps = "-all,+dac_override"  # to read the interpreter, wherever it is
    user = str(54321 + most)  # the cases may run at the same time
    prefix = ["setpriv", "--reuid", user, "--regid", user, "--clear-groups"]
    prefix += ["--inh-caps", keeps, "--ambient-caps", keeps]
    with tempfile.TemporaryDirectory(prefix="mr-") as folder:  # a short path, for sockets
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)

        def before():
            resource.setrlimit(resource.RLIMIT_NPROC, (most, most))

        found = run(START, before=before, prefix=prefix)
    assert found == ["engine-start", "RLIMIT_NPROC", most]


def test_enough_processes_and_descriptors_start_an_engine(real_group):
    group = real_group("pids", "pids.max", 12)

    def before():
        enter(group)()
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))

    code = START + textwrap.dedent(
        """
        @miniray.remote
        def double(x):
            return 2 * x

        assert miniray.get([double.remote(i) for i in range(4)]) == [0, 2, 4, 6]
        """
    )
    assert run(code, before=before) is None


def test_a_worker_beyond_the_limit_names_it(real_group):
    """Actors are started on demand, so their number is not known at the start of the engine."""
    group = real_group("pids", "pids.max", 12)
    code = """
    import json
    import miniray
    from miniray.errors import ActorDiedError

    @miniray.remote
    class Actor:
        def ping(self):
            return 1

    miniray.init(num_workers=1)
    actors = [Actor.remote() for _ in range(8)]
    texts = []
    for actor in actors:
        try:
            miniray.get(actor.ping.remote())
        except ActorDiedError as error:
            texts.append(str(error))
    print(json.dumps(texts))
    """
    texts = run(code, before=enter(group))
    assert texts
    assert all("pids.max=12" in text for text in texts), texts


# -- the error ------------------------------------------------------------------------------------


def test_the_fields_of_the_error_survive_pickling():
    error = EngineStartError("full", limit="pids.max", limit_value=7, host="a")
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.limit, copy.limit_value, copy.host) == ("full", "pids.max", 7, "a")
    assert (copy.code, EngineStartError("other").limit) == ("engine-start", None)


def test_other_errors_are_not_blamed_on_a_limit():
    error = limits.to_start_error(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    assert error.limit is None
    assert os.strerror(errno.ENOSPC) in str(error)
    assert limits.limit_reached(RuntimeError("something else")) is None
