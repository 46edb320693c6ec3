"""The run directory, checkpoints, loggers and progress output of a run.

Read ``session.py`` first, then ``directory.py``. This package doesn't depend on how workers train.
"""
