"""Snapshots of the ranks' state in shared memory that the driver owns.

Each rank has a buffer with one or two slots and copies its part of the state into one of them
after an optimizer step. The memory outlives the ranks, so a restart continues from the newest step
that every rank has committed, and the driver can write a checkpoint while the ranks continue. The
memory is freed when the driver exits; afterwards, a run can only resume from checkpoints on disk.

The state at one step can change, such as at the end of an epoch or in a call of the driver. The
driver then lets all ranks write it again, and counts these calls. A snapshot with a higher count is
newer.

A slot:

====================  =============================================================================
header page           magic, phase, count, step, size and checksum of the index, size of the data
data                  arrays, each aligned to 64 bytes
index                 JSON: the structure of the state, and where each array is
====================  =============================================================================

The phase is ``WRITING`` while a rank writes and ``COMMITTED`` afterwards, so a rank that is killed
in between leaves a slot that is ignored.

The state of a rank has two parts. ``shared`` is equal on all ranks: rank r of n copies only the
r-th n-th of its bytes. ``own`` belongs to that rank.
"""

from __future__ import annotations

import enum
import json
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from miniray.core import SharedBuffer
from miniray.errors import ObjectStoreFullError
from miniray.train.run.tensors.encoding import Encoder, decode
from miniray.train.run.tensors.tensorfile import Entry

_MAGIC = b"mrsnap01"
#: Magic, phase, count, step, bytes of the index, its checksum, bytes of the data.
_HEADER = struct.Struct("<8sQqqQQQ")
_PHASE = struct.Struct("<Q")
_PAGE = 4096
_ALIGNMENT = 64
#: Room for a longer index, such as larger numbers in it, as a factor and in bytes.
_INDEX_FACTOR, _INDEX_EXTRA = 2, 4096


class SlotPhase(enum.IntEnum):
    """State of a slot."""

    EMPTY = 0
    WRITING = 1
    COMMITTED = 2


class Snapshot(NamedTuple):
    """The state after a step: the part that all ranks share, and the separate part of each rank."""

    step: int
    shared: Any
    own: list[Any]


class _Version(NamedTuple):
    """Orders snapshots; see the module."""

    num_kept: int
    step: int


_EMPTY = _Version(-1, -1)


class _Piece(NamedTuple):
    """A range of the bytes of one array, and its place in the slot's data."""

    part: str  # "shared" or "own"
    name: str
    entry: Entry
    start: int
    stop: int
    offset: int


class _Layout:
    """The state of one rank, encoded: which bytes of which arrays go where in a slot."""

    def __init__(self, shared: Any, own: Any, rank: int, world_size: int) -> None:
        encoder = Encoder()
        self.structure = {
            "shared": encoder.encode(shared, "shared"),
            "own": encoder.encode(own, "own"),
        }
        self.pieces = list(_assign_pieces(encoder.groups, rank, world_size))
        self.data_bytes = _align(max((p.offset + p.stop - p.start for p in self.pieces), default=0))

    def index(self) -> bytes:
        pieces = []
        for part, name, entry, *places in self.pieces:
            pieces.append([part, name, entry.dtype, entry.shape, entry.nbytes, *places])
        return json.dumps({**self.structure, "pieces": pieces}).encode()


def _assign_pieces(
    groups: Mapping[str, Mapping[str, Entry]], rank: int, world_size: int
) -> Iterator[_Piece]:
    """Yield this rank's range of the shared bytes, and all bytes of its separate state."""
    offset = position = 0
    shared = groups.get("shared", {})
    total = sum(entry.nbytes for entry in shared.values())
    first, last = total * rank // world_size, total * (rank + 1) // world_size
    for name, entry in shared.items():
        start = min(max(first - position, 0), entry.nbytes)
        stop = min(max(last - position, 0), entry.nbytes)
        position += entry.nbytes
        if stop > start or not entry.nbytes:
            yield _Piece("shared", name, entry, start, stop, offset)
            offset = _align(offset + stop - start)
    for name, entry in groups.get("own", {}).items():
        yield _Piece("own", name, entry, 0, entry.nbytes, offset)
        offset = _align(offset + entry.nbytes)


def _align(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def measure_slot(shared: Any, own: Any, rank: int, world_size: int) -> int:
    """Return how many bytes a slot needs for this state of a rank."""
    layout = _Layout(shared, own, rank, world_size)
    room = _INDEX_FACTOR * len(layout.index()) + _INDEX_EXTRA
    return -(-(_PAGE + layout.data_bytes + room) // _PAGE) * _PAGE


class SnapshotWriter:
    """Copies a rank's state into its buffer.

    All ranks of a group must save the same steps in the same order, because each rank overwrites
    its oldest slot.
    """

    def __init__(self, buffer: SharedBuffer, num_slots: int, rank: int, world_size: int) -> None:
        self._memory = buffer.map()
        self._slot_bytes = buffer.size // num_slots
        self._rank, self._world_size = rank, world_size
        self._versions = [_EMPTY] * num_slots

    def save(self, step: int, shared: Any, own: Any, count: int = 0) -> bool:
        """Write a snapshot into the oldest slot. ``count`` never decreases.

        Returns:
            False if the state has outgrown the slots. Then nothing was written.
        """
        slot = min(range(len(self._versions)), key=self._versions.__getitem__)
        layout = _Layout(shared, own, self._rank, self._world_size)
        index = layout.index()
        if _PAGE + layout.data_bytes + len(index) > self._slot_bytes:
            return False
        self._versions[slot] = _EMPTY
        memory = self._memory[slot * self._slot_bytes : (slot + 1) * self._slot_bytes]
        _set_phase(memory, SlotPhase.WRITING)
        for piece in layout.pieces:
            start = _PAGE + piece.offset
            _copy_bytes(piece, memory[start : start + piece.stop - piece.start])
        start = _PAGE + layout.data_bytes
        memory[start : start + len(index)] = index
        checksum = zlib.crc32(index)
        sizes = (len(index), checksum, layout.data_bytes)
        memory[: _HEADER.size] = _HEADER.pack(_MAGIC, SlotPhase.WRITING, count, step, *sizes)
        _set_phase(memory, SlotPhase.COMMITTED)
        self._versions[slot] = _Version(count, step)
        return True


def _set_phase(memory: memoryview, phase: SlotPhase) -> None:
    memory[8:16] = _PHASE.pack(phase)


def _copy_bytes(piece: _Piece, target: memoryview) -> None:
    """Copy a range of an array's bytes; from a GPU only this range."""
    if piece.stop == piece.start:
        return
    value = piece.entry.value
    if isinstance(value, np.ndarray):
        data = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        np.copyto(np.frombuffer(target, np.uint8), data[piece.start : piece.stop])
        return
    import torch

    values = value.detach().resolve_conj().resolve_neg().contiguous()
    source = values.reshape(-1).view(torch.uint8)[piece.start : piece.stop]
    torch.frombuffer(target, dtype=torch.uint8).copy_(source)


class SnapshotArena:
    """The buffers of all ranks, in the driver. See the module.

    Args:
        num_slots: Snapshots per rank. With two, one is always complete.
    """

    def __init__(self, num_slots: int = 2) -> None:
        self.num_slots = num_slots
        self._buffers: list[SharedBuffer] = []

    def reserve(self, slot_bytes: Sequence[int]) -> list[SharedBuffer]:
        """Allocate a buffer per rank, and drop earlier snapshots.

        Raises:
            ObjectStoreFullError: The machine or the control group has too little memory.
            CapabilityError: The engine has no shared memory.
        """
        self.close()
        try:
            for size in slot_bytes:
                self._buffers.append(SharedBuffer(self.num_slots * size))
        except ObjectStoreFullError:
            self.close()
            raise
        return list(self._buffers)

    @property
    def nbytes(self) -> int:
        """Number of bytes allocated."""
        return sum(buffer.size for buffer in self._buffers)

    def find_newest_step(self) -> int | None:
        """Return the step of the newest snapshot of all ranks; None if there is none."""
        newest = max(self._find_committed(), default=None)
        return None if newest is None else newest.step

    def read(self, step: int, *, copy: bool = True) -> Snapshot:
        """Return a step's newest state.

        Without ``copy``, an array that one rank has written as a whole is in the arena's memory. It
        changes when that rank overwrites the slot.

        Raises:
            KeyError: Some rank hasn't committed this step.
        """
        found = self._find_committed()
        versions = [version for version in found if version.step == step]
        if not versions:
            raise KeyError(step)
        return _assemble(step, found[max(versions)], copy)

    def _find_committed(self) -> dict[_Version, list[memoryview]]:
        """Return the slots of each snapshot that all ranks have committed, by rank."""
        by_rank = [dict(_iter_committed(buffer, self.num_slots)) for buffer in self._buffers]
        common = set.intersection(*map(set, by_rank)) if by_rank else set()
        return {version: [slots[version] for slots in by_rank] for version in common}

    def clear(self) -> None:
        """Mark all slots as empty. No rank may be writing."""
        for buffer in self._buffers:
            size = buffer.size // self.num_slots
            for slot in range(self.num_slots):
                _set_phase(buffer.map()[slot * size :], SlotPhase.EMPTY)

    def close(self) -> None:
        """Free the memory once no rank uses it."""
        for buffer in self._buffers:
            buffer.close()
        self._buffers.clear()


def _iter_committed(buffer: SharedBuffer, num_slots: int) -> Iterator[tuple[_Version, memoryview]]:
    memory = buffer.map()  # torch warns about arrays that are read-only
    size = buffer.size // num_slots
    for slot in range(num_slots):
        view = memory[slot * size : (slot + 1) * size]
        magic, phase, count, step, index_bytes, checksum, data_bytes = _HEADER.unpack_from(view)
        start = _PAGE + data_bytes
        if (
            magic == _MAGIC
            and phase == SlotPhase.COMMITTED
            and start + index_bytes <= size
            and zlib.crc32(view[start : start + index_bytes]) == checksum
        ):
            yield _Version(count, step), view


def _assemble(step: int, slots: Sequence[memoryview], copy: bool) -> Snapshot:
    """Put the state together from one slot of each rank."""
    indexes = []
    for view in slots:
        *_, index_bytes, _, data_bytes = _HEADER.unpack_from(view)
        start = _PAGE + data_bytes
        indexes.append(json.loads(bytes(view[start : start + index_bytes])))
    shared = _Arrays(copy)
    own = [_Arrays(copy) for _ in slots]
    for view, index, arrays in zip(slots, indexes, own, strict=True):
        for part, name, dtype, shape, nbytes, start, stop, offset in index["pieces"]:
            data = np.frombuffer(view, np.uint8, stop - start, _PAGE + offset)
            (shared if part == "shared" else arrays).add(name, dtype, shape, nbytes, start, data)
    return Snapshot(
        step,
        decode(indexes[0]["shared"], {"shared": shared}),
        [decode(index["own"], {"own": arrays}) for index, arrays in zip(indexes, own, strict=True)],
    )


class _Arrays:
    """Arrays by name, filled piece by piece. ``decode`` reads them like those of a file."""

    def __init__(self, copy: bool) -> None:
        self._copy = copy
        self._bytes: dict[str, Any] = {}
        self._types: dict[str, tuple[str, list[int]]] = {}

    def add(
        self, name: str, dtype: str, shape: list[int], nbytes: int, start: int, data: Any
    ) -> None:
        self._types[name] = (dtype, shape)
        if not self._copy and len(data) == nbytes:
            self._bytes[name] = data
            return
        if name not in self._bytes:
            self._bytes[name] = np.empty(nbytes, np.uint8)
        self._bytes[name][start : start + len(data)] = data

    def numpy(self, name: str) -> Any:
        dtype, shape = self._types[name]
        return self._bytes[name].view(dtype).reshape(shape)

    def torch(self, name: str) -> Any:
        import torch

        dtype, shape = self._types[name]
        values = torch.from_numpy(self._bytes[name])
        kind = getattr(torch, dtype)
        return (
            values.view(kind).reshape(shape) if values.numel() else torch.empty(shape, dtype=kind)
        )
