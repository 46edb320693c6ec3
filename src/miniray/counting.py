"""Positions of a run as people read them. Files, fields and code count epochs from 0."""

from __future__ import annotations


def format_epoch(epoch: int, epochs: int | None = None, unit: str = "epoch") -> str:
    """Return ``epoch 2 of 3`` for the index 1.

    Args:
        epoch: Index of the epoch.
        epochs: Number of epochs at the end of the run, if it is known.
        unit: The unit that the trainer counts in place of epochs. A step is numbered by the steps
            that were completed before it.
    """
    if unit != "epoch":
        return f"{unit} {epoch}"
    total = f" of {epochs}" if epochs is not None and epoch < epochs else ""
    return f"epoch {epoch + 1}{total}"
