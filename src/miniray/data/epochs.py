"""How far a rank has come: the epoch, what was taken of it, and the state that says so."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Literal

from miniray.checks import whole
from miniray.data import progress
from miniray.data.order import Order
from miniray.data.parts import Even
from miniray.errors import DataError


class Epochs(ABC):
    """A rank's way through the epochs of its dataset.

    A loop that was left starts its epoch again; one that came to the end begins the next. A state
    speaks for all ranks where they have taken as many rows; any number of ranks may load it.
    """

    _rank: int
    _world_size: int
    _even: Even
    _seed: int | None
    _shuffle: Literal["window", "global"] | None
    _window: int
    _max_samples: int
    _group_by: str | None
    _chunk_left: progress.ChunkLeft | None

    def _begin(self, epoch: int) -> None:
        self._epoch = epoch
        self._history: list[list[Any]] = []
        self._began_with = self._world_size
        self._taken: Any = 0
        self._alone = self._complete = False
        self._part: tuple[progress.Intervals, progress.Intervals] | None = None
        self._order: Order | None = None

    @abstractmethod
    def _forget(self) -> None:
        """Drop what follows from the seed and the state, to be worked out again."""

    @abstractmethod
    def _n(self) -> int:
        """Rows of the epoch, of all ranks."""

    @property
    @abstractmethod
    def kind(self) -> str: ...

    @property
    @abstractmethod
    def fingerprint(self) -> str: ...

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._world_size

    @property
    def epoch(self) -> int:
        """The epoch that iterating gives next, or is giving."""
        return self._epoch

    @property
    def seed(self) -> int | None:
        """The seed in use: the one given, the run's, the one drawn, or that of a loaded state."""
        return self._seed

    def is_at(self, epoch: int) -> bool:
        """Whether this is the epoch under way or loaded, and not all of it delivered."""
        return epoch == self._epoch and not self._complete

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; nothing happens in the midst of it or where it was loaded.

        So a loop that calls it for every epoch goes on where a loaded state left off.
        """
        if not self.is_at(epoch):
            self._begin(whole("epoch", epoch))

    def finish_epoch(self) -> None:
        """Begin the next epoch."""
        self._begin(self._epoch + 1)

    def restart(self) -> None:
        """Begin a pass: this epoch again, or the next if all of it has been delivered.

        Some loops stop after ``len`` batches and never ask for the end.
        """
        if self._complete:
            self.finish_epoch()
        self._taken, self._alone = 0, False

    def record(self, taken: Any, alone: bool = False, complete: bool = False) -> None:
        """Remember that this rank has taken so many rows since the epoch was begun or loaded.

        ``alone``: other ranks may have taken another number, so that states must be merged.
        ``complete``: that was the last of them.
        """
        self._taken, self._alone, self._complete = taken, alone, complete

    def set_chunks(self, chunk_left: progress.ChunkLeft) -> None:
        """Say how to find out what an interrupted chunk of batches by tokens had left."""
        self._chunk_left = chunk_left

    def _plan(self) -> dict[str, Any]:
        return {
            "shuffle": self._shuffle or False,
            "window": self._window if self._shuffle == "window" else 0,
            "max_samples": self._max_samples,
            "even": self._even,
            "group_by": self._group_by,
            "began_with": self._began_with,
        }

    def state_dict(self) -> dict[str, Any]:
        """How far the epoch has come, for all ranks: under 1 KB of JSON.

        At a step boundary, where all ranks have taken as many rows, any one rank's state is the
        run's. Where they have not, keep all and use ``merge_states``.
        """
        return {
            "version": progress.STATE_VERSION,
            "kind": self.kind,
            "n": self._n(),
            "fingerprint": self.fingerprint,
            "seed": self._seed,
            "epoch": self._epoch,
            "plan": self._plan(),
            "history": [list(stage) for stage in self._history],
            "world_size": self._world_size,
            "rank": self._rank,
            "taken": self._taken,
            "alone": self._alone and self._world_size > 1,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken, on any number of ranks; all load the same state.

        What is left of the epoch is cut into even parts for the ranks there are now. The seed is
        that of the state. Refuses, with ``DataError``, a state of other data or of another plan,
        and one that speaks for a single rank only.
        """
        progress.check_state(state, self.kind, self.fingerprint, self._plan())
        if state["n"] != self._n():  # may run the filter
            raise DataError(f"the state is of {state['n']} rows, and this dataset has {self._n()}")
        if self._seed != state["seed"]:  # a subset depends on it
            self._seed = state["seed"]
            self._forget()
        self._epoch = int(state["epoch"])
        plan = state["plan"]
        self._window = plan["window"] or self._window
        self._began_with = int(plan["began_with"])
        taken = state["taken"]
        if isinstance(taken, list) and state["rank"] is not None:
            taken = [taken]
        stage = [state["world_size"], taken, *state.get("batching", ())[1:]]
        self._history = progress.extended(
            state["history"], stage, int(state["n"]), joinable=self._group_by is None
        )
        self._taken, self._alone, self._complete = 0, False, False
        if not self._history:
            self._began_with = self._world_size
        self._order = self._part = None
