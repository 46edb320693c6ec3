"""Checkpoints on disk: their format, which ones to keep, and copies on other storage."""
