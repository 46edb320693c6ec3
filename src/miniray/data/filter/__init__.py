"""Evaluate a filter once per run and keep its answers on disk."""
