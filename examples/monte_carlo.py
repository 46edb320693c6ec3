"""Estimate π with four actors that report to a fifth.

python examples/monte_carlo.py [points an actor]
"""

import math
import sys

import numpy as np

import miniray


@miniray.remote
class Scoreboard:
    def __init__(self):
        self.points = self.hits = 0

    def add(self, points, hits):
        self.points += points
        self.hits += hits

    def estimate(self):
        share = self.hits / self.points
        return 4 * share, 4 * math.sqrt(share * (1 - share) / self.points)


@miniray.remote
class Player:
    def __init__(self, seed, scoreboard):
        self.random = np.random.default_rng(seed)
        self.scoreboard = scoreboard  # the handle of another actor: called from here, directly

    def play(self, points):
        x, y = self.random.random((2, points))
        hits = int((x * x + y * y < 1).sum())
        miniray.get(self.scoreboard.add.remote(points, hits))


if __name__ == "__main__":
    points = int(sys.argv[1]) if len(sys.argv) > 1 else 5_000_000
    with miniray.init():
        scoreboard = Scoreboard.remote()
        players = [Player.remote(seed, scoreboard) for seed in range(4)]
        miniray.get([player.play.remote(points) for player in players])
        value, error = miniray.get(scoreboard.estimate.remote())
        print(f"pi is {value:.5f} +- {error:.5f}")
