"""The manifest of a checkpoint, which lists its files with sizes and checksums."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miniray.checks import check_int

FORMAT = "miniray-checkpoint-1"
MANIFEST = "manifest.json"
#: Entries of a checkpoint directory with other names belong to the user and are never changed.
CHECKPOINT_NAME = re.compile(r"epoch-\d+(-step-\d+)?(-\d+)?")
_PIECE = 1 << 20  # bytes read at a time
_LARGEST_MANIFEST = 1 << 26


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint as its manifest describes it.

    ``serial`` increases with every checkpoint. ``step`` is the number of completed steps of the
    run, if the epoch wasn't complete.
    """

    path: Path
    epoch: int
    serial: int
    metrics: Mapping[str, float]
    files: Mapping[str, Mapping[str, Any]]
    step: int | None = None

    @property
    def nbytes(self) -> int:
        """Size of all files, in bytes."""
        return sum(int(entry["bytes"]) for entry in self.files.values())

    def problem(self) -> str | None:
        """Return what is wrong with the files, or None if all match their checksums."""
        try:
            check_files(self)
        except (OSError, ValueError) as error:
            return str(error)
        return None


def dump_manifest(fields: Mapping[str, Any]) -> bytes:
    """Return the manifest with these fields: those of ``CheckpointInfo``, except the path."""
    content = {"format": FORMAT, **fields}
    return json.dumps({**content, "checksum": _checksum(content)}, indent=1).encode() + b"\n"


def _checksum(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()


def inspect_checkpoint(path: Path) -> CheckpointInfo | str:
    """Return the checkpoint at ``path`` as its manifest describes it, or what is wrong with it.

    The sizes of the files are checked, but not their contents.
    """
    try:
        with open_regular(path / MANIFEST) as file:
            found = parse_manifest(path, file.read(_LARGEST_MANIFEST))
        if isinstance(found, str):
            return found
        for name, entry in found.files.items():
            try:
                with open_regular(path / name) as file:
                    size = os.fstat(file.fileno()).st_size
            except ValueError as error:
                return str(error)
            if size != entry["bytes"]:
                return f"{name} has {size} bytes, not {entry['bytes']}"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing" if path.exists() else "it doesn't exist"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"manifest.json can't be read: {error}"
    return found


def parse_manifest(path: Path, data: bytes) -> CheckpointInfo | str:
    """Return the checkpoint at ``path`` that a manifest describes, or what is wrong with it."""
    try:
        content = json.loads(data)
        if content.pop("checksum", None) != _checksum(content):
            return "manifest.json doesn't match its checksum"
        if content["format"] != FORMAT:
            return f"its format is {content['format']!r}, but this version reads {FORMAT!r}"
        for name in ("epoch", "serial", *(("step",) if "step" in content else ())):
            check_int(name, content[name], 0)
        if "state.json" not in content["files"]:
            return "its manifest lists no state.json"
        for name in content["files"]:
            if name != os.path.basename(name) or name in ("", ".", ".."):
                return f"its manifest names {name!r}, which isn't a file of the checkpoint"
    except (
        *(ValueError, KeyError, TypeError, AttributeError),
        RecursionError,  # JSON nested too deeply
    ) as error:
        return f"manifest.json can't be read: {error}"
    return CheckpointInfo(
        path,
        content["epoch"],
        content["serial"],
        content["metrics"],
        content["files"],
        content.get("step"),
    )


def open_regular(path: Path) -> io.FileIO:
    """Open a file of a checkpoint. Raise ``ValueError`` for links, devices and pipes."""
    # Opening a pipe would wait for its writer, and a link could lead outside the checkpoint.
    try:
        file = io.FileIO(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError(f"{path.name} is a link, not a file") from None
        raise
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ValueError(f"{path.name} isn't a regular file")
    return file


def measure_file(path: Path) -> dict[str, Any]:
    """Return the size and the checksum (BLAKE2b) of a file."""
    checksum = hashlib.blake2b(digest_size=32)
    size = 0
    piece = memoryview(bytearray(_PIECE))
    with open_regular(path) as file:
        while count := file.readinto(piece):
            checksum.update(piece[:count])
            size += count
    return {"bytes": size, "blake2b": checksum.hexdigest()}


def check_files(checkpoint: CheckpointInfo) -> None:
    """Raise ``ValueError`` if the contents of a file don't match its checksum."""
    for name, expected in checkpoint.files.items():
        if measure_file(checkpoint.path / name) != dict(expected):
            raise ValueError(f"{name} doesn't match its checksum")
