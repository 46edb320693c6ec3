"""Heartbeats of ranks, detection of hangs, and the root cause of a failure."""
