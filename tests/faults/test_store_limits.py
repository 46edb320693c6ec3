"""Memory, disk or descriptors run out: objects spill, or the error helps. Never SIGBUS."""

import errno
import os
import resource
import shutil
import subprocess

import numpy as np
import pytest

import miniray
from miniray.core import session
from miniray.errors import ObjectStoreFullError
from tests.faults.helpers import eventually, shared_names

MB = 1_000_000
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="mounting needs root")


@miniray.remote
class Holder:
    def __init__(self):
        self.kept = []

    def keep(self, array):
        self.kept.append(array)
        return float(array.sum())

    def make(self, size, value):
        return np.full(size, value, np.uint8)

    def drop(self):
        self.kept.clear()


@pytest.fixture
def small(monkeypatch, tmp_path):
    """An engine with room for 20 MB in memory, and its spill directory."""
    folder = tmp_path / "spill"
    folder.mkdir()
    monkeypatch.setenv("MINIRAY_SPILL_DIR", str(folder))
    miniray.init(num_workers=1, object_store_memory=20 * MB)
    yield folder
    miniray.shutdown()


def memory_used():
    return session.engine().node.usage.total()


def spilled():
    """Bytes of unlinked files that this process holds open."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
            if "/spill/" in target:
                total += os.stat(f"/proc/self/fd/{name}").st_size
        except FileNotFoundError:
            continue
    return total


def test_more_than_fits_goes_to_disk(small):
    refs = [miniray.put(np.full(5 * MB, i, np.uint8)) for i in range(12)]
    assert memory_used() <= 20 * MB
    assert spilled() >= 40 * MB
    usage = session.engine().measure_object_store()
    assert usage[:2] == (memory_used(), 20 * MB)
    assert 45 * MB <= usage.disk_bytes <= spilled()
    for i, ref in enumerate(refs):
        array = miniray.get(ref)
        assert array.nbytes == 5 * MB
        assert (array == i).all()


def test_spilled_objects_travel_like_others(small):
    holder = Holder.remote()
    refs = [miniray.put(np.full(5 * MB, i, np.uint8)) for i in range(8)]
    assert miniray.get([holder.keep.remote(ref) for ref in refs]) == [
        5.0 * MB * i for i in range(8)
    ]
    made = [holder.make.remote(5 * MB, i) for i in range(8)]
    for i, array in enumerate(miniray.get(made)):
        assert (array == i).all()
    assert memory_used() <= 20 * MB


def test_the_disk_is_free_again_with_the_last_ref(small):
    refs = [miniray.put(np.ones(5 * MB, np.uint8)) for _ in range(8)]
    assert spilled()
    assert os.listdir(small) == []  # files without a name: nothing to clean up, whoever dies
    del refs
    miniray.put(np.ones(5 * MB, np.uint8))
    eventually(lambda: spilled() == 0, 5)
    assert session.engine().measure_object_store().disk_bytes == 0


def test_one_object_larger_than_the_memory(small):
    array = miniray.get(miniray.put(np.full(50 * MB, 3, np.uint8)))
    assert int(array.sum()) == 150 * MB
    assert memory_used() <= 20 * MB


@pytest.fixture
def tiny_disk(tmp_path):
    """A disk of 16 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)]
    if os.getuid() or shutil.which("mount") is None or subprocess.run(command).returncode:
        pytest.skip("mounting a small disk needs root")
    yield folder
    miniray.shutdown()
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_is_an_error_that_helps(tiny_disk, monkeypatch):
    monkeypatch.setenv("MINIRAY_SPILL_DIR", str(tiny_disk))
    miniray.init(num_workers=1, object_store_memory=10 * MB)
    holder = Holder.remote()
    refs = []
    with pytest.raises(ObjectStoreFullError) as caught:
        while len(refs) < 20:
            refs.append(miniray.put(np.full(4 * MB, len(refs), np.uint8)))
    full = os.strerror(errno.ENOSPC)
    for word in ("4.0 MB", str(tiny_disk), full, "object_store_memory", "drop refs"):
        assert word in str(caught.value)
    assert isinstance(caught.value, MemoryError)
    assert len(refs) >= 4
    for i, ref in enumerate(refs):  # what was stored is intact
        assert (miniray.get(ref) == i).all()
    # A worker's result and a call's argument fail the same way, and nothing else does.
    with pytest.raises(ObjectStoreFullError, match=full):
        miniray.get(holder.make.remote(4 * MB, 1), timeout=10)
    with pytest.raises(ObjectStoreFullError, match=full):
        holder.keep.remote(np.ones(4 * MB, np.uint8))
    assert miniray.get(holder.make.remote(100, 1), timeout=10).sum() == 100
    del refs, ref
    eventually(lambda: _fits(4 * MB), 5)
    assert miniray.get(holder.make.remote(4 * MB, 1), timeout=10).sum() == 4 * MB


def _fits(size):
    try:
        return miniray.put(np.ones(size, np.uint8))
    except ObjectStoreFullError:
        return None


def test_a_spill_directory_that_is_not_there(monkeypatch):
    monkeypatch.setenv("MINIRAY_SPILL_DIR", "/nonexistent/folder")
    miniray.init(num_workers=1, object_store_memory=1 * MB)
    with pytest.raises(ObjectStoreFullError, match="/nonexistent/folder"):
        miniray.put(np.ones(5 * MB, np.uint8))
    assert miniray.get(miniray.put(np.ones(500_000, np.uint8))).sum() == 500_000


def test_a_limit_on_file_size(drivers):
    """``ulimit -f`` holds for memory without a name too."""
    status, out, err = drivers.run(
        """
        import resource, numpy as np, miniray
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000_000, 10_000_000))
        miniray.init(num_workers=1)
        try:
            miniray.put(np.ones(20_000_000, np.uint8))
        except miniray.errors.ObjectStoreFullError as error:
            print("refused", error)
        print("sum", miniray.get(miniray.put(np.ones(5_000_000, np.uint8))).sum())
        """
    )
    assert status == 0, err
    assert "refused" in out
    assert os.strerror(errno.EFBIG) in out
    assert "sum 5000000" in out


DESCRIPTORS = """
    import resource, sys, numpy as np, miniray
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
    miniray.init(num_workers=1)

    @miniray.remote
    class Worker:
        def __init__(self):
            self.kept = []

        def make(self, count):
            return [miniray.put(np.ones(100_000)) for _ in range(count)]

        def keep(self, array):
            self.kept.append(array)
            return len(self.kept)

        def ping(self):
            return 1

    worker = Worker.remote()
    miniray.get(worker.ping.remote())
    kept = []
"""


def test_descriptors_run_out_at_put(drivers):
    status, out, err = drivers.run(
        DESCRIPTORS
        + """
    try:
        for _ in range(200):
            kept.append(miniray.put(np.ones(100_000)))
    except miniray.errors.ObjectStoreFullError as error:
        print("refused", len(kept), error)
    assert miniray.get(worker.ping.remote(), timeout=5) == 1
    kept.clear()
    assert miniray.get(worker.keep.remote(miniray.put(np.ones(100_000))), timeout=5) == 1
    print("works again")
    """
    )
    assert status == 0, err
    assert "ulimit -n" in out
    assert "works again" in out


def test_descriptors_run_out_at_new_actors(drivers):
    status, out, err = drivers.run(
        DESCRIPTORS
        + """
    try:
        for _ in range(200):
            kept.append(Worker.remote())
            miniray.get(kept[-1].ping.remote(), timeout=5)
    except (OSError, miniray.errors.MinirayError) as error:
        assert not isinstance(error, TimeoutError), error
        print("refused", type(error).__name__, error)
    assert len(kept) > 5
    assert miniray.get(worker.ping.remote(), timeout=5) == 1
    kept.clear()
    for _ in range(100):
        try:
            assert miniray.get(Worker.remote().ping.remote(), timeout=5) == 1
            break
        except (OSError, miniray.errors.ActorDiedError):
            pass
    print("works again")
    """
    )
    assert status == 0, err
    assert "refused" in out
    assert "works again" in out


def test_too_many_descriptors_on_the_way(drivers):
    """The kernel lets an ordinary user have only so many: the others are sent when some arrived."""
    status, out, err = drivers.run(
        """
        import ctypes, os, resource, sys, time
        if len(sys.argv) == 1:
            for capability in (21, 24):  # SYS_ADMIN, SYS_RESOURCE: root may have any number
                ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP, for the next
            os.execv(sys.executable, [sys.executable, sys.argv[0], "again"])
        resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))
        import numpy as np, miniray
        miniray.init(num_workers=1)

        @miniray.remote
        class Slow:
            def work(self, seconds):
                time.sleep(seconds)

            def count(self, *arrays):
                return len(arrays)

        slow = Slow.remote()
        arrays = [miniray.put(np.ones(20_000)) for _ in range(100)]
        miniray.get(slow.count.remote(*arrays))
        slow.work.remote(0.5)
        calls = [slow.count.remote(*arrays) for _ in range(10)]
        assert miniray.get(calls, timeout=30) == [100] * 10
        print("all came")
        """
    )
    assert status == 0, err
    assert "all came" in out


@pytest.mark.parametrize("who", ["driver", "worker"])
def test_descriptors_run_out_at_the_receiver(drivers, who):
    """The kernel drops descriptors that do not fit: the value is lost, and that is said."""
    status, out, err = drivers.run(
        DESCRIPTORS
        + (
            """
    sources = [Worker.remote() for _ in range(4)]
    refs = [ref for s in sources for ref in miniray.get(s.make.remote(20))]
    use = lambda ref: kept.append(miniray.get(ref, timeout=5))
    """
            if who == "driver"
            else """
    sources = [Worker.remote() for _ in range(4)]
    refs = [ref for s in sources for ref in miniray.get(s.make.remote(20))]
    use = lambda ref: miniray.get(worker.keep.remote(ref), timeout=5)
    """
        )
        + """
    outcomes = set()
    for ref in refs:
        try:
            use(ref)
        except (miniray.errors.MinirayError, OSError) as error:
            assert not isinstance(error, TimeoutError), error
            outcomes.add(type(error).__name__)
            print("refused", error)
    print("outcomes", *outcomes)
    assert miniray.get(worker.ping.remote(), timeout=5) == 1
    """
    )
    assert status == 0, err
    assert "outcomes ObjectStoreFullError\n" in out or "outcomes TaskError" in out, out
    assert "ulimit -n" in out


@needs_root
def test_dev_shm_does_not_matter(drivers, tmp_path):
    """Our memory has no name: with /dev/shm of one page, and that full, all works."""
    status, out, err = drivers.run(
        """
        import os, subprocess, sys
        if "inside" not in sys.argv:
            again = [sys.executable, __file__, "inside"]
            raise SystemExit(subprocess.run(["unshare", "-m", *again]).returncode)
        mount = ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", "/dev/shm"]
        if subprocess.run(mount).returncode:
            print("skipped")
            raise SystemExit
        with open("/dev/shm/full", "wb") as file:
            file.write(bytes(4096))
        import numpy as np
        import miniray

        @miniray.remote
        class Worker:
            def double(self, array):
                return 2 * array

        array = np.ones(5_000_000)
        refs = [Worker.remote().double.remote(miniray.put(array)) for _ in range(3)]
        print("sums", *(int(a.sum()) for a in miniray.get(refs)))
        print("names", *os.listdir("/dev/shm"))
        """
    )
    if "skipped" in out:
        pytest.skip("mounting is not allowed here")
    assert status == 0, err
    assert "sums 10000000 10000000 10000000" in out
    assert "names full\n" in out


def test_nothing_appears_in_dev_shm(engine):
    before = shared_names()
    holder = Holder.remote()
    ref = miniray.put(np.ones(MB))
    result = holder.make.remote(MB, 1)
    assert miniray.get([holder.keep.remote(ref), result])[0] == MB
    assert shared_names() <= before


def test_the_limit_on_descriptors_is_used(engine):
    """The soft limit is often 1024; every large object in use holds one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft == hard
