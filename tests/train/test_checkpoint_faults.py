"""Real faults while checkpoints are written: full disks, SIGKILL, readers at the same time."""

import contextlib
import errno
import os
import resource
import subprocess
import sys
import textwrap
import threading
import warnings

import numpy as np
import pytest

from miniray.errors import CheckpointError
from miniray.train import CheckpointStore, load_model, save_model


def run(code, *arguments, timeout=50):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextlib.contextmanager
def mount_disk(disk, size):
    """Mount a small file system at ``disk``; skip the test without the right to do so."""
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("no right to mount a file system")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.fixture
def small_disk(tmp_path):
    """A separate file system of 1 MiB."""
    with mount_disk(tmp_path / "disk", "1m") as disk:
        yield disk


def test_a_full_disk_leaves_the_checkpoint_before(small_disk):
    events = []
    store = CheckpointStore(small_disk / "c", keep_last=1, on_event=events.append)
    store.save(0, {"w": np.zeros(50_000)})
    with pytest.raises(CheckpointError, match="8,000,") as caught:  # bytes
        store.save(1, {"w": np.zeros(1_000_000)})
    assert caught.value.entry == str(small_disk / "c" / "epoch-00000001")
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.ENOSPC
    assert [event["event"] for event in events] == ["checkpoint_failed"]
    assert [p.name for p in (small_disk / "c").iterdir()] == ["epoch-00000000"]
    assert store.load()[1]["w"].size == 50_000
    store.save(1, {"w": np.zeros(60_000)})  # saving works again once there is space
    assert store.load()[0] == 1


def test_a_disk_that_fills_up_at_any_byte(small_disk):
    """Each save has less free space than the one before, so each file fails in turn."""
    store = CheckpointStore(small_disk / "c", keep_last=None)
    store.save(0, {"w": np.zeros(1000), "v": np.ones(1000)})
    ballast = open(small_disk / "ballast", "wb")
    failed = 0
    for epoch in range(1, 40):
        try:
            ballast.write(b"x" * 20_000)
            ballast.flush()
        except OSError:
            pass
        try:
            store.save(epoch, {"w": np.full(1000, epoch), "v": np.ones(1000)})
            saved = epoch
        except CheckpointError:
            failed += 1
            assert not list((small_disk / "c").glob(".*"))
        epoch_read, state = store.load()
        assert epoch_read == saved
        assert state["w"][0] == saved
    assert failed > 3
    try:
        ballast.close()
    except OSError:
        pass


def test_a_model_file_survives_a_full_disk(small_disk):
    path = save_model(small_disk / "m.safetensors", [np.ones(10)])
    with pytest.raises(CheckpointError, match="8,000,000") as caught:
        save_model(path, [np.ones(1_000_000)])
    assert caught.value.__cause__.errno == errno.ENOSPC
    assert load_model(path)[0].size == 10
    assert [p.name for p in small_disk.iterdir()] == ["m.safetensors"]


def test_a_limit_on_file_size_is_told_like_a_full_disk(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(0, {"w": np.zeros(10)})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(CheckpointError, match="80,0") as caught:
            store.save(1, {"w": np.zeros(10_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.__cause__.errno == errno.EFBIG
    assert [p.name for p in tmp_path.iterdir()] == ["epoch-00000000"]
    assert store.load()[0] == 0


KILLER = """
    # Starts a writer, kills it at a random moment, reads what is left; again and again in the same
    # directory. The writer is a fork of this process, which has numpy loaded and one thread.
    import os, random, signal, sys, time, warnings
    import numpy as np
    from miniray.train.run.checkpoints.store import CheckpointStore
    warnings.simplefilter("error")  # a damaged checkpoint would be a warning

    directory, background = sys.argv[1], sys.argv[2] == "True"
    rounds, seed = map(int, sys.argv[3:])
    rng = random.Random(seed)

    def state(epoch):
        return {
            "weights": [np.full(20_000, float(epoch)), np.full(11, epoch, np.int16)],
            "other": {1: (epoch, None)},
        }

    def writer(first, pipe):
        store = CheckpointStore(directory, keep_last=2)
        epoch = first
        while True:
            (store.save_or_warn if background else store.save)(epoch, state(epoch))
            # In the background, this save is the proof that the one before is complete.
            done = epoch - 1 if background else epoch
            os.write(pipe, done.to_bytes(4, "big", signed=True))
            epoch += 1

    began = time.monotonic()
    for _ in range(3):
        CheckpointStore(directory).save(0, state(0))
    usual = (time.monotonic() - began) / 3
    completed = torn = saved = 0
    for _ in range(rounds):
        reads, writes = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(reads)
                writer(completed + 1, writes)
            finally:
                os._exit(1)
        os.close(writes)
        told = os.read(reads, 4) if rng.random() < 0.5 else b""
        time.sleep(rng.random() * 3 * usual)
        os.kill(pid, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        while piece := os.read(reads, 4096):
            told += piece
        os.close(reads)
        if told:
            completed = max(completed, int.from_bytes(told[-4:], "big", signed=True))
        torn += any(name.startswith(".partial") for name in os.listdir(directory))
        epoch, loaded = CheckpointStore(directory).load()
        assert epoch >= completed, (epoch, completed)
        assert (loaded["weights"][0] == epoch).all() and loaded["weights"][0].size == 20_000
        assert (loaded["weights"][1] == epoch).all() and loaded["other"] == {1: (epoch, None)}
        completed = epoch
        saved += len(told) // 4
    # A save that is let finish leaves no trace of all those that were not.
    CheckpointStore(directory, keep_last=2).save(completed + 1, state(completed + 1))
    assert len(CheckpointStore(directory).list(verify=True)) == len(os.listdir(directory)) == 2
    print(torn, saved)
"""


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("seed", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3))])
def test_sigkill_at_any_moment_never_loses_a_completed_checkpoint(tmp_path, background, seed):
    torn, saved = map(int, run(KILLER, tmp_path / "c", background, 25, seed).split())
    assert torn > 0  # some were really killed in mid-write
    assert saved > 0


def test_the_program_does_not_end_before_a_background_write(tmp_path):
    run(
        """
        import sys, numpy as np
        from miniray.train.run.checkpoints.store import CheckpointStore
        CheckpointStore(sys.argv[1]).save_or_warn(3, {"w": np.ones(3_000_000)})
        """,
        tmp_path,
    )
    assert CheckpointStore(tmp_path).load()[0] == 3


def test_a_failed_background_write_is_said_at_the_end_of_the_program(tmp_path):
    (tmp_path / "file").write_text("")
    code = """
        import sys
        from miniray.train.run.checkpoints.store import CheckpointStore
        CheckpointStore(sys.argv[1]).save_or_warn(3, {})
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "file" / "c")],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert str(tmp_path / "file" / "c" / "epoch-00000003") in done.stderr


def test_readers_at_the_same_time_always_get_an_intact_one(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=1)
    store.save(0, {"w": np.zeros(2000)})
    stop = threading.Event()
    errors = []
    reads = [0]

    def read():
        try:
            last = 0
            while not stop.is_set():
                epoch, state = CheckpointStore(tmp_path).load()
                assert (state["w"] == epoch).all()
                assert epoch >= last
                last = epoch
                reads[0] += 1
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=read) for _ in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for thread in threads:
            thread.start()
        for epoch in range(1, 60):
            store.save(epoch, {"w": np.full(2000, float(epoch))})
        stop.set()
        for thread in threads:
            thread.join()
    assert errors == []
    assert reads[0] > 0


def test_two_stores_of_one_process_do_not_disturb_each_other(tmp_path):
    stores = [CheckpointStore(tmp_path, keep_last=None) for _ in range(2)]
    for epoch in range(0, 20, 2):
        for i, store in enumerate(stores):
            store.save_or_warn(epoch + i, {"w": np.full(50_000, epoch + i)})
    for store in stores:
        store.close()
    assert sorted(found.epoch for found in stores[0].list(verify=True)) == list(range(20))
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]
