"""A data-parallel run that cannot hang in silence, and a doctor that says what is wrong with it.

::

    import miniray.doctor
    miniray.doctor.attach()          # at the top of any script; or start it with `miniray run`

Importing this imports neither torch nor numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from miniray import lazy

if TYPE_CHECKING:
    from miniray.doctor.api import checksum, phase, step
    from miniray.doctor.attaching import attach
    from miniray.doctor.barriers import barrier
    from miniray.doctor.dataset_check import check_dataset
    from miniray.doctor.reader import read_box, read_run
    from miniray.doctor.stacks import request_stacks

_WHERE = {
    "attach": ".attaching",
    "barrier": ".barriers",
    "check_dataset": ".dataset_check",
    "checksum": ".api",
    "phase": ".api",
    "read_box": ".reader",
    "read_run": ".reader",
    "request_stacks": ".stacks",
    "step": ".api",
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

__getattr__, __dir__ = lazy.names(__name__, _WHERE)
