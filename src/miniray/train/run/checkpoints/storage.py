"""Copies of checkpoints outside of the run directory: a local path or an fsspec URL.

Object stores have no rename. So the manifest, which lists all other files with their checksums, is
written last and deleted first, and a checkpoint without a manifest doesn't exist.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from miniray.errors import CheckpointError
from miniray.train.options import warn
from miniray.train.run.checkpoints.manifest import (
    CHECKPOINT_NAME,
    MANIFEST,
    CheckpointInfo,
    inspect_checkpoint,
    parse_manifest,
)
from miniray.train.run.checkpoints.retention import Retention


class CheckpointStorage(Protocol):
    """Storage for copies of checkpoints. Only one process may write; any number may read."""

    #: Name of the storage in messages.
    url: str

    def list(self) -> Sequence[CheckpointInfo]:
        """Return the complete checkpoints, oldest first. Their ``path`` is only a name."""

    def write(self, checkpoint: CheckpointInfo) -> None:
        """Copy a checkpoint of the local disk, in place of one with the same name."""

    def read(self, checkpoint: CheckpointInfo, directory: Path) -> Path:
        """Copy a checkpoint of ``list`` into ``directory``, and return its path there."""

    def delete(self, checkpoint: CheckpointInfo) -> None:
        """Delete a checkpoint of ``list``."""


class FsspecStorage:
    """Keeps checkpoints in a directory of any fsspec file system.

    Raises:
        ImportError: The package for this kind of URL isn't installed.
        ValueError: fsspec doesn't know this kind of URL.
    """

    def __init__(self, url: str | os.PathLike[str]) -> None:
        try:
            import fsspec
        except ImportError as error:
            raise ImportError("checkpoint_dir= needs fsspec: pip install fsspec") from error
        self.url = os.fspath(url)
        self._system, self._root = fsspec.core.url_to_fs(self.url)
        self._root = self._root.rstrip("/")

    def list(self) -> Sequence[CheckpointInfo]:
        found = [self._inspect(name) for name in self._list_names()]
        return sorted((c for c in found if c is not None), key=lambda c: c.serial)

    def write(self, checkpoint: CheckpointInfo) -> None:
        name = checkpoint.path.name
        for other in self._list_names():  # what a writer that was killed has left
            if other == name or self._inspect(other) is None:
                self._delete(other)
        target = f"{self._root}/{name}"
        self._system.makedirs(target, exist_ok=True)
        for file in (*checkpoint.files, MANIFEST):
            self._system.put_file(str(checkpoint.path / file), f"{target}/{file}")

    def read(self, checkpoint: CheckpointInfo, directory: Path) -> Path:
        target = directory / checkpoint.path.name
        target.mkdir()
        for file in (*checkpoint.files, MANIFEST):
            source = f"{self._root}/{checkpoint.path.name}/{file}"
            self._system.get_file(source, str(target / file))
        return target

    def delete(self, checkpoint: CheckpointInfo) -> None:
        self._delete(checkpoint.path.name)

    def _list_names(self) -> Sequence[str]:
        self._system.invalidate_cache()
        try:
            paths = self._system.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        names = {path.rstrip("/").rpartition("/")[2] for path in paths}
        return sorted(name for name in names if CHECKPOINT_NAME.fullmatch(name))

    def _inspect(self, name: str) -> CheckpointInfo | None:
        try:
            data = self._system.cat_file(f"{self._root}/{name}/{MANIFEST}")
        except FileNotFoundError:
            return None
        found = parse_manifest(Path(name), data)
        return None if isinstance(found, str) else found

    def _delete(self, name: str) -> None:
        path = f"{self._root}/{name}"
        if self._system.exists(f"{path}/{MANIFEST}"):
            self._system.rm_file(f"{path}/{MANIFEST}")
        if self._system.exists(path):
            self._system.rm(path, recursive=True)


def list_copies(storage: CheckpointStorage) -> Sequence[CheckpointInfo]:
    """Return ``storage.list()``. Raise ``CheckpointError`` if it can't be read."""
    try:
        return storage.list()
    except Exception as error:  # each file system has its own errors
        raise CheckpointError(
            f"checkpoint_dir {storage.url} can't be read: {type(error).__name__}: {error}",
            entry=storage.url,
        ) from error


class CheckpointCopies:
    """The copies of a run's checkpoints in a storage. If copying fails, the run continues.

    Args:
        storage: Where the copies are.
        on_event: Receives an event for each copy that fails.

    Attributes:
        last_serial: Serial number of the newest copy, or 0.
    """

    def __init__(
        self, storage: CheckpointStorage, on_event: Callable[[dict[str, Any]], None]
    ) -> None:
        self._storage, self._on_event = storage, on_event
        self.last_serial = max((copy.serial for copy in list_copies(storage)), default=0)
        self._has_failed = False

    def add(self, path: Path, retention: Retention) -> None:
        """Copy a checkpoint, and delete copies that aren't kept. If that fails, warn once."""
        checkpoint, storage = inspect_checkpoint(path), self._storage
        assert not isinstance(checkpoint, str), checkpoint
        try:
            storage.write(checkpoint)
            for unwanted in retention.find_unwanted(storage.list(), Path(path.name)):
                storage.delete(unwanted)
        except Exception as error:  # each file system has its own errors
            reason = f"{type(error).__name__}: {error}"
            event = {"event": "checkpoint_copy_failed", "url": storage.url, "path": str(path)}
            self._on_event({**event, "reason": reason})
            if not self._has_failed:
                warn(
                    f"checkpoint {path.name} couldn't be copied to {storage.url}: {reason}. "
                    "Training continues, and the next checkpoint is copied again. Earlier copies "
                    "are unchanged."
                )
            self._has_failed = True
        else:
            self._has_failed = False
