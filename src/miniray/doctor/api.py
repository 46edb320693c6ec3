"""What a script may tell the recorder by itself: ``step``, ``phase``, ``checksum``.

All of it does nothing in a process without a recorder, so that a script with these calls in it also
runs without the doctor.
"""

from __future__ import annotations

import sys
import time
import zlib
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from miniray.doctor import recorder, sites
from miniray.doctor.layout import Cell

_MOST_CHECKSUMS = 8


def step(
    loss: Any = None,
    batch_size: int | None = None,
    sample_ids: Sequence[int] | None = None,
    epoch: int | None = None,
) -> None:
    """Record a finished training step. From the first call on, only these calls count as steps.

    Args:
        loss: Loss of the step: a number, or a tensor with one element. Reading a tensor on a GPU
            waits for the GPU. From the first call with a loss on, only reported losses are
            recorded. Without it, the loss is the tensor that ``backward`` was called on. Report it
            if your script divides the loss before ``backward`` to accumulate gradients.
        batch_size: Number of samples of the step on this rank.
        sample_ids: Ids of these samples: integers that identify the same sample on every rank.
        epoch: Number of the current epoch.

    Raises:
        TypeError: ``sample_ids`` aren't integers.
    """
    current = recorder.current()
    if current is None:
        return
    site = sites.call_site(sys._getframe(1))
    if not current.explicit_steps:
        current.explicit_steps = True
        current.retract_first_step()
        current.event("note", "steps are counted by doctor.step", site=site)
    if epoch is not None and epoch != current.box.ints[Cell.EPOCH]:
        current.tell_epoch(epoch, site)
    if sample_ids is not None:
        ids = [int(number) for number in sample_ids]
        current.own_pass()
        current.add_samples(ids, len(ids))
    if batch_size is not None:
        current.box.ints[Cell.BATCH_SIZE] = batch_size
        if sample_ids is None:
            current.add_samples(None, batch_size)
    if loss is not None:
        current.explicit_losses = True
        current.set_loss(float(getattr(loss, "detach", lambda: loss)()), site)
    current.end_step(time.monotonic_ns())
    current.flush_tally()  # it was told, so it is there


class phase:  # noqa: N801  # called like a function, with or without ``with``
    """What the rank does from here on: ``with doctor.phase("validate"): ...`` or a plain call.

    In a ``with`` statement the phase around it comes back at its end; after a plain call it stays
    until the next plain call. It shows in the doctor's table and in the reports of barriers.
    """

    def __init__(self, name: str) -> None:
        self.name = str(name)
        self._site = sites.call_site(sys._getframe(1))
        self._recorder = recorder.current()
        if self._recorder is not None:
            self._recorder.set_section(self.name, self._site)

    def __enter__(self) -> phase:
        if self._recorder is not None:
            self._recorder.open_section()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._recorder is not None and self._recorder is recorder.current():
            self._recorder.close_section(self.name, self._site)
            # The process may be ended any time now: its last samples must not be missing.
            self._recorder.flush()


def checksum(model: Any) -> str:
    """Note the checksum of ``model``'s parameters at this step and return it.

    With DDP all ranks have equal parameters after every step, to the last bit. Where a step went
    past DDP (``model.module`` in the training step, an optimizer step on one rank) they drift
    apart, and nothing says so. A checksum reads every parameter once: call it every few hundred
    steps.

    All ranks must call it at the same steps; the doctor compares what is there. Notes nothing in a
    process without a recorder. Parameters on a GPU are copied to the CPU, which waits for the GPU.
    """
    digest = 0
    for parameter in model.parameters():
        data = parameter.detach().cpu().contiguous()
        digest = zlib.crc32(_bytes(data), digest)
    value = f"{digest:08x}"
    current = recorder.current()
    if current is not None:
        sums = dict(current.info.get("notes", {}).get("checksums", {}))
        sums[str(current.step_number)] = value
        current.note(checksums=dict(list(sums.items())[-_MOST_CHECKSUMS:]))
    return value


def _bytes(data: Any) -> Any:
    import torch

    # bfloat16 and its like are unknown to numpy: their bytes are not.
    return memoryview(data.reshape(-1).view(torch.uint8).numpy())
