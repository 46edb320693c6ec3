"""Batches of each worker: plans, seeds, shards of loaders, and positions inside an epoch."""

from __future__ import annotations
