"""Sockets that only the user can reach, and nothing unpickled from who cannot prove to belong."""

import contextlib
import os
import pickle
import shutil
import socket
import stat
import struct
import threading

import pytest

import miniray
from miniray.core.local import peers
from miniray.core.local.wire import frame
from tests.faults.helpers import eventually, pids

NOBODY = 65534
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="becoming another user needs root")


@miniray.remote
class Worker:
    def ping(self):
        return 1


class Trap:
    """Unpickling it makes a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.fixture
def paths(engine):
    """The sockets of the session: the driver's and a worker's."""
    worker = Worker.remote()
    assert miniray.get(worker.ping.remote()) == 1
    proc = worker._actor.client.proc
    yield [engine.node.info.path(0), engine.node.info.path(proc)]
    assert miniray.get(worker.ping.remote(), timeout=5) == 1
    assert miniray.get(Worker.remote().ping.remote(), timeout=5) == 1


def is_dropped(sock):
    """Whether the other end hangs up on us."""
    sock.settimeout(5)
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def connect(path):
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(path)
    return sock


def hello(token, proc=99, purpose=peers.CONTROL):
    return struct.pack("<32sII", token, proc, purpose)


def test_directories_are_the_users_alone(engine, own_directory):
    info = engine.node.info
    for folder in (info.directory, os.path.dirname(info.directory), info.log_dir):
        status = os.stat(folder)
        assert stat.S_IMODE(status.st_mode) == 0o700
        assert status.st_uid == os.getuid()


def test_a_directory_of_somebody_else_is_refused(own_directory):
    base = os.path.join(own_directory, f"miniray-{os.getuid()}")
    os.mkdir(base, 0o755)
    os.chmod(base, 0o755)
    with pytest.raises(miniray.errors.EngineStartError, match="0700"):
        miniray.init()
    os.rmdir(base)
    elsewhere = os.path.join(own_directory, "elsewhere")
    os.mkdir(elsewhere, 0o700)
    os.symlink(elsewhere, base)
    with pytest.raises(miniray.errors.EngineStartError):
        miniray.init()
    os.unlink(base)
    assert os.listdir(own_directory) == ["elsewhere"]


def test_the_token_is_not_in_the_open(engine):
    """Neither in an argument nor in the environment, which other processes can read."""
    token = engine.node.info.token
    for pid in pids(engine):
        for name in ("cmdline", "environ"):
            with open(f"/proc/{pid}/{name}", "rb") as file:
                text = file.read()
            assert token not in text
            assert token.hex().encode() not in text


@pytest.mark.parametrize("purpose", [peers.CALLS, peers.CONTROL])
def test_a_wrong_token(paths, tmp_path, purpose):
    trap = pickle.dumps(([Trap(tmp_path / "sprung")], []))
    for path in paths:
        for token in (bytes(32), b"x" * 32, os.urandom(32)):
            with connect(path) as sock, contextlib.suppress(BrokenPipeError):
                sock.sendall(hello(token, purpose=purpose))
                for kind in range(1, 14):
                    sock.sendall(frame(kind, trap))
                assert is_dropped(sock)
    assert not os.path.exists(tmp_path / "sprung")


def test_garbage(paths, tmp_path):
    trap = pickle.dumps(Trap(tmp_path / "sprung"))
    for path in paths:
        for data in (trap, os.urandom(40), os.urandom(100_000), b"GET / HTTP/1.1\r\n\r\n" * 3):
            with connect(path) as sock, contextlib.suppress(BrokenPipeError):
                sock.sendall(data + bytes(40))
                assert is_dropped(sock)
    assert not os.path.exists(tmp_path / "sprung")


def test_the_right_token_but_one_bit(paths, engine, tmp_path):
    token = bytearray(engine.node.info.token)
    token[31] ^= 1
    for path in paths:
        with connect(path) as sock:
            sock.sendall(hello(bytes(token)))
            assert is_dropped(sock)


def test_descriptors_of_strangers_are_closed(paths, engine):
    before = len(os.listdir("/proc/self/fd"))
    with open("/dev/null") as file:
        for _ in range(50):
            with connect(paths[0]) as sock, contextlib.suppress(BrokenPipeError):
                socket.send_fds(sock, [hello(bytes(32))], [file.fileno()] * 10)
                assert is_dropped(sock)
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= before, 5)


def test_connections_that_say_nothing(paths, engine):
    """Half-open ones, those that stop in the middle of the greeting, and those that give up."""
    token = engine.node.info.token
    silent = [connect(path) for path in paths for _ in range(50)]
    partial = [connect(path) for path in paths for _ in range(50)]
    for i, sock in enumerate(partial):
        sock.sendall(hello(token)[: i % 39 + 1])
    actor = Worker.remote()
    assert miniray.get([actor.ping.remote() for _ in range(100)], timeout=5) == [1] * 100
    for sock in silent + partial:
        sock.close()
    assert miniray.get(actor.ping.remote(), timeout=5) == 1


def test_a_greeting_in_pieces(engine):
    """A slow peer is served all the same."""
    with connect(engine.node.info.path(0)) as sock:
        for byte in hello(engine.node.info.token, proc=77):
            sock.sendall(bytes([byte]))
        eventually(lambda: 77 in engine.node._peers, 5)
    eventually(lambda: 77 not in engine.node._peers, 5)


def as_nobody(action):
    """Run ``action`` in a forked process of another user; its exit status."""
    pid = os.fork()
    if pid == 0:
        status = 99
        try:
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            status = action()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@needs_root
def test_another_user_cannot_enter_the_directory(paths, own_directory):
    os.chmod(own_directory, 0o755)

    def try_all():
        for path in paths:
            try:
                connect(path)
            except PermissionError:
                continue
            return 1
        return 0

    assert as_nobody(try_all) == 0


@needs_root
def test_another_user_who_got_past_the_directory(paths, engine, own_directory):
    """Even with the token: the kernel says who is at the other end."""
    token = engine.node.info.token
    for folder in (
        own_directory,
        os.path.dirname(os.path.dirname(paths[0])),
        os.path.dirname(paths[0]),
    ):
        os.chmod(folder, 0o755)
    for path in paths:
        os.chmod(path, 0o777)

    def greet():
        for path in paths:
            sock = connect(path)
            with contextlib.suppress(BrokenPipeError):
                sock.sendall(hello(token))
            if not is_dropped(sock):
                return 1
        return 0

    try:
        assert as_nobody(greet) == 0
    finally:
        os.chmod(os.path.dirname(os.path.dirname(paths[0])), 0o700)


def test_threads_of_strangers_at_once(paths):
    """Many at a time, while the session works."""

    def knock():
        for _ in range(20):
            with contextlib.suppress(OSError), connect(paths[0]) as sock:
                sock.sendall(os.urandom(40))
                is_dropped(sock)

    threads = [threading.Thread(target=knock) for _ in range(8)]
    for thread in threads:
        thread.start()
    actor = Worker.remote()
    for _ in range(100):
        assert miniray.get(actor.ping.remote(), timeout=5) == 1
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


def test_a_worker_whose_directory_vanished(engine):
    """Somebody cleaned /tmp: what runs goes on, what is new is refused with a reason."""
    actor = Worker.remote()
    assert miniray.get(actor.ping.remote()) == 1
    shutil.rmtree(engine.node.info.directory)
    assert miniray.get(actor.ping.remote(), timeout=5) == 1
    with pytest.raises((OSError, miniray.errors.MinirayError)):
        miniray.get(Worker.remote().ping.remote(), timeout=5)
