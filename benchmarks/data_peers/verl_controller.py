"""verl as it runs: one controller reads all rows and makes the batches of all ranks."""

from __future__ import annotations

from data_peers.verl_ranks import Loader, prepare

__all__ = ["Loader", "prepare"]
