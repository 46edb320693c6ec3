"""Decide how a model is divided into pipeline stages and tensor-parallel shards.

Read ``planning.py`` first.
"""
