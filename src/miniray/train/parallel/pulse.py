"""A rank's pulse that knows waiting when the recorder stands between the rank and torch."""

from __future__ import annotations

import sys
from typing import Any

from miniray.train.ddp_pulse import _OURS, _WAITING_CODE, PulseThread


class StagePulse(PulseThread):
    """As ``PulseThread``, but frames of miniray's own around a call of torch are looked through.

    Stages wait for each other in calls that the doctor's recorder wraps. Taken for the rank's own
    work, such a wait would make every stage look guilty of a hang in one of them.
    """

    def _stack(self) -> tuple[str, bool]:
        stack, waits = super()._stack()
        frame: Any = sys._current_frames().get(self._main)
        while frame is not None and frame.f_code.co_filename.startswith(_OURS):
            frame = frame.f_back
        inside = frame is not None and any(
            part in frame.f_code.co_filename for part in _WAITING_CODE
        )
        return stack, waits or inside
