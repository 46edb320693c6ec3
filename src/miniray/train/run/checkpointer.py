"""The content of checkpoints: named parts, each with ``state_dict`` and ``load_state_dict``.

Trainers register the position of the run (``state``), ``callbacks``, ``weights`` (one copy if all
workers are in sync, else those of every worker), ``workers`` (the results of their ``get_state``)
and parts of subclasses, such as ``sync`` and ``data``. Users can add parts. With the same number of
workers, a fixed seed, and workers that save what they need (optimizer, random numbers, position in
the data), a resumed run has the same bits as one that was never interrupted. ``CheckpointStore``
describes the files.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from miniray.errors import CheckpointError
from miniray.train.options import RunOptions, warn
from miniray.train.run.checkpoints.format import LateState
from miniray.train.run.checkpoints.retention import Retention
from miniray.train.run.checkpoints.storage import CheckpointStorage, FsspecStorage, list_copies
from miniray.train.run.checkpoints.store import CheckpointStore
from miniray.train.run.records import simplify
from miniray.train.run.state import TrainState

_FORMAT = 2
#: Names in a checkpoint that aren't registered parts.
_RESERVED = ("format", "kind", "metrics", "state")


@runtime_checkable
class Stateful(Protocol):
    """A part of checkpoints.

    ``state_dict`` returns numbers, texts, arrays, tensors, and lists, tuples and dicts of them. It
    is called between two epochs, in the driver. ``load_state_dict`` receives the same values.
    """

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state: Any) -> None:
        """Restore the state."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A part that consists of two functions."""

    state_dict: Callable[[], Any]
    load_state_dict: Callable[[Any], None]


class Checkpointer:
    """Write checkpoints of registered parts, and restore them.

    Args:
        kind: Trainers of one kind can load each other's checkpoints.
        options: The options of the trainer.
        on_event: Called with a dict for events of the run, such as a damaged checkpoint.
    """

    def __init__(
        self, kind: str, options: RunOptions, on_event: Callable[[dict[str, Any]], None]
    ) -> None:
        Retention(options.keep_last, options.keep_best)  # checks them before a run starts
        self.kind = kind
        #: The checkpoints of the run on disk, once its directory is open.
        self.store: CheckpointStore | None = None
        self._options, self._on_event = options, on_event
        where = options.checkpoint_dir
        self._storage = None if where is None else FsspecStorage(where)
        self._parts: dict[str, Stateful] = {}
        self._on_missing: dict[str, Callable[[], None]] = {}
        self._in_workers: set[str] = set()
        #: Epoch and step of the checkpoint that was saved or loaded last.
        self._position: tuple[int, int] | None = None

    def register(
        self,
        name: str,
        part: Stateful,
        *,
        in_workers: bool = False,
        on_missing: Callable[[], None] | None = None,
    ) -> None:
        """Add a part to all checkpoints from now on.

        When a checkpoint is loaded, parts are restored in the order in which they were registered,
        after the weights and states of the workers. Register a part before ``train`` or
        ``load_checkpoint`` if it has to be restored.

        Args:
            name: Name of the part, unique for the trainer.
            part: An object with ``state_dict()`` and ``load_state_dict(state)``; see ``Stateful``.
            in_workers: The state is sent to the workers. If one of them is replaced while a
                checkpoint is restored, ``load_state_dict`` is called again.
            on_missing: Called in place of ``load_state_dict`` if the checkpoint doesn't contain the
                part. By default, the trainer warns, and the part keeps its state.

        Raises:
            ValueError: The name is used already.
            TypeError: ``part`` lacks one of the methods.
        """
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"the name of a checkpoint part must be an identifier, not {name!r}")
        if name in self._parts or name in _RESERVED:
            raise ValueError(f"checkpoints already have a part {name!r}: choose a different name")
        if not isinstance(part, Stateful) or isinstance(part, type):
            raise TypeError(
                f"part {name!r} of checkpoints needs state_dict() and load_state_dict(state); "
                f"it is {part!r:.200}"
            )
        self._parts[name] = part
        if in_workers:
            self._in_workers.add(name)
        if on_missing is not None:
            self._on_missing[name] = on_missing

    def open(self, directory: Path) -> None:
        """Write checkpoints to ``directory``, and read them from there, unless it is open."""
        if self.store is None:
            self.store = CheckpointStore(
                directory,
                keep_last=self._options.keep_last,
                keep_best=self._options.keep_best,
                on_event=self._on_event,
                storage=self._storage,
            )

    def close(self) -> None:
        """Wait for the checkpoint that is being written. It raises if that failed."""
        if self.store is not None:
            self.store.close()

    # -- writing ----------------------------------------------------------------------------------

    def save(
        self, state: TrainState, *, background: bool = False, late: LateState | None = None
    ) -> Path:
        """Write a checkpoint of the run at ``state``, and return its path.

        Args:
            state: The position.
            background: Write it in a thread, after the one that is being written. If that fails,
                warn.
            late: Parts that are read when they are written.
        """
        assert self.store is not None
        names = () if late is None else late.names
        contents = {
            "format": _FORMAT,
            "kind": self.kind,
            "metrics": simplify(state.metrics),
            "state": state.state_dict(),
            **{name: p.state_dict() for name, p in self._parts.items() if name not in names},
        }
        step = state.step if state.step_in_epoch else None
        epoch = state.epoch if state.step_in_epoch else state.epoch - 1
        position = (state.epoch, state.step)
        if background:

            def forget() -> None:
                self._position = None

            self.wait()
            self._position = position
            return self.store.save_or_warn(epoch, contents, step=step, late=late, on_failure=forget)
        path = self.store.save(epoch, contents, step=step, late=late)
        self._position = position
        return path

    def is_writing(self) -> bool:
        """Return whether a checkpoint is being written in the background."""
        return self.store is not None and self.store.is_writing()

    def wait(self) -> None:
        """Wait for the checkpoint that is being written in the background."""
        if self.store is not None:
            self.store.wait()

    def is_saved(self, state: TrainState) -> bool:
        """Return whether the checkpoint that was saved or loaded last is of this position.

        It may still be being written.
        """
        return self._position == (state.epoch, state.step)

    # -- reading ----------------------------------------------------------------------------------

    def find_newest(self) -> Path | None:
        """Return the path of the newest checkpoint, without reading it."""
        return None if self.store is None else self.store.newest()

    def find_best(self) -> Path | None:
        """Return the path of the best checkpoint by ``keep_best``."""
        return None if self.store is None else self.store.best()

    def has_checkpoint(self, run: Path | None) -> bool:
        """Return whether ``resume="auto"`` finds a checkpoint, in the storage or in ``run``.

        Raises:
            ValueError: There is neither a storage nor a run directory that the user named.
        """
        if run is None and self._storage is None:
            raise ValueError('resume="auto" needs name= or run_dir=, to find the run again')
        if self.has_copies():
            return True
        return run is not None and any((run / "checkpoints").glob("epoch-*"))

    def has_copies(self) -> bool:
        """Return whether there are checkpoints in the storage."""
        return self._storage is not None and bool(list_copies(self._storage))

    def check_unused(self) -> None:
        """Raise ``FileExistsError`` if the storage has checkpoints of a different run."""
        if self.store is None and self._storage is not None and self.has_copies():
            raise FileExistsError(
                f"checkpoint_dir {self._storage.url} already has checkpoints. Pass resume=True to "
                "continue from them, or choose a different checkpoint_dir."
            )

    def load(
        self, path: str | Path, run: Path | None, title: str
    ) -> tuple[Path | None, dict[str, Any]]:
        """Read a checkpoint, and return its path and its parts by name.

        The path is None if the checkpoint was read from the storage.

        Args:
            path: A checkpoint, a run directory or its ``checkpoints``. ``"latest"`` is the newest
                intact checkpoint of the open run, else of the storage and ``run``, else of the
                newest run whose directory name starts with ``title``.
            run: The run directory that the user named.
            title: Class of the trainer, and of the worker if it isn't miniray's.

        Raises:
            CheckpointError: There is no intact checkpoint, or a different kind of trainer or an
                older version of miniray wrote it.
        """
        if str(path) == "latest" and self.store is None and self._storage is not None:
            loaded = self._load_copy(self._storage, run)
            if loaded is not None:
                return None, loaded
        store, where = _locate(path, self.store, run, title)
        _, loaded = store.load(where)
        assert store.loaded is not None
        self._check(store.loaded, loaded)
        self._position = (loaded["state"]["epoch"], loaded["state"]["step"])
        return store.loaded, loaded

    def _load_copy(self, storage: CheckpointStorage, run: Path | None) -> dict[str, Any] | None:
        """Return the newest intact checkpoint of the storage.

        None if there is none, or if ``run`` has the same one or a newer one.
        """
        local = [] if run is None else CheckpointStore(run / "checkpoints").list()
        newest = local[-1].serial if local else 0
        copies = [copy for copy in list_copies(storage) if copy.serial > newest]
        for copy in reversed(copies):
            with tempfile.TemporaryDirectory(prefix="miniray-checkpoint-") as directory:
                path = storage.read(copy, Path(directory))
                try:
                    loaded = CheckpointStore(directory).load(path)[1]
                except CheckpointError as error:
                    warn(f"checkpoint {copy.path} of {storage.url} isn't used: {error}")
                    continue
            self._check(Path(f"{storage.url}/{copy.path}"), loaded)
            self._position = (loaded["state"]["epoch"], loaded["state"]["step"])
            return loaded
        return None

    def _check(self, path: Path, loaded: Mapping[str, Any]) -> None:
        found = loaded.get("format")
        if found != _FORMAT:
            raise CheckpointError(
                f"{path} has format {found!r}, and this version of miniray resumes from format "
                f"{_FORMAT}. To read its weights, call miniray.train.CheckpointStore("
                f"{str(path.parent)!r}).load({str(path)!r})[1]['weights']",
                entry=str(path),
            )
        if loaded["kind"] != self.kind:
            raise CheckpointError(
                f"{path} was written by a different kind of trainer ({loaded['kind']!r} instead of "
                f"{self.kind!r}). To continue with its weights, write them with "
                "save_final_model() and read them with load_model() where the model is created",
                entry=str(path),
            )

    def restore(self, loaded: Mapping[str, Any], get_workers: Callable[[], list[Any]]) -> None:
        """Restore all registered parts from what ``load`` returned.

        If a worker is replaced during this, restore the parts that are in the workers again.
        """
        before = get_workers()
        self._restore(loaded, self._parts)
        while get_workers() != before:
            before = get_workers()
            self._restore(loaded, self._in_workers)

    def _restore(self, loaded: Mapping[str, Any], names: Collection[str]) -> None:
        for name, part in self._parts.items():
            if name not in names:
                continue
            if name in loaded:
                part.load_state_dict(loaded[name])
            elif name in self._on_missing:
                self._on_missing[name]()
            else:
                warn(f"the checkpoint has no part {name!r}, which keeps its current state")


def _locate(
    path: str | Path, store: CheckpointStore | None, run: Path | None, title: str
) -> tuple[CheckpointStore, str | Path]:
    """Return a store and what to load from it; see ``Checkpointer.load``."""
    if str(path) == "latest":
        if store is not None:
            return store, "latest"
        path = run / "checkpoints" if run is not None else _find_newest_run(title)
    where = Path(path).expanduser()
    if where.name == "checkpoints":
        return CheckpointStore(where), "latest"
    if (where / "checkpoints").is_dir() or (where / "run.json").is_file():
        return CheckpointStore(where / "checkpoints"), "latest"
    return CheckpointStore(where.parent), where


def _find_newest_run(title: str) -> Path:
    """Return the checkpoints of the newest run of a trainer that has any."""
    found = Path("runs").glob(f"{title}-[0-9]*/checkpoints")
    runs = [p for p in found if any(p.iterdir())]
    if not runs:
        raise CheckpointError(
            f"resume=True, but {Path('runs').resolve()} has no run of {title} with a checkpoint; "
            "name the run with run_dir=, name= or resume=PATH"
        )
    return max(runs, key=lambda p: p.stat().st_mtime)
