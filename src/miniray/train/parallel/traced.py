"""Stages that torch has traced: what they compute in evaluations.

A traced stage does for ever what it did when it was traced: with dropout, with the batch's own
statistics, with as many samples. So evaluations go through stages that were traced for them, with
the same weights, micro-batch by micro-batch; the last one is filled up with copies of a sample.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from miniray.train.parallel.stages import PipelineRunner


class TracedRunner(PipelineRunner):
    """See the module. They are traced when an evaluation first needs them."""

    _evaluating: Any = None

    def trace_with(self, layers: Callable[[], Any], sample: Any) -> None:
        """``layers`` makes the model as a row of layers, for micro-batches like ``sample``."""
        self._layers, self._sample = layers, sample

    def forward(self, inputs: Any, count: int) -> Any:
        if self._evaluating is None:
            self._evaluating = self._layers().evaluating(
                self.plan.bounds, self.modules, self._sample, self._device
            )
        size = len(self._sample[0])
        outputs = [
            self._through(self._evaluating, inputs and [_rows(v, low, size) for v in inputs])
            for low in range(0, count, size)
        ]
        return torch.cat(outputs)[:count] if self.is_last else None


def _rows(values: Any, low: int, size: int) -> Any:
    """``size`` of them from ``low`` on; the last one again where there are fewer."""
    return values[torch.arange(low, low + size).clamp(max=len(values) - 1)]
