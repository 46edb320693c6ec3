"""One strategy a file. Importing this package registers all of them."""

from miniray.ps.strategies import (
    average,
    diloco,
    ema,
    fedadagrad,
    fedadam,
    fedyogi,
    krum,
    median,
    momentum,
    trimmed_mean,
    weighted,
)
from miniray.ps.strategies.base import (
    Strategy,
    check_strategy,
    make_strategy,
    register_strategy,
    strategy_names,
)

__all__ = [
    "Strategy",
    "average",
    "check_strategy",
    "diloco",
    "ema",
    "fedadagrad",
    "fedadam",
    "fedyogi",
    "krum",
    "make_strategy",
    "median",
    "momentum",
    "register_strategy",
    "strategy_names",
    "trimmed_mean",
    "weighted",
]
