"""Demo of actors for ``miniray demo``: estimate π by random sampling, with several actors.

Packages contain the scripts of the other demos in this directory. ``examples/`` has a readable
version of this demo. It uses what a parameter server needs: handles passed between actors, calls
from actor to actor, and a driver that keeps all workers busy with ``wait``. The result depends only
on the seed, not on the engine or the timing.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import miniray
from miniray.report import write_report
from miniray.report.series import sample_evenly
from miniray.train.run.progress import Steps

if TYPE_CHECKING:
    from rich.table import Table

    from miniray.train.run.directory import RunDirectory


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings. Each actor draws ``batches`` batches of ``batch_size`` points."""

    actors: int
    batches: int
    batch_size: int
    seed: int


@dataclasses.dataclass
class CircleCounts:
    """Points drawn and how many fell inside the circle."""

    points: int = 0
    hits: int = 0

    def add(self, points: int, hits: int) -> None:
        self.points += points
        self.hits += hits

    @property
    def estimate(self) -> float:
        """The estimate of π: 4 × the share of hits."""
        return 4 * self.hits / self.points

    @property
    def error(self) -> float:
        """The standard error of ``estimate``: 4 √(p(1-p)/n)."""
        share = self.hits / self.points
        return 4 * math.sqrt(share * (1 - share) / self.points)


@dataclasses.dataclass(frozen=True)
class Result:
    """The outcome: counts per actor, their sum, and the convergence of the estimate."""

    config: Config
    backend: str
    wall_seconds: float
    counts: list[CircleCounts]
    total: CircleCounts
    convergence: list[tuple[int, float, float]]  # points so far, estimate, error


class Scoreboard:
    """Actor that collects the results of the players."""

    def __init__(self, players: int) -> None:
        self._counts = [CircleCounts() for _ in range(players)]
        self._total = CircleCounts()
        self._history: list[tuple[int, float, float]] = []

    def add(self, player: int, points: int, hits: int) -> tuple[float, float]:
        """Count a batch, and return the joint estimate of all players and its error."""
        self._counts[player].add(points, hits)
        total = self._total
        total.add(points, hits)
        self._history.append((total.points, total.estimate, total.error))
        return total.estimate, total.error

    def scores(self) -> tuple[list[CircleCounts], CircleCounts, list[tuple[int, float, float]]]:
        return self._counts, self._total, self._history


class Player:
    """Actor that draws points. It calls the scoreboard directly, through its handle."""

    def __init__(self, player: int, seed: int, scoreboard: Any) -> None:
        import numpy as np

        self._player = player
        self._scoreboard = scoreboard
        self._random = np.random.default_rng([seed, player])  # independent stream per actor

    def play(self, points: int) -> tuple[float, float]:
        """Draw a batch, report it, and return the joint estimate so far and its error."""
        xy = self._random.random((2, points))
        xy *= xy
        hits = int(((xy[0] + xy[1]) < 1).sum())
        report = self._scoreboard.add.remote(self._player, points, hits)
        answer: tuple[float, float] = miniray.get(report)
        return answer


def run(config: Config, backend: str | None = None) -> Result:
    """Run the demo on a new engine, with progress on the terminal."""
    with miniray.init(backend=backend) as session:
        scoreboard = miniray.remote(Scoreboard).remote(config.actors)
        make_player = miniray.remote(Player).remote
        players = [make_player(i, config.seed, scoreboard) for i in range(config.actors)]
        start = time.perf_counter()
        _play(players, config)
        wall_seconds = time.perf_counter() - start
        counts, total, history = miniray.get(scoreboard.scores.remote())
        return Result(
            config, session.backend, wall_seconds, counts, total, sample_evenly(history, 200)
        )


def _play(players: list[Any], config: Config) -> None:
    """Keep one batch in flight per player until all players have drawn all batches."""
    remaining = [config.batches - 1] * len(players)
    running = {p.play.remote(config.batch_size): i for i, p in enumerate(players)}
    with Steps(config.actors * config.batches, "darts", "batches") as progress:
        while running:
            ready, _ = miniray.wait(list(running))
            estimate, error = miniray.get(ready[0])
            player = running.pop(ready[0])
            if remaining[player]:
                remaining[player] -= 1
                running[players[player].play.remote(config.batch_size)] = player
            progress.advance(1, f"π ≈ {estimate:.5f} ± {error:.5f}")


# -- output ------------------------------------------------------------------------------------


def table(result: Result) -> Table:
    """Return the result as a table for the terminal."""
    from rich.table import Table

    shown = Table()
    for name in ("actor", "points", "estimate", "± error"):
        shown.add_column(name, justify="left" if name == "actor" else "right")

    def row(name: str, counts: CircleCounts, style: str = "") -> None:
        cells = f"{counts.points:,}", f"{counts.estimate:.6f}", f"{counts.error:.6f}"
        shown.add_row(name, *cells, style=style)

    for i, counts in enumerate(result.counts):
        row(str(i), counts)
    shown.add_section()
    row("all", result.total, "bold")
    return shown


def record(run: RunDirectory, result: Result) -> Path:
    """Write the result as a run directory, and return the path of the report."""
    config = dataclasses.asdict(result.config)
    run.write_run({"launcher": "miniray demo pi", "backend": result.backend, **config})
    for points, estimate, error in result.convergence:
        step = points // result.config.batch_size
        run.append_metrics({"step": step, "pi": estimate, "standard_error": error})
    ended = datetime.datetime.now(datetime.timezone.utc)
    started = ended - datetime.timedelta(seconds=result.wall_seconds)
    actors = [
        {**dataclasses.asdict(t), "estimate": t.estimate, "error": t.error} for t in result.counts
    ]
    run.finish(started=started.isoformat(), world_size=len(actors), actors=actors)
    return write_report(run.path)


def headline(result: Result) -> str:
    """Return the outcome in one line."""
    total = result.total
    sigmas = abs(total.estimate - math.pi) / total.error if total.error else math.nan
    return (
        f"π ≈ {total.estimate:.6f} ± {total.error:.6f}, {sigmas:.1f} standard errors from π; "
        f"{total.points / result.wall_seconds / 1e6:.0f} M points/s"
    )
