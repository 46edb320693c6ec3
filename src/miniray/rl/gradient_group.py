"""``GradientGroup``: workers that sum their gradients in every step, so their weights are equal."""

from __future__ import annotations

from typing import Any

import miniray
from miniray.checks import check_number
from miniray.core import session
from miniray.errors import ActorDiedError, CapabilityError, TaskError
from miniray.train.workers.group import NO_WORKERS, WorkerGroup, add_worker_context

#: Seconds in which a worker that is alive and idle answers.
_PING_TIMEOUT_S = 5.0


class GradientGroup:
    """The process group of the workers of a trainer with ``sync="grad"``.

    It is a ``WorkerSetup``. Lost workers aren't replaced: the others can't continue without their
    gradients.

    Args:
        backend: ``"gloo"`` or ``"nccl"``.
        timeout: Limit in seconds for a collective.
    """

    #: All workers have the same weights.
    is_in_sync = True

    def __init__(self, backend: str, timeout: float) -> None:
        self._backend = backend
        self._timeout = check_number("group_timeout", timeout, 0, open_low=True)
        self._group: WorkerGroup | None = None

    def start(self, group: WorkerGroup) -> None:
        """Copy the weights of worker 0 to all workers, and let them join the process group.

        Raises:
            CapabilityError: The engine can't run several workers at the same time.
        """
        self._group = group
        first = group.handles[0].get_weights.remote()
        miniray.get([worker.set_weights.remote(first) for worker in group.handles[1:]])
        if len(group.handles) == 1:
            return
        engine = session.engine().name
        if engine == "inline":
            raise CapabilityError(
                'sync="grad" with more than one worker needs workers that run at the same time: '
                'use backend="local" or "ray", or sync="weights", or one worker'
            )
        opened = group.handles[0].host_group.remote(
            len(group.handles),
            other_machines=engine == "ray",
            backend=self._backend,
            timeout=self._timeout,
        )
        spec = miniray.get(opened)
        group.call("join_group", lambda _: (spec,), {})

    def set_up(self, group: WorkerGroup, worker_id: int) -> None:
        """Do nothing: ``max_failures`` is 0 with ``sync="grad"``."""

    def raise_if_dead(self, step: int) -> None:
        """Raise the error of a worker that crashed, in place of the errors that it caused."""
        group = self._group
        assert group is not None
        refs = {worker.ping.remote(): i for i, worker in enumerate(group.handles)}
        ready, _ = miniray.wait(list(refs), num_returns=len(refs), timeout=_PING_TIMEOUT_S)
        for ref in ready:
            try:
                miniray.get(ref)
            except ActorDiedError as error:
                if not isinstance(error, TaskError):
                    told = add_worker_context(error, refs[ref], "train_epoch", step, group.unit)
                    raise told from None

    def get_weights(self) -> Any:
        """Return the weights of worker 0, which all workers have."""
        if self._group is None:
            raise RuntimeError(NO_WORKERS)
        return miniray.get(self._group.ref_of(0, "get_weights"))

    def get_stats(self) -> dict[str, Any]:
        """Return {}: there is no parameter server."""
        return {}

    def describe(self) -> dict[str, Any]:
        """Return the configuration for ``run.json``, besides what the trainer records."""
        return {}

    def stop(self) -> None:
        """Forget the workers, which were stopped."""
        self._group = None
