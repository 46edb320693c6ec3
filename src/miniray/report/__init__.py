"""A run as one page: ``write_report(run_dir)`` makes ``report.html`` from the files of a run.

The page needs nothing else: no network, no script, no other file. Whatever of a run is missing or
damaged (a killed driver, boxes of ``attach`` without a trainer) is left out, and said. Needs no
torch.
"""

from miniray.report.page import write_report
from miniray.report.run import Run, find_runs, read

__all__ = ["Run", "find_runs", "read", "write_report"]
