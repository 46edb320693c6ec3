"""Checksums of a model's parameters, noted by each rank for the doctor to compare.

With DDP all ranks have equal parameters after every step, to the last bit. Where a step went past
DDP (``model.module`` in the training step, an optimizer step on one rank) they drift apart, and
nothing says so. A checksum reads every parameter once: call it every few hundred steps.
"""

from __future__ import annotations

import zlib
from typing import Any

from miniray.doctor import recorder

_MOST = 8


def checksum(model: Any) -> str:
    """Note the checksum of ``model``'s parameters at this step and return it.

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
        current.note(checksums=dict(list(sums.items())[-_MOST:]))
    return value


def _bytes(data: Any) -> Any:
    import torch

    # bfloat16 and its like are unknown to numpy: their bytes are not.
    return memoryview(data.reshape(-1).view(torch.uint8).numpy())
