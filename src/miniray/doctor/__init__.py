"""A data-parallel run that cannot hang in silence, and a doctor that says what is wrong with it.

::

    import miniray.doctor
    miniray.doctor.attach()          # at the top of any script; or start it with `miniray run`

Importing this imports neither torch nor numpy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from miniray.doctor.api import phase, step
    from miniray.doctor.attaching import attach
    from miniray.doctor.barriers import barrier
    from miniray.doctor.checksums import checksum
    from miniray.doctor.dataset_check import check_dataset
    from miniray.doctor.reader import read_box, read_run
    from miniray.doctor.stacks import request_stacks

_WHERE = {
    "attach": "miniray.doctor.attaching",
    "barrier": "miniray.doctor.barriers",
    "check_dataset": "miniray.doctor.dataset_check",
    "checksum": "miniray.doctor.checksums",
    "phase": "miniray.doctor.api",
    "read_box": "miniray.doctor.reader",
    "read_run": "miniray.doctor.reader",
    "request_stacks": "miniray.doctor.stacks",
    "step": "miniray.doctor.api",
}

__all__ = [
    "attach",
    "barrier",
    "check_dataset",
    "checksum",
    "phase",
    "read_box",
    "read_run",
    "request_stacks",
    "step",
]


def __getattr__(name: str) -> Any:
    """The public functions, imported when first used."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = value
    return value
