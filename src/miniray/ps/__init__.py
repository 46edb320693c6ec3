"""Parameter server: the weights of several workers combined by a strategy.

``docs/parameter-server.md`` is the guide.
"""

from miniray.ps.create import ParameterServer, create_parameter_server
from miniray.ps.strategies import Strategy, check_strategy, register_strategy, strategy_names
from miniray.ps.weights import to_host

__all__ = [
    "ParameterServer",
    "Strategy",
    "check_strategy",
    "create_parameter_server",
    "register_strategy",
    "strategy_names",
    "to_host",
]
