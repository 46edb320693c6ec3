"""Write and read the checkpoints of a run, atomically and with checksums.

::

    checkpoints/
      epoch-00000004/
        manifest.json          epoch, serial number, size and checksum of every file, own checksum
        state.json             the structure, and all values except arrays
        weights.safetensors    the arrays of state["weights"]; one file for each part with arrays

A checkpoint is written to a temporary directory. All files are flushed to disk, the manifest last,
before the directory is renamed. If the process is killed, the disk is full or the power fails,
earlier checkpoints are unchanged, and at most a temporary directory remains, which the next
``save`` removes. Reading verifies all checksums, and unpickles data only with ``allow_pickle``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from miniray.checks import check_bool, check_int, check_path
from miniray.errors import CheckpointError
from miniray.train.options import warn
from miniray.train.run.checkpoints.format import (
    Contents,
    LateState,
    begin_checkpoint,
    discard_checkpoint,
    read_checkpoint,
    remove_leftovers,
    write_checkpoint,
)
from miniray.train.run.checkpoints.manifest import (
    CHECKPOINT_NAME,
    CheckpointInfo,
    inspect_checkpoint,
)
from miniray.train.run.checkpoints.retention import Retention
from miniray.train.run.checkpoints.storage import CheckpointCopies, CheckpointStorage

_TRIES = 100


class CheckpointStore:
    """Save and load the checkpoints of one run.

    Writes are atomic: a crash, a full disk or a power failure leaves earlier checkpoints intact.
    Only one process may write to ``directory``. Any number of processes may read.

    Args:
        directory: Directory that contains the checkpoints.
        keep_last: Number of most recent checkpoints to keep. ``None`` keeps all of them.
        keep_best: ``(metric, "min" | "max")``. Also keep the checkpoint with the best value. The
            metric is read from ``state["metrics"]``, or else from the last record of
            ``state["history"]``. Checkpoints where it is missing or NaN are ignored.
        allow_pickle: Use pickle for values without a safer format, when saving and when loading.
            Loading pickled data can execute arbitrary code.
        on_event: Callback that receives ``checkpoint_corrupt``, ``checkpoint_failed`` and
            ``checkpoint_copy_failed`` events.
        storage: Storage to which each checkpoint is copied. It keeps the same checkpoints. If
            copying fails, the store warns once and reports an event.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep_last: int | None = 3,
        keep_best: tuple[str, str] | None = None,
        allow_pickle: bool = False,
        on_event: Callable[[dict[str, Any]], None] | None = None,
        storage: CheckpointStorage | None = None,
    ) -> None:
        self.directory = Path(check_path("directory", directory))
        self.allow_pickle = check_bool("allow_pickle", allow_pickle)
        self.on_event = on_event
        self._copies = None if storage is None else CheckpointCopies(storage, self._tell)
        # New checkpoints are newer than all copies, even if this machine has no checkpoints.
        self._last_serial = 0 if self._copies is None else self._copies.last_serial
        self._has_write_failed = False
        self.loaded: Path | None = None
        self.retention = Retention(keep_last, keep_best)
        self._writer: threading.Thread | None = None

    def configure(self, *, keep_last: int | None, keep_best: tuple[str, str] | None) -> None:
        """Change which checkpoints are kept, starting with the next ``save``."""
        self.retention = Retention(keep_last, keep_best)

    # -- writing ----------------------------------------------------------------------------------

    def save(
        self,
        epoch: int,
        state: Mapping[str, Any],
        *,
        step: int | None = None,
        late: LateState | None = None,
    ) -> Path:
        """Write a checkpoint, delete those that aren't kept, and return the path.

        An earlier checkpoint of the same epoch is replaced when the new one is complete.

        Args:
            epoch: Number of completed epochs.
            state: The state.
            step: Number of completed steps of the run, if the epoch isn't complete.
            late: Parts of the state that are read when they are written.

        Raises:
            CheckpointError: A value of ``state`` can't be stored, or writing failed. Earlier
                checkpoints are unchanged.
        """
        path, contents = self._prepare(epoch, state, step, late, copy=False)
        self._begin(path, contents)
        self._write(path, contents)
        return path

    def save_or_warn(
        self,
        epoch: int,
        state: Mapping[str, Any],
        *,
        step: int | None = None,
        late: LateState | None = None,
        on_failure: Callable[[], None] = lambda: None,
    ) -> Path:
        """Copy the arrays, write a checkpoint in a thread, and return its future path immediately.

        The next ``save``, ``load``, ``list``, ``wait`` or ``close`` waits for the thread, and so
        does interpreter exit. If writing fails, earlier checkpoints are unchanged, and
        ``on_failure`` is called. The store warns once, and again only after a later write has
        succeeded.
        """
        path, contents = self._prepare(epoch, state, step, late, copy=True)

        def write() -> None:
            with self._warn_of_failure(on_failure):
                self._write(path, contents)
                self._has_write_failed = False

        with self._warn_of_failure(on_failure):
            self._begin(path, contents)
            # Not a daemon thread, so the interpreter waits for it at exit.
            self._writer = threading.Thread(target=write, name="miniray-checkpoint", daemon=False)
            self._writer.start()
        return path

    @contextlib.contextmanager
    def _warn_of_failure(self, on_failure: Callable[[], None]) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            on_failure()
            if not self._has_write_failed:
                warn(f"{error}. Training continues.")
            self._has_write_failed = True

    def is_writing(self) -> bool:
        """Return whether a checkpoint is being written in the background."""
        return self._writer is not None and self._writer.is_alive()

    def _prepare(
        self,
        epoch: int,
        state: Mapping[str, Any],
        step: int | None,
        late: LateState | None,
        *,
        copy: bool,
    ) -> tuple[Path, Contents]:
        """Wait for the current write, and return the path and contents of the new checkpoint."""
        epoch = check_int("epoch", epoch, 0)
        self.wait()
        contents = Contents(epoch, state, allow_pickle=self.allow_pickle, copy=copy, late=late)
        contents.step = None if step is None else check_int("step", step, 1)
        path, contents.serial = self._next(epoch, contents.step)
        return path, contents

    def _begin(self, path: Path, contents: Contents) -> None:
        """Let workers write their part now, if they write it themselves."""
        if contents.late is None or not contents.late.at_once:
            return
        try:
            self._open_directory()
            begin_checkpoint(path, contents)
        except (OSError, CheckpointError) as error:  # the loss of a worker propagates
            raise self._report_failure(path, contents, error) from error

    def _open_directory(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self.directory)

    def _report_failure(self, path: Path, contents: Contents, error: Exception) -> CheckpointError:
        wrapped = self._write_error(path, contents.nbytes, error)
        self._tell({"event": "checkpoint_failed", "path": str(path), "reason": str(wrapped)})
        return wrapped

    def wait(self) -> None:
        """Wait for the write in the background."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None

    def close(self) -> None:
        """Wait for the write in the background. The store can still be used afterwards."""
        self.wait()

    def _next(self, epoch: int, step: int | None) -> tuple[Path, int]:
        """Return the path and the serial number of the next checkpoint.

        The newest checkpoint has the highest number, not the highest epoch: if a run resumed at
        epoch 3, its new epoch 4 is newer than the old epoch 5.
        """
        serial = 1 + max((found.serial for found in self._scan()[0]), default=0)
        serial = max(serial, self._last_serial + 1)
        name = f"epoch-{epoch:08d}" if step is None else f"epoch-{epoch:08d}-step-{step:08d}"
        path, attempt = self.directory / name, 1
        while path.exists():
            attempt += 1
            path = self.directory / f"{name}-{attempt}"
        return path, serial

    def _write(self, path: Path, contents: Contents) -> None:
        try:
            self._open_directory()
            write_checkpoint(path, contents)
        except Exception as error:
            raise self._report_failure(path, contents, error) from error
        self._prune(path)
        if self._copies is not None:
            self._copies.add(path, self.retention)

    def _write_error(self, path: Path, size: int, error: Exception) -> CheckpointError:
        reason = str(error)
        if isinstance(error, OSError):
            reason = error.strerror or reason
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                free = shutil.disk_usage(self.directory).free if self.directory.is_dir() else 0
                reason += f" (it needs {size:,} bytes; {free:,} are free)"
        return CheckpointError(
            f"checkpoint {path} could not be written: {reason}. Earlier checkpoints are unchanged",
            entry=str(path),
        )

    def _prune(self, newest: Path) -> None:
        """Delete checkpoints that aren't kept, but never ``newest``, which was just written.

        Damaged checkpoints are ignored and not deleted.
        """
        for checkpoint in self.retention.find_unwanted(self._scan()[0], newest):
            discard_checkpoint(checkpoint.path)

    # -- reading ----------------------------------------------------------------------------------

    def list(self, *, verify: bool = False) -> Sequence[CheckpointInfo]:
        """Return the checkpoints, oldest first; with ``verify``, only those that are intact."""
        check_bool("verify", verify)
        self.wait()
        found = self._scan()[0]
        return [c for c in found if not verify or c.problem() is None]

    def newest(self) -> Path | None:
        """Return the path of the newest checkpoint, or None. Its contents aren't verified."""
        found = self.list()
        return found[-1].path if found else None

    def best(self) -> Path | None:
        """Return the path of the best checkpoint according to ``keep_best``, or None."""
        return self.retention.find_best(self.list())

    def load(self, path: str | os.PathLike[str] = "latest") -> tuple[int, dict[str, Any]]:
        """Read a checkpoint and return (epoch, state). ``loaded`` is its path afterwards.

        A different process may write and delete checkpoints at the same time.

        Args:
            path: Path of a checkpoint. ``"latest"`` loads the newest intact checkpoint, and reports
                damaged ones with a warning and an event.

        Raises:
            CheckpointError: The checkpoint is damaged, or no intact checkpoint exists.
        """
        self.wait()
        if str(path) != "latest":
            chosen = inspect_checkpoint(Path(path))
            if isinstance(chosen, str):
                text = f"{path} isn't an intact checkpoint: {chosen}{self._intact()}"
                raise CheckpointError(text, entry=str(path))
            return self._read(chosen)
        for _ in range(_TRIES):  # a checkpoint may be deleted after a newer one was written
            found, damaged = self._scan()
            problems = dict(damaged)
            for checkpoint in reversed(found):
                try:
                    result = self._read(checkpoint)
                except CheckpointError as error:
                    if not checkpoint.path.exists():
                        break
                    if error.__cause__ is None:  # not damaged, but with a pickled part
                        raise
                    problems[checkpoint.path] = str(error.__cause__)
                else:
                    self._report(problems)
                    return result
            else:
                self._report(problems)
                raise CheckpointError(f"there is no intact checkpoint in {self.directory}")
        raise CheckpointError(f"checkpoints in {self.directory} were deleted while being read")

    def _read(self, checkpoint: CheckpointInfo) -> tuple[int, dict[str, Any]]:
        try:
            state = read_checkpoint(checkpoint, allow_pickle=self.allow_pickle)
        except CheckpointError as error:
            raise CheckpointError(
                f"{checkpoint.path}: {error}", entry=error.entry, epoch=checkpoint.epoch
            ) from None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(
                f"checkpoint {checkpoint.path} is damaged: {error}{self._intact()}",
                entry=str(checkpoint.path),
                epoch=checkpoint.epoch,
            ) from error
        self.loaded = checkpoint.path
        return checkpoint.epoch, state

    def _scan(self) -> tuple[Sequence[CheckpointInfo], dict[Path, str]]:
        """Return checkpoints with a valid manifest, oldest first, and the problems of the others.

        If the list of paths changes during the scan, repeat it: an old checkpoint may have been
        deleted before it was inspected, and the list may lack a new one.
        """
        for _ in range(_TRIES):
            paths = self._paths()
            looked = {path: inspect_checkpoint(path) for path in paths}
            if paths == self._paths():
                break
        found = [c for c in looked.values() if not isinstance(c, str)]
        damaged = {path: c for path, c in looked.items() if isinstance(c, str) and path.exists()}
        return sorted(found, key=lambda c: c.serial), damaged

    def _paths(self) -> Sequence[Path]:
        return sorted(
            p for p in self.directory.glob("epoch-*") if CHECKPOINT_NAME.fullmatch(p.name)
        )

    def _intact(self) -> str:
        names = [c.path.name for c in self._scan()[0]]
        return f"; there are: {', '.join(names)}" if names else ""

    def _report(self, problems: Mapping[Path, str]) -> None:
        for path, reason in problems.items():
            warn(f"checkpoint {path} is damaged and not used: {reason}")
            self._tell({"event": "checkpoint_corrupt", "path": str(path), "reason": reason})

    def _tell(self, event: dict[str, Any]) -> None:
        if self.on_event is not None:
            try:
                self.on_event(event)
            except OSError:  # events may be on the same full disk
                pass

    def __enter__(self) -> CheckpointStore:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
