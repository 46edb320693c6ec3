"""What a server counts. ``get_stats()`` is a plain dict of numbers, strings and lists."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import Any

from miniray.ps.combine import Tally

PHASES = ("collect", "combine", "distribute")


@dataclasses.dataclass
class Stats:
    """Totals since the server started, and the last sync."""

    num_syncs: int = 0
    failed_syncs: int = 0
    num_pushes: int = 0
    num_workers: int = 0
    bytes: int = 0
    last_bytes: int = 0
    seconds: dict[str, float] = dataclasses.field(
        default_factory=lambda: dict.fromkeys(PHASES, 0.0)
    )
    last_seconds: dict[str, float] = dataclasses.field(
        default_factory=lambda: dict.fromkeys(PHASES, 0.0)
    )
    last_change_norm: float | None = None
    divergence: dict[str, float] | None = None
    transport: dict[int, str] = dataclasses.field(default_factory=dict)
    skipped: Counter[Any] = dataclasses.field(default_factory=Counter)
    last_error: str | None = None

    def measured(self, tally: Tally, first: bool) -> None:
        """The last change is unknown after the first sync: there was nothing to change."""
        self.last_change_norm = None if first else math.sqrt(tally.change)
        apart = [math.sqrt(max(square, 0.0)) for square in tally.distances]
        self.divergence = {"max": max(apart), "mean": sum(apart) / len(apart)}

    def synced(self, workers: int, bytes: int, seconds: dict[str, float]) -> None:
        self.num_syncs += 1
        self.num_workers = workers
        self.bytes += bytes
        self.last_bytes = bytes
        self.last_seconds = seconds
        for phase, value in seconds.items():
            self.seconds[phase] += value
        self.last_error = None

    def failed(self, error: BaseException) -> None:
        self.failed_syncs += 1
        self.last_error = f"{type(error).__name__}: {error}"

    def as_dict(self) -> dict[str, Any]:
        found = dataclasses.asdict(self)
        found["skipped"] = dict(self.skipped)
        return found
