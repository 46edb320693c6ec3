"""What `miniray demo` runs: π by throwing darts, the area of a quarter circle, by parallel actors.

A wheel has the scripts of the other demos beside this file. Its readable twin is in ``examples/``.
Shows the things a parameter server needs later: an actor whose handle is given to other actors,
calls from actor to actor without the driver in between, and a driver that keeps every worker busy
with ``wait``. The result depends on the seed only, not on the engine or on who was faster.
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
from miniray.report.series import spread
from miniray.train.progress import Steps

if TYPE_CHECKING:
    from rich.table import Table

    from miniray.train.rundir import RunDirectory


@dataclasses.dataclass(frozen=True)
class Config:
    """What to run. Every actor draws ``batches`` batches of ``batch_size`` points."""

    actors: int
    batches: int
    batch_size: int
    seed: int


@dataclasses.dataclass
class Tally:
    """Points drawn and how many fell inside the circle."""

    points: int = 0
    hits: int = 0

    def add(self, points: int, hits: int) -> None:
        self.points += points
        self.hits += hits

    @property
    def estimate(self) -> float:
        """4 × the share of hits."""
        return 4 * self.hits / self.points

    @property
    def error(self) -> float:
        """One standard deviation of ``estimate``: 4 √(p(1-p)/n), the binomial's."""
        share = self.hits / self.points
        return 4 * math.sqrt(share * (1 - share) / self.points)


@dataclasses.dataclass(frozen=True)
class Result:
    """What a run found: one tally an actor, their sum, and how the estimate converged."""

    config: Config
    backend: str
    wall_seconds: float
    tallies: list[Tally]
    total: Tally
    convergence: list[tuple[int, float, float]]  # points so far, estimate, error


class Scoreboard:
    """An actor that the darts players report to."""

    def __init__(self, players: int) -> None:
        self._tallies = [Tally() for _ in range(players)]
        self._total = Tally()
        self._history: list[tuple[int, float, float]] = []

    def add(self, player: int, points: int, hits: int) -> tuple[float, float]:
        """Count a batch; returns the estimate of all players together, and its error."""
        self._tallies[player].add(points, hits)
        total = self._total
        total.add(points, hits)
        self._history.append((total.points, total.estimate, total.error))
        return total.estimate, total.error

    def scores(self) -> tuple[list[Tally], Tally, list[tuple[int, float, float]]]:
        return self._tallies, self._total, self._history


class Player:
    """An actor that draws points. It holds the scoreboard's handle and calls it directly."""

    def __init__(self, player: int, seed: int, scoreboard: Any) -> None:
        import numpy as np

        self._player = player
        self._scoreboard = scoreboard
        self._random = np.random.default_rng([seed, player])  # a stream of its own for each actor

    def play(self, points: int) -> tuple[float, float]:
        """Draw a batch, report it, and return the joint estimate so far with its error."""
        xy = self._random.random((2, points))
        xy *= xy
        hits = int(((xy[0] + xy[1]) < 1).sum())
        report = self._scoreboard.add.remote(self._player, points, hits)
        answer: tuple[float, float] = miniray.get(report)
        return answer


def run(config: Config, backend: str | None = None) -> Result:
    """Run it on an engine of its own, with progress on the terminal."""
    with miniray.init(backend=backend) as session:
        scoreboard = miniray.remote(Scoreboard).remote(config.actors)
        make_player = miniray.remote(Player).remote
        players = [make_player(i, config.seed, scoreboard) for i in range(config.actors)]
        start = time.perf_counter()
        _play(players, config)
        wall_seconds = time.perf_counter() - start
        tallies, total, history = miniray.get(scoreboard.scores.remote())
        return Result(config, session.backend, wall_seconds, tallies, total, spread(history, 200))


def _play(players: list[Any], config: Config) -> None:
    """Keep one batch in flight at every player until each has drawn all of its batches."""
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


# -- showing it --------------------------------------------------------------------------------


def table(result: Result) -> Table:
    """The run as a table for the terminal."""
    from rich.table import Table

    shown = Table()
    for name in ("actor", "points", "estimate", "± error"):
        shown.add_column(name, justify="left" if name == "actor" else "right")

    def row(name: str, tally: Tally, style: str = "") -> None:
        cells = f"{tally.points:,}", f"{tally.estimate:.6f}", f"{tally.error:.6f}"
        shown.add_row(name, *cells, style=style)

    for i, tally in enumerate(result.tallies):
        row(str(i), tally)
    shown.add_section()
    row("all", result.total, "bold")
    return shown


def record(run: RunDirectory, result: Result) -> Path:
    """Write it as any run is written, so that every tool reads it; returns the report's path."""
    config = dataclasses.asdict(result.config)
    run.write_run({"launcher": "miniray demo pi", "backend": result.backend, **config})
    for points, estimate, error in result.convergence:
        step = points // result.config.batch_size
        run.append_metrics({"step": step, "pi": estimate, "standard_error": error})
    ended = datetime.datetime.now(datetime.timezone.utc)
    started = ended - datetime.timedelta(seconds=result.wall_seconds)
    actors = [
        {**dataclasses.asdict(t), "estimate": t.estimate, "error": t.error} for t in result.tallies
    ]
    run.finish(started=started.isoformat(), world_size=len(actors), actors=actors)
    return write_report(run.path)


def headline(result: Result) -> str:
    """The outcome in one line."""
    total = result.total
    sigmas = abs(total.estimate - math.pi) / total.error if total.error else math.nan
    return (
        f"π ≈ {total.estimate:.6f} ± {total.error:.6f}, {sigmas:.1f} standard errors from π; "
        f"{total.points / result.wall_seconds / 1e6:.0f} M points/s"
    )
