"""``Parallelism``: how the ranks of a trainer divide the work. Each kind of trainer has one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from miniray.train.lockstep.group import LockstepGroup
    from miniray.train.lockstep.replica import EpochReport
    from miniray.train.run.result import TrainResult
    from miniray.train.train_kwargs import KwargRules


@dataclasses.dataclass(frozen=True)
class RunSettings:
    """The settings of a run that a ``Parallelism`` needs to prepare its ranks.

    Attributes:
        facts: The fields of ``RunFacts``.
        eval_interval: The option; 0 if a subclass of the trainer evaluates in a different way.
        loaded: The shared state of the checkpoint from which the run resumes, or None.
        kwargs: Keyword arguments of ``train()``.
    """

    facts: Mapping[str, Any]
    eval_interval: int
    loaded: Mapping[str, Any] | None
    kwargs: Mapping[str, Any]


class Parallelism(Protocol):
    """How ranks divide the work, in the driver. ``Replica`` is its counterpart in each rank."""

    @property
    def kind(self) -> str:
        """Trainers of one kind can load each other's checkpoints."""

    @property
    def kwargs(self) -> KwargRules:
        """Which keyword arguments ``train()`` accepts."""

    @property
    def min_workers(self) -> int | None:
        """Number of ranks on which a run may continue; None if it needs all of them."""

    @property
    def modules(self) -> Sequence[str]:
        """Modules that ranks import. The local engine imports them once for all ranks."""

    @property
    def is_sharded(self) -> bool:
        """Whether no rank has the whole model."""

    def prepare(
        self, group: LockstepGroup, settings: RunSettings
    ) -> tuple[Sequence[Mapping[str, Any]], Any]:
        """See ``LockstepGroup.prepare``."""

    @property
    def can_validate(self) -> bool:
        """Whether all ranks have a validation step and data for it, once they are prepared."""

    def summarize(self, reports: Sequence[EpochReport]) -> dict[str, Any]:
        """Return the result of an epoch from the reports of the ranks."""

    def evaluate(
        self, group: LockstepGroup, data: Any, kwargs: Mapping[str, Any], epoch: int | None
    ) -> dict[str, Any]:
        """Evaluate on ``data``, every sample exactly once."""

    def merge_weights(self, parts: Sequence[Any]) -> Any:
        """Return the whole weights from the ranks' ``gather_weights``."""

    def merge_shared(self, parts: Sequence[Any]) -> Any:
        """Return the state that all ranks share from their ``gather_shared``."""

    def merge_local(self, shared: Any, own: Sequence[Any]) -> tuple[Any, Any]:
        """Return the whole weights and the state that all ranks share, as above.

        The arguments are the two parts of ``Replica.get_local_state``, the second one by rank.
        """

    def list_replicas(self, count: int) -> list[list[int]]:
        """Return the groups of ranks that hold the same weights; of ``count`` ranks."""

    def describe_part(self, rank: int) -> str | None:
        """Return what part of the model is lost with a rank; None if all ranks hold the same."""

    def describe(self) -> dict[str, Any]:
        """Return the configuration for ``run.json``."""

    def get_result(self) -> tuple[type[TrainResult], dict[str, Any]]:
        """Return the class of the result of a run, and its further fields."""
