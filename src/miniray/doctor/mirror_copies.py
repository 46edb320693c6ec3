"""Boxes of other machines' ranks, written into this run directory as they come in.

Only three names a rank are ever written: ``<rank>.box``, ``.stack`` and ``.exit``. What has not the
size or form of such a file is a ``ValueError``, and nothing is written.
"""

from __future__ import annotations

import json
import mmap
import os
import zlib
from pathlib import Path

from miniray.doctor import layout, runfile
from miniray.doctor.mirror_wire import BOX, CELLS, EXIT, STACK


def packed(box: bytes) -> bytes:
    """A box as it travels."""
    return zlib.compress(box, 1)


class Copies:
    """The copies in one folder. Whose ranks may be written is the caller's to know."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._memory: dict[int, mmap.mmap] = {}

    def take(self, kind: bytes, rank: int, data: bytes) -> None:
        if kind == BOX:
            self._box(rank, _unpacked(data))
        elif kind == CELLS:
            if len(data) != layout.CELLS * 8:
                raise ValueError("cells of another size")
            if rank in self._memory:
                start = layout.CELLS_AT
                self._memory[rank][start : start + len(data)] = data
        elif kind == STACK:
            (self._folder / f"{rank}.stack").write_bytes(data)
        elif kind == EXIT:
            if not isinstance(json.loads(data), dict):
                raise ValueError("an end that is none")
            runfile.replace_text(self._folder / f"{rank}.exit", data.decode())
        else:
            raise ValueError(f"nothing that can be kept: {kind!r}")

    def _box(self, rank: int, data: bytes) -> None:
        if rank not in self._memory:
            path = self._folder / f"{rank}.box"
            partial = path.with_name(f".{path.name}.partial")
            partial.write_bytes(data)
            with open(partial, "r+b") as file:
                self._memory[rank] = mmap.mmap(file.fileno(), layout.BOX_SIZE)
            os.replace(partial, path)
            return
        # Readers have it mapped: in place, and the cells, which refer to the rest, last.
        memory, cells_end = self._memory[rank], layout.CELLS_AT + layout.CELLS * 8
        memory[cells_end:] = data[cells_end:]
        memory[layout.CELLS_AT : cells_end] = data[layout.CELLS_AT : cells_end]


def _unpacked(data: bytes) -> bytes:
    """A whole box, and never more memory than one takes. ``ValueError`` for anything else."""
    unpacker = zlib.decompressobj()
    try:
        box = unpacker.decompress(data, layout.BOX_SIZE + 1)
    except zlib.error as error:
        raise ValueError(f"a box that is none: {error}") from error
    if len(box) != layout.BOX_SIZE or not box.startswith(layout.MAGIC):
        raise ValueError("a box that is none")
    return box
