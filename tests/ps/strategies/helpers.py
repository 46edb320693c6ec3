"""Running a strategy by itself, on short lists of numbers."""

import numpy as np

from miniray.ps.blocks import Crew, whole
from miniray.ps.combine import Combiner
from miniray.ps.strategies import make_strategy
from miniray.ps.weights import Layout


class Run:
    """``run(workers)`` is a sync; ``start`` are the global weights before the first one."""

    def __init__(self, name, start=None, **options):
        self.strategy = make_strategy(name, options)
        self.current = None if start is None else [np.array(start, np.float64)]
        self.combiner = None

    def __call__(self, *workers, weights=None):
        sources = [[np.array(w, np.float64)] for w in workers]
        if self.combiner is None:
            layout = Layout(sources[0])
            ranges = whole([0], layout.leaves)
            self.combiner = Combiner(self.strategy, layout.leaves, ranges, Crew(1))
        shares = weights or [1 / len(workers)] * len(workers)
        distances = self.combiner.distances(sources) if self.strategy.uses_distances else None
        shares = list(self.strategy.weigh(shares, distances))
        used = [i for i, share in enumerate(shares) if share]
        out = np.empty_like(sources[0][0])
        self.combiner.combine(
            self.current, [sources[i] for i in used], [shares[i] for i in used], [out]
        )
        self.combiner.commit()
        self.current = [out]
        return out.tolist()

    def buffer(self, name):
        return self.combiner.buffers.state()[name][0].tolist()
