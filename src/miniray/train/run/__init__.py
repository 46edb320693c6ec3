"""What a run leaves on disk and shows on the terminal: its directory, checkpoints and progress.

Read ``session.py`` first, then ``directory.py``. Nothing here knows how workers train.
"""
