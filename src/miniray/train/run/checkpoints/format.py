"""The directory of one checkpoint: written atomically, and verified completely when read.

``CheckpointStore`` decides which checkpoints to write, keep and read.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import re
import shutil
import stat
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from miniray.checks import check_int
from miniray.files import sync_directory
from miniray.train.run import records
from miniray.train.run.tensors import tensorfile
from miniray.train.run.tensors.encoding import ArraySource, Encoder, decode
from miniray.train.run.tensors.shards import SHARDS, ShardFiles, is_shard_file

FORMAT = "miniray-checkpoint-1"
MANIFEST = "manifest.json"
#: Entries of a checkpoint directory with other names belong to the user and are never changed.
CHECKPOINT_NAME = re.compile(r"epoch-\d+(-step-\d+)?(-\d+)?")
_PIECE = 1 << 20  # bytes read at a time
_LARGEST_MANIFEST = 1 << 26

#: Temporary directories that this process is writing now.
_writing: set[Path] = set()


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
            _check_files(self)
        except (OSError, ValueError) as error:
            return str(error)
        return None


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
        sums = {name: _measure_file(partial / name) for name in names}
        (partial / "manifest.json").write_bytes(_manifest(contents, sums))
        for name in (*names, "manifest.json"):
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


def _measure_file(path: Path) -> dict[str, Any]:
    """Return the size and the checksum (BLAKE2b) of a file."""
    checksum = hashlib.blake2b(digest_size=32)
    size = 0
    piece = memoryview(bytearray(_PIECE))
    with _open_regular(path) as file:
        while count := file.readinto(piece):
            checksum.update(piece[:count])
            size += count
    return {"bytes": size, "blake2b": checksum.hexdigest()}


def _manifest(contents: Contents, sums: Mapping[str, Any]) -> bytes:
    content = {
        "format": FORMAT,
        "epoch": contents.epoch,
        **({} if contents.step is None else {"step": contents.step}),
        "serial": contents.serial,
        "metrics": contents.metrics,
        "files": sums,
    }
    return json.dumps({**content, "checksum": _checksum(content)}, indent=1).encode() + b"\n"


def _checksum(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()


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


def inspect_checkpoint(path: Path) -> CheckpointInfo | str:
    """Return the checkpoint at ``path`` as its manifest describes it, or what is wrong with it.

    The sizes of the files are checked, but not their contents.
    """
    try:
        with _open_regular(path / MANIFEST) as file:
            found = parse_manifest(path, file.read(_LARGEST_MANIFEST))
        if isinstance(found, str):
            return found
        for name, entry in found.files.items():
            try:
                with _open_regular(path / name) as file:
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


def _open_regular(path: Path) -> io.FileIO:
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


def read_checkpoint(checkpoint: CheckpointInfo, *, allow_pickle: bool) -> dict[str, Any]:
    """Verify all files, and return the state.

    Raises:
        OSError, ValueError, KeyError: A file is missing or damaged.
        CheckpointError: A part is pickled, and ``allow_pickle`` is False.
    """
    _check_files(checkpoint)
    with _open_regular(checkpoint.path / "state.json") as file:
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


def _check_files(checkpoint: CheckpointInfo) -> None:
    for name, expected in checkpoint.files.items():
        if _measure_file(checkpoint.path / name) != dict(expected):
            raise ValueError(f"{name} doesn't match its checksum")
