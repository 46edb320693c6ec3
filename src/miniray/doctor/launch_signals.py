"""Signals that end ``miniray run``: each is an exception, and the ranks are ended on its way."""

from __future__ import annotations

import signal
from types import FrameType


class Stopped(BaseException):
    """SIGTERM or SIGHUP came; ``KeyboardInterrupt`` stands for SIGINT."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def take_signals() -> dict[int, object]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped(number)

    return {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}


def give_signals_back(before: dict[int, object]) -> None:
    for number, handler in before.items():
        signal.signal(number, handler)  # type: ignore[arg-type]
