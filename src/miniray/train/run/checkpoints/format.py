"""The directory of one checkpoint: written atomically, and verified completely when read.

``CheckpointStore`` decides which checkpoints to write, keep and read.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from miniray.files import sync_directory
from miniray.train.run import records
from miniray.train.run.checkpoints.manifest import (
    MANIFEST,
    CheckpointInfo,
    check_files,
    dump_manifest,
    measure_file,
    open_regular,
)
from miniray.train.run.tensors import tensorfile
from miniray.train.run.tensors.encoding import ArraySource, Encoder, decode
from miniray.train.run.tensors.shards import SHARDS, ShardFiles, is_shard_file

#: Temporary directories that this process is writing now.
_writing: set[Path] = set()


# -- writing -------------------------------------------------------------------------------------


class LateState(NamedTuple):
    """Parts of the state that are read when a checkpoint is written.

    Attributes:
        names: Names of the parts.
        read: Function that accepts the directory that is being written. It returns the parts by
            name, and the names of files that it has added to the directory.
        at_once: Whether ``read`` must be called before ``save`` returns.
    """

    names: Sequence[str]
    read: Callable[[Path], tuple[Mapping[str, Any], Sequence[str]]]
    at_once: bool = False


class Contents:
    """The contents of a checkpoint: JSON, arrays by file, and the fields of the manifest.

    Args:
        epoch: Number of the epoch.
        state: The state, which is encoded immediately.
        allow_pickle: Pickle values that can't be stored otherwise.
        copy: Copy all arrays of ``state``, so that the caller may change them.
        late: Further parts of the state.

    Raises:
        CheckpointError: A value can't be stored; the error has the path to it.
    """

    def __init__(
        self,
        epoch: int,
        state: Mapping[str, Any],
        *,
        allow_pickle: bool,
        copy: bool,
        late: LateState | None = None,
    ) -> None:
        self.epoch, self.metrics = epoch, _metrics(state)
        self.serial = 0
        self.step: int | None = None
        names = (*state, *(() if late is None else late.names))
        self._names = dict(zip(names, _group_names(names), strict=True))  # name → file
        self._encoder = Encoder(allow_pickle=allow_pickle, copy=copy)
        self._keys: list[Any] = []
        self._values: list[Any] = []
        self.late = late
        self.added: Sequence[str] = ()  # files
        self._encode(state)

    def _encode(self, state: Mapping[str, Any]) -> None:
        for key, value in state.items():
            self._keys.append(self._encoder.encode(key, "keys"))
            self._values.append(self._encoder.encode(value, self._names[key], (key,)))

    def complete(self, directory: Path) -> bytes:
        """Read the remaining parts of the state, and return the JSON."""
        late, self.late = self.late, None
        if late is not None:
            self._encoder.copies = False
            state, self.added = late.read(directory)
            self._encode(state)
        body = {"keys": self._keys, "values": self._values}
        return json.dumps(body, allow_nan=False).encode()

    @property
    def groups(self) -> Mapping[str, Mapping[str, tensorfile.Entry]]:
        """The arrays by file and name."""
        return self._encoder.groups

    @property
    def nbytes(self) -> int:
        """Size of the arrays."""
        return sum(e.nbytes for group in self.groups.values() for e in group.values())


def write_checkpoint(path: Path, contents: Contents) -> None:
    """Write a temporary directory, flush it and rename it to ``path``. Delete it after errors."""
    with _open_aside(path) as partial:
        body = contents.complete(partial)
        for group, entries in contents.groups.items():
            tensorfile.write(partial / f"{group}.safetensors", entries, None)
        (partial / "state.json").write_bytes(body)
        arrays = (f"{group}.safetensors" for group in contents.groups)
        names = [*arrays, "state.json", *contents.added]
        sums = {name: measure_file(partial / name) for name in names}
        (partial / MANIFEST).write_bytes(_create_manifest(contents, sums))
        for name in (*names, MANIFEST):
            records.flush(partial / name)
        sync_directory(partial)
        os.rename(partial, path)
        _writing.discard(partial)
    sync_directory(path.parent)


def begin_checkpoint(path: Path, contents: Contents) -> None:
    """Read the remaining parts of the state, before ``write_checkpoint`` runs in a thread."""
    with _open_aside(path) as partial:
        contents.complete(partial)


@contextlib.contextmanager
def _open_aside(path: Path) -> Iterator[Path]:
    """Create the temporary directory if it doesn't exist. Delete it if the code inside raises."""
    partial = _create_aside_path(path)
    _writing.add(partial)
    try:
        partial.mkdir(exist_ok=True)
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        _writing.discard(partial)
        raise


def _create_manifest(contents: Contents, sums: Mapping[str, Any]) -> bytes:
    fields = {
        "epoch": contents.epoch,
        **({} if contents.step is None else {"step": contents.step}),
        "serial": contents.serial,
        "metrics": contents.metrics,
        "files": sums,
    }
    return dump_manifest(fields)


def _group_names(keys: Iterable[Any]) -> list[str]:
    """Return a file name for each part of the state: its key, if that is a valid file name."""
    names: list[str] = []
    for i, key in enumerate(keys):
        fits = isinstance(key, str) and re.fullmatch(r"[A-Za-z0-9_]{1,64}", key)
        # Some file systems are case-insensitive.
        taken = str(key).lower() in (name.lower() for name in names)
        names.append(str(key) if fits and not taken else f"part-{i}")
    return names


def _metrics(state: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that are available to ``keep_best``."""
    source = state.get("metrics")
    if source is None and state.get("history"):
        source = state["history"][-1]
    if not isinstance(source, Mapping):
        return {}
    numbers = {str(key): records.finite(value) for key, value in source.items()}
    return {key: value for key, value in numbers.items() if value is not None}


# -- deleting ------------------------------------------------------------------------------------


def discard_checkpoint(path: Path) -> None:
    """Delete a checkpoint, or warn. Rename it first, so that readers never see a part of it."""
    try:
        os.rename(path, _create_aside_path(path))
        shutil.rmtree(_create_aside_path(path))
    except OSError as error:
        warnings.warn(f"couldn't delete checkpoint {path}: {error}", stacklevel=2)


def remove_leftovers(directory: Path) -> None:
    """Delete the temporary directories of processes that have ended."""
    for path in directory.glob(".partial-*"):
        pid = path.name.rpartition("-")[2]
        if pid.isdigit() and path not in _writing and not _is_other_process(int(pid)):
            shutil.rmtree(path, ignore_errors=True)


def _create_aside_path(path: Path) -> Path:
    return path.with_name(f".partial-{path.name}-{os.getpid()}")


def _is_other_process(pid: int) -> bool:
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # the process of a different user
        pass
    return True


# -- reading -------------------------------------------------------------------------------------


def read_checkpoint(checkpoint: CheckpointInfo, *, allow_pickle: bool) -> dict[str, Any]:
    """Verify all files, and return the state.

    Raises:
        OSError, ValueError, KeyError: A file is missing or damaged.
        CheckpointError: A part is pickled, and ``allow_pickle`` is False.
    """
    check_files(checkpoint)
    with open_regular(checkpoint.path / "state.json") as file:
        body = json.loads(file.readall())
    with contextlib.ExitStack() as stack:
        files = {
            name: stack.enter_context(tensorfile.TensorFile(checkpoint.path / name))
            for name in checkpoint.files
            if name.endswith(".safetensors")
        }
        groups: dict[str, ArraySource] = {
            name.removesuffix(".safetensors"): file for name, file in files.items()
        }
        groups[SHARDS] = ShardFiles(f for name, f in files.items() if is_shard_file(name))
        keys = decode(body["keys"], groups)
        values = decode(body["values"], groups, allow_pickle=allow_pickle)
    return dict(zip(keys, values, strict=True))
