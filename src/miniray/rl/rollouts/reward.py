"""Call the user's reward function in the worker.

``reward(row, response)`` returns a number, or a dict with ``"reward"`` and further numbers, which
become metrics. If it raises, exceeds its timeout or returns a value that isn't finite, the error
names the worker and the row. With ``on_error="skip"``, the response is skipped instead.

With a timeout, the function runs in a separate thread. If it hangs in Python code, an exception
stops it. If it hangs in C code, the thread is abandoned and receives no more rows.
"""

from __future__ import annotations

import ctypes
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from miniray.errors import RewardError, RewardTimeoutError
from miniray.rl.metrics import RESERVED

RewardFunction = Callable[[Any, Any], Any]

_TOUCH_INTERVAL_S = 1.0


class Scorer:
    """Calls the reward function on many responses.

    ``touch`` is called after each call, and while the function runs within its timeout.
    """

    def __init__(
        self,
        function: RewardFunction,
        *,
        timeout: float | None,
        on_error: str,
        where: str,
        touch: Callable[[], None] = lambda: None,
    ) -> None:
        self._function, self._touch = function, touch
        self._timeout = timeout
        self._skip = on_error == "skip"
        self._where = where

    def score(
        self, rows: Sequence[Any], responses: Sequence[Any], names: Sequence[str]
    ) -> list[dict[str, float] | None]:
        """Return a dict with ``"reward"`` for each response, or None for skipped responses.

        ``names`` are the names of the rows in errors.
        """
        results: list[dict[str, float] | None] = []
        while len(results) < len(rows):
            done = len(results)
            outcomes = self._run(rows[done:], responses[done:])
            for outcome in outcomes:
                i = len(results)
                results.append(self._checked(outcome, names[i], rows[i], responses[i]))
        return results

    def _run(self, rows: Sequence[Any], responses: Sequence[Any]) -> list[Any]:
        """Return the outcomes of the first rows, at least one: results and exceptions."""
        outcomes: list[Any] = []
        clock = _Clock(self._touch)
        calls = (self._function, rows, responses, outcomes, clock)
        if self._timeout is None:
            _call_all(*calls)
            return outcomes
        thread = threading.Thread(target=_call_all, args=calls, name="miniray-reward", daemon=True)
        thread.start()
        while True:
            left = clock.began + self._timeout - time.monotonic()
            thread.join(min(max(0.0, left), _TOUCH_INTERVAL_S))
            self._touch()
            if not thread.is_alive():
                return outcomes
            if time.monotonic() - clock.began >= self._timeout:
                break
        done = clock.abandon(outcomes)
        if thread.ident is not None:  # stops Python code, but not code that blocks in C
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(thread.ident), ctypes.py_object(_Abandoned)
            )
        stack = _stack(thread)
        late = RewardTimeoutError(f"didn't return within {self._timeout:g} s{stack}")
        return [*outcomes[:done], late]

    def _checked(self, outcome: Any, name: str, row: Any, response: Any) -> dict[str, float] | None:
        if isinstance(outcome, BaseException):
            problem = _describe(outcome)
        else:
            numbers = outcome if isinstance(outcome, Mapping) else {"reward": outcome}
            try:
                made = {str(key): float(value) for key, value in numbers.items()}
                taken = RESERVED.intersection(made)
                if taken:
                    problem = f"returned the reserved names {', '.join(sorted(taken))}"
                elif math.isfinite(made["reward"]):
                    return made
                else:
                    problem = f"returned {outcome!r:.100}, which isn't finite"
            except (TypeError, ValueError):
                what = "which isn't a number"
                if numbers is outcome:
                    what = "which has values that aren't numbers"
                problem = f"returned {outcome!r:.100}, {what}"
            except KeyError:
                problem = f'returned {outcome!r:.100}, which has no key "reward"'
        if self._skip:
            return None
        kind = RewardTimeoutError if isinstance(outcome, RewardTimeoutError) else RewardError
        error = kind(
            f"{self._where}, {name}: the reward function {problem}\n"
            f"  row: {brief(row)}\n  response: {response!r:.200}"
        )
        raise error from (outcome if isinstance(outcome, BaseException) else None)


class _Abandoned(BaseException):
    """Raised in a thread whose results are no longer needed."""


class _Clock:
    """The start time of the current call, and whether its results are still needed."""

    def __init__(self, touch: Callable[[], None]) -> None:
        self._touch = touch
        self.began = time.monotonic()
        self._lock = threading.Lock()
        self._wanted = True

    def next(self, outcomes: list[Any], outcome: Any) -> bool:
        """Store an outcome and start the clock of the next call. Return False if it is too late."""
        self._touch()
        with self._lock:
            if self._wanted:
                outcomes.append(outcome)
                self.began = time.monotonic()
            return self._wanted

    def abandon(self, outcomes: list[Any]) -> int:
        with self._lock:
            self._wanted = False
            return len(outcomes)


def _call_all(
    function: RewardFunction,
    rows: Sequence[Any],
    responses: Sequence[Any],
    outcomes: list[Any],
    clock: _Clock,
) -> None:
    try:
        with torch.no_grad():  # applies to the current thread only
            for row, response in zip(rows, responses, strict=True):
                try:
                    outcome = function(row, response)
                except (KeyboardInterrupt, _Abandoned):
                    raise
                except BaseException as error:  # also SystemExit, which would stop the thread
                    outcome = error
                if not clock.next(outcomes, outcome):
                    return
    except _Abandoned:
        return


def _describe(error: BaseException) -> str:
    if isinstance(error, RewardTimeoutError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)[1:]
    at = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"raised {type(error).__name__}: {error}{at}"


def _stack(thread: threading.Thread) -> str:
    """Return the position of the function as ``; it is at file:line``."""
    frame = sys._current_frames().get(thread.ident or -1)
    return "" if frame is None else f"; it is at {frame.f_code.co_filename}:{frame.f_lineno}"


def brief(row: Any) -> str:
    """Format a row on one line, with bytes and long values shortened."""
    if not isinstance(row, Mapping):
        return f"{row!r:.200}"
    shown = {
        key: f"<{len(value)} bytes>" if isinstance(value, (bytes, bytearray)) else f"{value!r:.60}"
        for key, value in row.items()
    }
    return ", ".join(f"{key}={value}" for key, value in shown.items())
