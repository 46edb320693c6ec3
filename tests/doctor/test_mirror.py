"""The exchange of boxes between machines: who is let in, and what they may write."""

import contextlib
import json
import multiprocessing
import os
import socket
import struct
import threading
import zlib

import pytest

from miniray.doctor import layout, mirror_wire
from miniray.doctor.box import Box
from miniray.doctor.launch_mirror import Mirror
from miniray.doctor.mirror_wire import BOX, CELLS, EXIT, SAID, STACK, Copies, packed
from miniray.errors import MinirayError
from tests.doctor.helpers import wait_until

TOKEN = "the token of this run"
OURS = {"node_rank": 1, "world_size": 2, "seed": 5, "run_id": "x"}


@pytest.fixture
def box(tmp_path):
    box = Box.create(tmp_path / "sent.box")
    yield bytes(box.memory)
    box.close()


class Meeting:
    """Machine 0 of two with a rank each, waiting for the other."""

    def __init__(self, folder):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = ("127.0.0.1", probe.getsockname()[1])
        self.folder = folder
        folder.mkdir()
        self.said = []
        self.mirror = self.machine(0, folder, TOKEN)
        self.agreed = None
        self._thread = threading.Thread(target=self._meet, daemon=True)
        self._thread.start()

    def machine(self, node, folder, token):
        return Mirror(folder, 1, node, 2, self.address, token, self.said.append)

    def _meet(self):
        self.agreed = self.mirror.meet({**OURS, "node_rank": 0, "seed": 7})

    def connect(self):
        def try_it():
            try:
                return socket.create_connection(self.address, timeout=30)
            except ConnectionRefusedError:  # it does not listen yet
                return None

        return wait_until(try_it)

    def join(self):
        peer = self.connect()
        agreed = mirror_wire.join(peer, TOKEN, OURS)
        self._thread.join(30)
        return peer, agreed

    def written(self):
        return sorted(path.name for path in self.folder.iterdir())


@pytest.fixture
def meeting(tmp_path):
    meeting = Meeting(tmp_path / "ranks")
    yield meeting
    if meeting.agreed is None:  # it still waits: for this one
        meeting.join()[0].close()
    meeting.mirror.close()


def test_who_knows_the_token_is_let_in_and_its_box_is_kept(meeting, box):
    peer, agreed = meeting.join()
    assert agreed["seed"] == 7  # machine 0's
    with peer:
        mirror_wire.send(peer, BOX, 1, packed(box))
        wait_until(lambda: meeting.written() == ["1.box"])
        assert (meeting.folder / "1.box").read_bytes() == box


def test_another_token_is_refused_on_both_sides_and_nothing_is_written(meeting, tmp_path):
    other = meeting.machine(1, tmp_path / "other", "another token altogether")
    with pytest.raises(MinirayError, match=r"MINIRAY_RUN_TOKEN .* machine 0"):
        other.meet(OURS)
    wait_until(lambda: any("127.0.0.1" in line and "token" in line for line in meeting.said))
    assert meeting.written() == []
    assert meeting.agreed is None  # it waits on, for the right one


def test_who_sends_before_a_proof_is_refused(meeting, box):
    with meeting.connect() as peer:
        mirror_wire.send(peer, BOX, 1, packed(box))
        assert mirror_wire.receive(peer)[0] == b"CHAL"
        with pytest.raises((EOFError, ConnectionError)):
            mirror_wire.receive(peer)
    assert meeting.written() == []


def test_a_proof_cannot_be_sent_back_to_whoever_made_it():
    """A false machine 0 that only repeats what it hears does not know the token."""
    ours, theirs = socket.socketpair()
    with ours, theirs:

        def repeat():
            mirror_wire.send(theirs, b"CHAL", 0, b"c" * 32)
            mirror_wire.send(theirs, *mirror_wire.receive(theirs))

        thread = threading.Thread(target=repeat, daemon=True)
        thread.start()
        with pytest.raises(MinirayError, match=r"machine 0 .* token"):
            mirror_wire.join(ours, TOKEN, OURS)
        thread.join(30)


BAD = {
    "a rank of another machine": (BOX, 0, None),
    "a rank that does not exist": (STACK, 7, b"x"),
    "no box": (BOX, 1, zlib.compress(b"x" * layout.BOX_SIZE)),
    "more than a box": (BOX, 1, zlib.compress(bytes(100_000_000))),
    "no compressed box": (BOX, 1, b"x" * 100),
    "cells of another size": (CELLS, 1, b"x" * 16),
    "an end that is no JSON": (EXIT, 1, b"{"),
    "an end of lists in lists": (EXIT, 1, b"[" * 50_000),
    "a word of lists in lists": (SAID, 0, b"[" * 50_000),
    "another machine's word": (SAID, 0, json.dumps({"node": 0, "failed": "x"}).encode()),
    "a kind that is not known": (b"EXEC", 1, b"x"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_a_peer_may_not_send_ends_the_connection_unwritten(meeting, box, what):
    kind, rank, data = BAD[what]
    peer, _ = meeting.join()
    with peer:
        mirror_wire.send(peer, kind, rank, packed(box) if data is None else data)
        wait_until(lambda: meeting.mirror.lost)
    assert meeting.written() == []
    assert meeting.mirror.heard() == {}


def test_a_frame_larger_than_its_kind_may_be_is_not_even_read(golden):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(struct.pack("<4sII", STACK, 1, 65537))
        with pytest.raises(ValueError) as caught:
            mirror_wire.receive(ours)
    golden("mirror/frame_too_large.txt", f"{caught.value}\n")


@pytest.fixture
def copies(tmp_path):
    with contextlib.closing(Copies(tmp_path)) as copies:
        yield copies


def cells(first):
    return struct.pack("<q", first) + bytes(layout.CELLS * 8 - 8)


def test_copies_are_replaced_in_place_for_readers_that_have_them_open(copies, tmp_path, box):
    copies.take(BOX, 3, packed(box))
    node = (tmp_path / "3.box").stat().st_ino
    copies.take(CELLS, 3, cells(42))
    assert (tmp_path / "3.box").stat().st_ino == node
    assert (tmp_path / "3.box").read_bytes()[layout.CELLS_AT :][:8] == struct.pack("<q", 42)


def test_a_truncated_copy_does_not_end_the_launcher(tmp_path, box):
    """A launcher that maps its copies would die with SIGBUS."""
    path = tmp_path / "3.box"

    def mirror():
        with contextlib.closing(Copies(tmp_path)) as copies:
            copies.take(BOX, 3, packed(box))
            for kind, data in ((CELLS, cells(42)), (BOX, packed(box))):
                os.truncate(path, 100)
                copies.take(kind, 3, data)

    child = multiprocessing.get_context("fork").Process(target=mirror)
    child.start()
    child.join(30)
    assert child.exitcode == 0
    assert path.read_bytes() == box  # the next whole box restores it
