"""The live page over run directories: ``miniray dashboard``.

::

    miniray.dashboard.serve(Path("runs"))       # prints its address, serves until Ctrl-C

Reads run directories and nothing else: a run that lives, hangs or died last week is shown alike,
and its ranks do nothing for it. Needs plotly (``pip install 'miniray[dashboard]'``), and no torch.
"""

from miniray.dashboard.server import Server, serve

__all__ = ["Server", "serve"]
