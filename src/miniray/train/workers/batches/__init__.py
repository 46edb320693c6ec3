"""The batches of an epoch for each worker: plan, seeds, shards of loaders, position."""

from __future__ import annotations
