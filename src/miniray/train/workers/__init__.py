"""Independent workers: their actors, data shards, parameter sync and evaluation.

Read ``group.py`` first. Workers that step together are in ``lockstep``.
"""
