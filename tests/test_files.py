"""Files are replaced as a whole, and locks end with their holder."""

import os
import signal
import subprocess
import sys
import time

import pytest

from miniray import files

HOLD = """
import os, signal, sys
from pathlib import Path
from miniray.files import FileLock
lock = FileLock(Path(sys.argv[1]), wait=False)
lock.write(b"held")
child = 0
if sys.argv[2] == "fork":
    if not os.fork():
        print(os.getpid(), flush=True)  # only now has it closed its descriptor
    signal.pause()
if sys.argv[2] == "exec":
    import subprocess
    child = subprocess.Popen(["sleep", "60"], close_fds=False).pid
print(child, flush=True)
signal.pause()
"""


def test_replace_atomically_replaces_and_keeps_the_old_on_error(tmp_path, monkeypatch):
    path = tmp_path / "file"
    files.replace_atomically(path, b"old")
    assert path.read_bytes() == b"old"

    def fail(*_):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="disk full"):
            files.replace_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_replace_atomically_removes_only_old_leftovers(tmp_path):
    old, new = tmp_path / ".file.1-a.partial", tmp_path / ".file.2-b.partial"
    old.touch()
    new.touch()
    os.utime(old, (time.time() - 7200,) * 2)
    files.replace_atomically(tmp_path / "file", b"x", sync=False)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".file.2-b.partial", "file"]


@pytest.mark.parametrize("child", ["none", "fork", "exec"])
def test_lock_ends_with_its_holder_although_a_child_lives(tmp_path, child):
    path = tmp_path / "lock"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, path, child], stdout=subprocess.PIPE, text=True
    )
    child_pid = int(holder.stdout.readline())
    try:
        assert path.read_bytes() == b"held"
        assert files.is_locked(path)
        with pytest.raises(BlockingIOError):
            files.FileLock(path, wait=False)
        holder.kill()
        holder.wait()
        assert not files.is_locked(path)
        with files.lock_file(path, wait=False):
            assert files.is_locked(path)
        assert not files.is_locked(path)
    finally:
        holder.kill()
        if child_pid:  # it has the pipe open
            os.kill(child_pid, signal.SIGKILL)
        holder.communicate()


def test_released_lock_can_be_taken_again(tmp_path):
    lock = files.FileLock(tmp_path / "lock")
    assert lock.held
    lock.release()
    lock.release()
    assert not lock.held
    again = files.FileLock(tmp_path / "lock", wait=False)
    assert again.held
    del again  # a lock that isn't referenced is released
    assert not files.is_locked(tmp_path / "lock")


def test_missing_file_is_not_locked(tmp_path):
    assert not files.is_locked(tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_fifo_in_place_of_a_lock_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "lock")
    assert not files.is_locked(tmp_path / "lock")


def test_link_in_place_of_a_lock_is_not_followed(tmp_path):
    target = tmp_path / "target"
    target.write_text("content")
    (tmp_path / "lock").symlink_to(target)
    with pytest.raises(OSError, match="lock"):
        files.FileLock(tmp_path / "lock")
    assert target.read_text() == "content"
