"""Ranks that step together: process group, data plan, heartbeats, and recovery from failures.

Read ``trainer.py`` first (the driver), then ``rank.py`` (a rank's process).
"""
